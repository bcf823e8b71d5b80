"""`kllm bench latency`: how long a token takes at each batch size, and how far from its floor.

All requests of a batch arrive at once. A decode step counts when the whole batch makes one token
each and nothing is prefilled in between.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kllm.bench.base import Context, doubling, warming_up
from kllm.bench.costmodel import CostModel
from kllm.bench.record import Record
from kllm.bench.serve_loop import ServingEngine, WorkloadRun, run_workload, warm_up
from kllm.bench.timing import Failed, attempt
from kllm.bench.workloads import Lengths, Workload
from kllm.errors import CapacityError, ConfigError
from kllm.hardware import Ceilings, ceilings, mark_beaten
from kllm.models.load import resolve
from kllm.results.compare import number
from kllm.results.stats import median_ci

KNEE = 1.5  # a step this many times longer than the smallest batch's: batching is no longer free
UNITS = {
    "step_ms": "ms",
    "step_ms_lo": "ms",
    "step_ms_hi": "ms",
    "floor_ms": "ms",
    "ttft_ms": "ms",
    "tpot_ms": "ms",
    "output_tokens_per_s": "tokens/s",
}


@dataclass(frozen=True, slots=True)
class _Repeat:
    """One run of one batch."""

    step_s: float  # median decode step
    ttft_s: float  # mean over the requests
    tpot_s: float
    output_tokens_per_s: float  # of the decode steps


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyBench:
    """Sweep over the batch size."""

    batches: Sequence[int] = doubling(64)
    isl: int = 512  # prompt tokens
    osl: int = 128  # output tokens

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1:
            raise ConfigError(f"batch sizes must be 1 or more, got {list(self.batches)}")
        if self.isl < 1 or self.osl < 2:
            raise ConfigError(
                f"latency needs at least 1 prompt and 2 output tokens, got {self.isl}, {self.osl}"
            )

    @property
    def name(self) -> str:
        """As it is called on the command line."""
        return "latency"

    def workload(self) -> Mapping[str, Any]:
        """Options that two comparable runs share."""
        return {"isl": self.isl, "osl": self.osl, "batches": list(self.batches)}

    def measure(self, ctx: Context, record: Record) -> None:
        """Run every batch size `ctx.repeats` times, smallest first."""
        resolved = resolve(ctx.config)
        found = ceilings(resolved.device)
        cost = CostModel.of(resolved, found)
        batches = sorted(set(self.batches))
        with ctx.engine(max_batch=batches[-1], max_tokens=self.isl + self.osl) as engine:
            for batch in batches:
                floor = cost.decode_floor(batch, self.isl + self.osl // 2)
                self._point(ctx, record, engine, batch, floor.seconds)
        record.notes.append(_floor_note(found, resolved.dtype))
        if any(row["achieved_over_floor"] < 1 for row in record.ok_rows("sweep")):
            record.notes.append(mark_beaten(found))
        ctx.progress("done", len(batches), len(batches))

    def _point(
        self, ctx: Context, record: Record, engine: ServingEngine, batch: int, floor_s: float
    ) -> None:
        found = attempt(lambda: self._repeats(ctx, record, engine, batch))
        if isinstance(found, Failed):
            row = {"batch": batch, "state": "failed", "reason": found.reason}
            record.row("sweep", row)
        else:
            record.row("sweep", _row(batch, found, floor_s), UNITS)

    def _repeats(
        self, ctx: Context, record: Record, engine: ServingEngine, batch: int
    ) -> list[_Repeat]:
        batches = sorted(set(self.batches))
        what, at = f"batch {batch}", (batches.index(batch), len(batches))
        ctx.progress(warming_up(what), *at)
        warm_up(engine, self._load(batch, ctx.seed))
        ctx.progress(what, *at)
        found = []
        for repeat in range(ctx.repeats):
            run = run_workload(engine, self._load(batch, ctx.seed + 1 + repeat))
            found.append(_summary(run, batch))
            _add(record, batch, found[-1])
        return found

    def _load(self, batch: int, seed: int) -> Workload:
        return Workload(
            isl=Lengths(self.isl),
            osl=Lengths(self.osl),
            num_requests=batch,
            concurrency=batch,
            seed=seed,
        )

    def conclude(self, record: Record) -> None:
        """Say how far from the floor the ends of the sweep are, and where batching costs."""
        rows = record.ok_rows("sweep")
        if not rows:
            record.verdict = "No batch size could be measured."
            return
        first, last = rows[0], rows[-1]
        record.verdict = "; ".join(
            f"batch {row['batch']}: {number(row['step_ms'])} ms a decode step, "
            f"{row['achieved_over_floor']:.3g} times its floor"
            for row in ([first] if first is last else [first, last])
        )
        record.boundary = _boundary(rows)


def _floor_note(found: Ceilings, dtype: str) -> str:
    when = f" at {found.measured_at}" if found.measured_at else ""
    return (
        "The floor of a step adds those of weights, experts, attention and head: for each the "
        f"larger of its bytes over {number(found.read_bytes_per_s / 1e9)} GB/s and its operations "
        f"over {number(found.matmul(dtype) / 1e12)} TFLOP/s, measured on this machine{when}."
    )


def _boundary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Up to which batch size batching is nearly free."""
    first, last = rows[0], rows[-1]
    if first is last:
        return "One batch size does not show where batching starts to cost."
    beyond = [row["batch"] for row in rows if row["step_ms"] > KNEE * first["step_ms"]]
    if beyond:
        return (
            f"From batch {beyond[0]} on a step takes more than {KNEE} times as long as at batch "
            f"{first['batch']}."
        )
    return (
        f"In the swept range (batch {first['batch']} to {last['batch']}) no step takes more than "
        f"{KNEE} times as long as at batch {first['batch']}."
    )


def _summary(run: WorkloadRun, batch: int) -> _Repeat:
    steps = [s.duration_s for s in run.steps if s.num_decodes == s.num_tokens == batch]
    if run.failure:
        raise CapacityError(run.failure)
    if not steps:
        most = max((s.num_decodes for s in run.steps), default=0)
        raise CapacityError(
            f"at most {most} of {batch} requests decoded together: KV memory is short"
        )
    step_s = statistics.median(steps)
    return _Repeat(step_s, run.mean("ttft_s"), run.mean("tpot_s"), batch / step_s)


def _add(record: Record, batch: int, repeat: _Repeat) -> None:
    for name, seconds in (
        ("step_ms", repeat.step_s),
        ("ttft_ms", repeat.ttft_s),
        ("tpot_ms", repeat.tpot_s),
    ):
        record.add(f"{name}.batch{batch}", seconds * 1e3, unit="ms", direction="lower")


def _row(batch: int, found: Sequence[_Repeat], floor_s: float) -> dict[str, Any]:
    step_s, interval = median_ci([r.step_s for r in found])
    row: dict[str, Any] = {"batch": batch, "step_ms": step_s * 1e3}
    if interval:
        row |= {"step_ms_lo": interval[0] * 1e3, "step_ms_hi": interval[1] * 1e3}
    return row | {
        "floor_ms": floor_s * 1e3,
        "achieved_over_floor": step_s / floor_s,
        "ttft_ms": statistics.median(r.ttft_s for r in found) * 1e3,
        "tpot_ms": statistics.median(r.tpot_s for r in found) * 1e3,
        "output_tokens_per_s": statistics.median(r.output_tokens_per_s for r in found),
        "state": "ok",
    }
