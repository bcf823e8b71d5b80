"""`kllm bench throughput`: tokens and requests a second under a load, with what users wait.

The sweep raises the concurrency (or takes the loads it is given) until more requests in flight
no longer bring more tokens: that knee is the boundary.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kllm.bench.base import Context, warming_up
from kllm.bench.costmodel import CostModel
from kllm.bench.record import Record
from kllm.bench.serve_loop import ServingEngine, WorkloadRun, request_rows, run_workload, warm_up
from kllm.bench.timing import Failed, attempt
from kllm.bench.workloads import Workload
from kllm.errors import CapacityError, ConfigError
from kllm.hardware import cached_ceilings, mark_beaten
from kllm.models.load import resolve
from kllm.results.compare import number
from kllm.results.schema import Direction

KNEE_GAIN = 1.05  # less than this much more throughput from the next load: it is saturated
OPEN_LOOP_BATCH = 256  # slots for loads whose concurrency nobody states
PERCENTILES = (50, 90, 99)
_RATES = {
    "output_tokens_per_s": "tokens/s",
    "total_tokens_per_s": "tokens/s",
    "requests_per_s": "requests/s",
}
_TIMES = ("ttft_s", "tpot_s", "e2e_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputBench:
    """One point for each load."""

    loads: Sequence[Workload]

    def __post_init__(self) -> None:
        if not self.loads:
            raise ConfigError("throughput needs at least one load")

    @property
    def name(self) -> str:
        """As it is called on the command line."""
        return "throughput"

    def workload(self) -> Mapping[str, Any]:
        """Options that two comparable runs share."""
        return {"loads": [load.to_dict() for load in self.loads]}

    def measure(self, ctx: Context, record: Record) -> None:
        """Run every load `ctx.repeats` times."""
        slots = max(load.concurrency or OPEN_LOOP_BATCH for load in self.loads)
        longest = max(load.max_tokens for load in self.loads)
        with ctx.engine(max_batch=slots, max_tokens=longest) as engine:
            for load in self.loads:
                self._point(ctx, record, engine, load)
        self._check_ceilings(ctx, record)
        ctx.progress("done", len(self.loads), len(self.loads))

    def _check_ceilings(self, ctx: Context, record: Record) -> None:
        """Note when a load ran faster than cached ceilings allow; none are measured for this."""
        resolved = resolve(ctx.config)
        found = cached_ceilings(resolved.device)
        if found is None:
            return
        model = CostModel.of(resolved, found)
        rates = {row["load"]: row["output_tokens_per_s"] for row in record.ok_rows("sweep")}
        if any(rates.get(label(load), 0.0) > most_tokens_per_s(model, load) for load in self.loads):
            record.notes.append(mark_beaten(found))

    def _point(self, ctx: Context, record: Record, engine: ServingEngine, load: Workload) -> None:
        first = {"concurrency": load.concurrency} if load.closed else {"rate_per_s": load.rate}
        point = {**first, "load": label(load), "isl": str(load.isl), "osl": str(load.osl)}
        found = attempt(lambda: self._repeats(ctx, record, engine, load))
        if isinstance(found, Failed):
            record.row("sweep", {**point, "state": "failed", "reason": found.reason})
        else:
            record.row("sweep", {**point, **_row(found), "state": "ok"}, _units())

    def _repeats(
        self, ctx: Context, record: Record, engine: ServingEngine, load: Workload
    ) -> list[WorkloadRun]:
        what, at = label(load), (self.loads.index(load), len(self.loads))
        ctx.progress(warming_up(what), *at)
        warm_up(engine, load)
        ctx.progress(what, *at)
        found = []
        for repeat in range(ctx.repeats):
            run = run_workload(engine, load)
            if run.failure:
                raise CapacityError(run.failure)
            found.append(run)
            _add(record, load, run)
            about = {"load": label(load), "repeat": repeat}
            record.details("requests", [about | row for row in request_rows(run)])
        return found

    def conclude(self, record: Record) -> None:
        """Name the best load, and where more load stops paying."""
        rows = record.ok_rows("sweep")
        if not rows:
            record.verdict = "No load could be measured."
            return
        best = max(rows, key=lambda row: row["output_tokens_per_s"])
        rate, ttft, tpot = (
            number(best[name]) for name in ("output_tokens_per_s", "ttft_p50_ms", "tpot_p50_ms")
        )
        record.verdict = (
            f"Most output at {best['load']}: {rate} tokens/s with TTFT p50 {ttft} ms and "
            f"TPOT p50 {tpot} ms."
        )
        record.notes.append(
            "A load is written as prompt tokens:output tokens, or its name, and then the requests "
            "in flight, or with /s those a second."
        )
        record.boundary = _boundary(rows)


def most_tokens_per_s(model: CostModel, load: Workload) -> float:
    """Output that a closed load cannot pass: all requests decode all the time, prefill is free."""
    if load.concurrency is None:
        return math.inf
    shortest = min(row.isl for row in load.shapes())
    return load.concurrency / model.decode_floor(load.concurrency, shortest).seconds


def _boundary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where more requests in flight stop paying, along a sweep that changes nothing else."""
    if len(rows) == 1:
        return "One load does not show where throughput stops growing."
    if len({(row["isl"], row["osl"]) for row in rows}) > 1 or not all(
        row.get("concurrency") for row in rows
    ):
        return "The loads differ in more than their concurrency: no boundary along it."
    for one, two in itertools.pairwise(rows):
        if two["output_tokens_per_s"] < KNEE_GAIN * one["output_tokens_per_s"]:
            return (
                f"Beyond {one['load']} the next load brings less than {KNEE_GAIN - 1:.0%} more "
                "output."
            )
    swept = f"{rows[0]['load']} to {rows[-1]['load']}"
    return f"In the swept range ({swept}) more load always brought more output."


def label(load: Workload) -> str:
    """ISL:OSL:C or ISL:OSL:R/s, or the name of a preset or trace with its load."""
    if load.closed:
        amount = str(load.concurrency)
    else:
        amount = f"{load.rate:g}/s" if load.rate else "recorded arrivals"
    custom = load.name == "custom" or ":" in load.name
    return f"{load.isl}:{load.osl}:{amount}" if custom else f"{load.name}:{amount}"


def _values(run: WorkloadRun) -> dict[str, tuple[float, str]]:
    """Name to (value, unit) of everything that is reported for a run."""
    values = {name: (float(getattr(run, name)), unit) for name, unit in _RATES.items()}
    for name in _TIMES:
        stem = name.removesuffix("_s")
        values |= {f"{stem}_p{q}_ms": (run.percentile(name, q) * 1e3, "ms") for q in PERCENTILES}
        values[f"{stem}_mean_ms"] = (run.mean(name) * 1e3, "ms")
    return values


def _add(record: Record, load: Workload, run: WorkloadRun) -> None:
    for name, (value, unit) in _values(run).items():
        direction: Direction = "lower" if unit == "ms" else "higher"
        record.add(f"{name}.{label(load)}", value, unit=unit, direction=direction)


def _row(found: Sequence[WorkloadRun]) -> dict[str, float]:
    values = [_values(run) for run in found]
    return {name: statistics.median(v[name][0] for v in values) for name in values[0]}


def _units() -> dict[str, str]:
    times = [n.removesuffix("_s") for n in _TIMES]
    stems = [f"p{q}" for q in PERCENTILES] + ["mean"]
    return _RATES | {f"{time}_{stem}_ms": "ms" for time in times for stem in stems}
