"""Requests for both layouts: loads whose lengths are alike, and skewed ones.

All requests of a load arrive at once, so that both layouts see the same arrivals however fast
they are.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from kllm.bench.workloads import Lengths, TraceRow, Workload
from kllm.engine.graphs import batch_bucket

LONG = 8  # how many times longer a long prompt is than the short ones beside it
WARM_PROMPT = 2  # tokens; one token would count as a decode

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


def warm_load(concurrency: int, isl: int, token_budget: int, seed: int = 0) -> Workload:
    """Shapes of a load in little time: a full chunk of long prompts, then every batch size once.

    Args:
        token_budget: of a step of all groups.

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
