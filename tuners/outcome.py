"""What one trial gave back, in a form small enough to store with the trial. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from kllm.results.schema import Direction
from kllm.tuners.objective import Slo

State = Literal["complete", "stopped", "failed"]

MAX_TICKS = 60  # progress samples stored with a trial


class Served(NamedTuple):
    """One request that ended. Times are seconds from the start of the run, or durations."""

    finished_s: float
    ttft_s: float
    tpot_s: float | None  # None: a single output token
    e2e_s: float
    isl: int
    osl: int
    ok: bool  # ran to its end (not aborted, no error)


class Tick(NamedTuple):
    """How far a run was at one moment."""

    elapsed_s: float
    output_tokens: int  # of all requests so far, running ones included
    running: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a stopping rule is told while a trial runs."""

    tick: Tick
    finished: Sequence[Served]  # since the last time
    num_requests: int
    num_output_tokens: int  # of the whole workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One trial's run.

    A stopped run (it could not win any more) keeps what it measured until then.
    """

    state: State
    reason: str = ""  # why not complete, one sentence
    too_large: bool = False  # it failed because the machine's memory does not hold it
    start_s: float = 0.0  # weights and engine, before the run
    warmup_s: float = 0.0
    run_s: float = 0.0
    total_s: float = 0.0  # all that the trial took
    peak_memory_bytes: int | None = None
    num_requests: int = 0
    num_output_tokens: int = 0
    fidelity: Literal["real", "rank-slice"] = "real"
    ranks: int = 1  # of the layout
    requests: tuple[Served, ...] = ()
    ticks: tuple[Tick, ...] = ()


def to_plain(outcome: Outcome) -> dict[str, Any]:
    """JSON data."""
    data: dict[str, Any] = msgspec.to_builtins(outcome)
    return data


def from_plain(data: Mapping[str, Any]) -> Outcome:
    """The outcome that `to_plain` wrote.

    Raises:
        msgspec.ValidationError: the data is something else.
    """
    return msgspec.convert(dict(data), Outcome)


def thin(ticks: Sequence[Tick]) -> tuple[Tick, ...]:
    """At most MAX_TICKS of them, evenly, the last one always kept."""
    if len(ticks) <= MAX_TICKS:
        return tuple(ticks)
    picks = np.linspace(0, len(ticks) - 1, MAX_TICKS).round().astype(int)
    return tuple(ticks[i] for i in picks)


PER_GPU = "goodput_per_gpu_tokens_per_s"  # of several ranks; on a CPU a rank stands for a GPU

# name: (unit, direction)
METRICS: dict[str, tuple[str, Direction]] = {
    "goodput_tokens_per_s": ("tokens/s", "higher"),
    PER_GPU: ("tokens/s", "higher"),
    "goodput_requests_per_s": ("requests/s", "higher"),
    "output_tokens_per_s": ("tokens/s", "higher"),
    "requests_per_s": ("requests/s", "higher"),
    "attainment": ("", "higher"),
    "slo_ratio": ("", "lower"),
    **{
        f"{what}_p{q}_ms": ("ms", "lower") for what in ("ttft", "tpot", "e2e") for q in (50, 90, 99)
    },
    "peak_memory_gib": ("GiB", "lower"),
}


def measure(outcome: Outcome, slo: Slo) -> dict[str, float]:
    """The metrics of METRICS that a run gives; empty for a failed one.

    Goodput counts output tokens of requests that met every limit (Zhong et al. 2024, DistServe).
    Attainment is the share of ended requests that did. `slo_ratio` is the time over its limit
    that the target share of requests stays within: at most 1 where the SLO is met. A stopped
    run's rates count the tokens of requests that were still running, weighed with the attainment
    of those that had ended.
    """
    rows, seconds = outcome.requests, outcome.run_s
    if outcome.state == "failed" or seconds <= 0:
        return {}
    good = [row for row in rows if slo.met_by(row)]
    attainment = len(good) / len(rows) if rows else 0.0
    if outcome.state == "complete":
        tokens = float(sum(row.osl for row in rows if row.ok))
        good_tokens = float(sum(row.osl for row in good))
    else:
        tokens = float(outcome.ticks[-1].output_tokens) if outcome.ticks else 0.0
        good_tokens = tokens * attainment
    values = {
        "goodput_tokens_per_s": good_tokens / seconds,
        "goodput_requests_per_s": len(good) / seconds,
        "output_tokens_per_s": tokens / seconds,
        "requests_per_s": len(rows) / seconds,
        "attainment": attainment,
    }
    if outcome.ranks > 1:
        values[PER_GPU] = values["goodput_tokens_per_s"] / outcome.ranks
    if slo.limited and rows:
        ratios = [slo.ratio(row) for row in rows]
        quantile = np.percentile(ratios, 100 * slo.attainment, method="inverted_cdf")
        values["slo_ratio"] = float(quantile)
    for what in ("ttft", "tpot", "e2e"):
        seen = [v for row in rows if (v := getattr(row, f"{what}_s")) is not None]
        for q in (50, 90, 99):
            if seen:
                values[f"{what}_p{q}_ms"] = float(np.percentile(seen, q)) * 1e3
    if outcome.peak_memory_bytes is not None:
        values["peak_memory_gib"] = outcome.peak_memory_bytes / 2**30
    return {name: value for name, value in values.items() if math.isfinite(value)}
