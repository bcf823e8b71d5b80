"""`kllm bench compare-power`: does the regression gate see what it should on this machine?

Pairs of the same short bench against itself (A/A) show how often `kllm compare` raises a false
alarm; pairs with a slowdown injected into every step of the second side show how often it finds a
real regression. Both go through the real statistics on real measurements.

A value is one short run of a small model: on a busy machine many short values in alternation tell
a change from noise better than a few long ones, because both sides then meet the same disturbance.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kllm.bench.base import Context, warming_up
from kllm.bench.record import Record
from kllm.bench.serve_loop import ServingEngine, StepResult, run_workload, warm_up
from kllm.bench.timing import interleave
from kllm.bench.workloads import Lengths, Workload
from kllm.core import Request, SamplingParams
from kllm.errors import CapacityError, ConfigError
from kllm.results.compare import CONFIDENCE, Comparison, compare
from kllm.results.schema import Direction, Metric, RunResult

BASE, NEW = "base", "new"
Values = dict[str, float]
_METRICS: dict[str, tuple[str, Direction]] = {
    "step_ms": ("ms", "lower"),
    "output_tokens_per_s": ("tokens/s", "higher"),
}


class SlowedEngine:
    """An engine whose steps take longer by a share of their own time."""

    def __init__(self, engine: ServingEngine, share: float) -> None:
        self._engine, self._share = engine, share

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._engine.vocab_size

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return self._engine.has_work

    @property
    def num_running(self) -> int:
        """Requests that hold KV."""
        return self._engine.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission."""
        return self._engine.num_waiting

    def add(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, arrival_s: float | None = None
    ) -> Request:
        """Queue a request."""
        return self._engine.add(prompt_ids, params, arrival_s=arrival_s)

    def step(self) -> StepResult:
        """Run one step, then keep the processor busy for the share."""
        start = time.perf_counter()
        output = self._engine.step()
        end = time.perf_counter()
        until = end + (end - start) * self._share
        while time.perf_counter() < until:
            pass  # busy like slower code would be; a sleep would wake up too late
        return output

    def abort(self, request_id: str) -> object:
        """End a request now."""
        return self._engine.abort(request_id)

    def close(self) -> None:
        """Free what the engine holds."""
        self._engine.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePowerBench:
    """A/A pairs and slowed pairs of a short closed loop."""

    pairs: int = 50  # A/A
    tries: int = 20  # with the slowdown
    slowdown: float = 0.10  # share of a step's time added to it
    batch: int = 8
    isl: int = 32
    osl: int = 12
    interleaved: bool = True  # the two sides of a pair take turns; else one after the other

    def __post_init__(self) -> None:
        if self.pairs < 1 or self.tries < 1:
            raise ConfigError(f"pairs and tries must be 1 or more, got {self.pairs}, {self.tries}")
        if not 0 < self.slowdown < 10:
            raise ConfigError(f"slowdown must lie between 0 and 10, got {self.slowdown:g}")

    @property
    def name(self) -> str:
        """As it is called on the command line."""
        return "compare-power"

    def workload(self) -> Mapping[str, Any]:
        """Options that two comparable runs share."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def measure(self, ctx: Context, record: Record) -> None:
        """All A/A pairs, then all slowed ones, on one engine."""
        load = Workload(
            isl=Lengths(self.isl),
            osl=Lengths(self.osl),
            num_requests=self.batch,
            concurrency=self.batch,
            seed=ctx.seed,
        )
        total = self.pairs + self.tries
        with ctx.engine(max_batch=self.batch, max_tokens=load.max_tokens) as engine:
            ctx.progress(warming_up("engine"), 0, total)
            warm_up(engine, load)
            slow = SlowedEngine(engine, self.slowdown)
            for number in range(total):
                slowed = number >= self.pairs
                ctx.progress("slowed pair" if slowed else "A/A pair", number, total)
                sides = {
                    BASE: lambda: _values(engine, load),
                    NEW: lambda slowed=slowed: _values(slow if slowed else engine, load),  # type: ignore[misc]
                }
                found = self._compare(record.header, number, sides, ctx.repeats)
                _store(record, number, slowed, found)
        ctx.progress("done", total, total)

    def _compare(
        self,
        header: RunResult,
        number: int,
        sides: Mapping[str, Callable[[], Values]],
        repeats: int,
    ) -> Comparison:
        if self.interleaved:
            values = interleave(sides, repeats=repeats)
        else:
            values = {
                name: interleave({name: side}, repeats=repeats)[name]
                for name, side in sides.items()
            }
        results = {
            name: replace(
                header,
                run_id=f"{header.run_id}-{number}-{name}",
                interleave=f"{header.run_id}-{number}" if self.interleaved else None,
                metrics={
                    metric: Metric.of(
                        [v[metric] for v in measured],
                        unit=unit,
                        direction=direction,
                    )
                    for metric, (unit, direction) in _METRICS.items()
                },
            )
            for name, measured in values.items()
        }
        return compare([results[BASE]], [results[NEW]])

    def conclude(self, record: Record) -> None:
        """Count."""
        pairs = [row for row in record.rows.get("pairs", []) if not row["slowed"]]
        tries = [row for row in record.rows.get("pairs", []) if row["slowed"]]
        alarms = sum(row["regressed"] for row in pairs)
        detected = sum(row["regressed"] for row in tries)
        for name, count in (("false_alarms", alarms), ("detections", detected)):
            direction: Direction = "lower" if name == "false_alarms" else "higher"
            record.add(name, count, unit="pairs", direction=direction, sample="exact")
        record.verdict = (
            f"{alarms} false alarms in {len(pairs)} A/A pairs; a slowdown of {self.slowdown:.0%} "
            f"found in {detected} of {len(tries)} tries."
        )
        smallest = _smallest_visible(pairs)
        if smallest is not None:
            record.boundary = (
                f"On this machine the {CONFIDENCE:.0%} interval of a pair is typically "
                f"±{smallest:.1%} wide: changes below that are not told from noise."
            )


def _values(engine: ServingEngine, load: Workload) -> Values:
    run = run_workload(engine, load)
    if run.failure:
        raise CapacityError(run.failure)
    return {
        "step_ms": statistics.median(step.duration_s for step in run.steps) * 1e3,
        "output_tokens_per_s": run.output_tokens_per_s,
    }


def _store(record: Record, number: int, slowed: bool, found: Comparison) -> None:
    row: dict[str, Any] = {"pair": number, "slowed": slowed, "regressed": bool(found.regressed)}
    for metric in found.rows:
        judgement = metric.judgement
        interval = judgement.interval or (None, None)
        row |= {
            f"{metric.metric}_ratio": judgement.ratio,
            f"{metric.metric}_ratio_lo": interval[0],
            f"{metric.metric}_ratio_hi": interval[1],
            f"{metric.metric}_verdict": judgement.verdict,
        }
    record.row("pairs", row)


def _smallest_visible(pairs: Sequence[Mapping[str, Any]]) -> float | None:
    """Median half width of the step time's interval, as a share."""
    widths = [
        (row["step_ms_ratio_hi"] - row["step_ms_ratio_lo"]) / 2
        for row in pairs
        if row["step_ms_ratio_hi"] is not None
    ]
    return statistics.median(widths) if widths else None
