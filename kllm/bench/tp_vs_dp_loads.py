"""Requests for both layouts, who gets which under request-DP, and skewed mixes of lengths.

All requests of a load arrive at once, so that both layouts see the same arrivals however fast
they are. A slice of request-DP serves the requests of its own group: those that placement by
tokens (`kllm.scheduler.placement`) gives it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kllm.bench.workloads import Lengths, TraceRow, Workload
from kllm.engine.graphs import batch_bucket

LONG = 8  # how many times longer a long prompt is than the short ones beside it
WARM_PROMPT = 2  # tokens; one token would count as a decode

Placement = Literal["tokens", "count"]
Mix = Literal["even", "periodic", "giant"]


def burst(rows: Sequence[TraceRow], *, name: str, seed: int = 0) -> Workload:
    """A load of these lengths whose requests arrive at once."""
    return Workload(
        name=name,
        isl=Lengths(min(r.isl for r in rows), max(r.isl for r in rows)),
        osl=Lengths(min(r.osl for r in rows), max(r.osl for r in rows)),
        num_requests=len(rows),
        concurrency=len(rows),
        seed=seed,
        trace=tuple(rows),
    )


def mixed(mix: Mix, *, requests: int, isl: int, osl: int, ranks: int, seed: int = 0) -> Workload:
    """Requests with nearly the same number of prompt tokens in all, spread as `mix` says.

    Args:
        mix: "even": all alike; "periodic": the first of every `ranks` requests is LONG times as
            long as the others, which no placement by number sees; "giant": the first prompt has
            half of all tokens, which no placement can balance.
        isl: mean prompt tokens.
    """
    if mix == "even" or requests == 1:
        lengths = [isl] * requests
    elif mix == "periodic":
        long = -(-requests // ranks)
        short = max(1, requests * isl // (LONG * long + requests - long))
        lengths = [short * (1 if i % ranks else LONG) for i in range(requests)]
    else:
        half = requests * isl // 2
        lengths = [half] + [max(1, half // (requests - 1))] * (requests - 1)
    rows = [TraceRow(0.0, length, osl) for length in lengths]
    return burst(rows, name=f"{mix} {isl}:{osl}:{requests}", seed=seed)


def place(tokens: Sequence[int], groups: int, by: Placement = "tokens") -> list[list[int]]:
    """Which requests each group gets when all of them wait; the engine places by tokens.

    Args:
        tokens: of each prompt, in order of arrival.
    """
    held: list[list[int]] = [[] for _ in range(groups)]
    load = [0] * groups
    for i, count in enumerate(tokens):
        group = i % groups if by == "count" else load.index(min(load))
        held[group].append(i)
        load[group] += count
    return held


@dataclass(frozen=True, slots=True)
class Share:
    """The load of one group, and for how many requests of the deployment it stands."""

    load: Workload
    weight: int


def shares(load: Workload, groups: int, by: Placement = "tokens") -> list[Share]:
    """The loads of the busiest group and, where groups differ, of the middle one of the others.

    Together they stand for the whole deployment: its slowest rank, and what most requests see.
    """
    rows = load.shapes()
    held = [[rows[i] for i in group] for group in place([r.isl for r in rows], groups, by)]
    held = sorted((group for group in held if group), key=lambda g: -sum(r.isl for r in g))
    kinds = Counter(tuple(group) for group in held)
    busiest = held[0]
    if len(kinds) == 1:
        return [Share(burst(busiest, name=load.name, seed=load.seed), len(rows))]
    others = [group for group in held if group != busiest]
    alike = len(busiest) * (len(held) - len(others))
    middle = others[len(others) // 2]
    return [
        Share(burst(busiest, name=load.name, seed=load.seed), alike),
        Share(burst(middle, name=load.name, seed=load.seed), len(rows) - alike),
    ]


def warm_load(concurrency: int, isl: int, token_budget: int, seed: int = 0) -> Workload:
    """Shapes of a load in little time: a full chunk of long prompts, then every batch size once.

    Requests end a bucket of batch sizes at a time, so that each decode graph is captured.
    """
    long = min(concurrency, 1 + token_budget // isl)
    sizes = sorted({batch_bucket(n) for n in range(1, concurrency + 1)})
    rows = []
    for i in range(concurrency):
        larger = sum(size > i for size in sizes)  # buckets that need this request
        # Two steps each, because prompts of different steps are a token apart. The first
        # request is the long one and stays to the end: block tables keep their width.
        rows.append(TraceRow(0.0, isl if i < long else min(isl, WARM_PROMPT), 1 + 2 * larger))
    return replace(burst(rows, name="warm-up", seed=seed), concurrency=concurrency)
