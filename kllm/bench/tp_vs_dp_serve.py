"""Serves the same loads with attention cut by heads and by requests, experts spread in both."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from kllm.bench.base import Context, warming_up
from kllm.bench.record import Record
from kllm.bench.serve_loop import Observer, Progress, run_workload
from kllm.bench.timing import Failed, attempt
from kllm.bench.tp_vs_dp_loads import warm_load
from kllm.bench.workloads import Workload
from kllm.config import EngineConfig, ParallelConfig
from kllm.engine.engine import Engine
from kllm.engine.memory import KVBudget
from kllm.errors import CapacityError
from kllm.hardware import release_memory
from kllm.models.base import CausalLM
from kllm.results.schema import LEFT_OUT
from kllm.scheduler.placement import fewest_requests, least_loaded
from kllm.scheduler.scheduler import Scheduler

Side = Literal["tp", "dp"]
Placement = Literal["tokens", "count"]
SIDES: tuple[Side, Side] = ("tp", "dp")
PLACEMENTS: Mapping[Placement, Callable[[Sequence[Scheduler]], int]] = {
    "tokens": least_loaded,
    "count": fewest_requests,
}
UNITS = {"ttft_ms": "ms", "tpot_ms": "ms", "output_tokens_per_s": "tokens/s"}


def layout_of(side: Side, world: int) -> ParallelConfig:
    """Attention over `world` ranks, by heads or by requests; whole experts spread over all."""
    if side == "tp":
        return ParallelConfig(tp=world, ep=world)
    return ParallelConfig(dp=world, ep=world)


@dataclass(frozen=True, slots=True)
class Point:
    """One load, and how request-DP places it."""

    key: str  # in names of metrics
    load: Workload
    placement: Placement = "tokens"
    sides: tuple[Side, ...] = SIDES
    isl: int = 0  # of a point of the sweep
    in_flight: int = 0  # 0: not of the sweep


@dataclass(frozen=True, slots=True)
class Served:
    """A load on a whole deployment."""

    ttft_s: float  # mean over the requests
    tpot_s: float
    output_tokens_per_s: float

    def values(self) -> dict[str, float]:
        """As they are recorded: the names of UNITS."""
        return {
            "ttft_ms": self.ttft_s * 1e3,
            "tpot_ms": self.tpot_s * 1e3,
            "output_tokens_per_s": self.output_tokens_per_s,
        }


@dataclass(slots=True)
class Found:
    """What has been measured so far."""

    served: dict[tuple[Side, str], list[Served]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # key of a point: why it has no numbers
    late: set[str] = field(default_factory=set)  # of these, the ones that there was no time for
    seconds: dict[tuple[Side, str], float] = field(default_factory=dict)
    budgets: dict[Side, KVBudget] = field(default_factory=dict)

    def medians(self, side: Side, key: str) -> dict[str, float] | None:
        """Of the repeats of a point."""
        values = [served.values() for served in self.served.get((side, key), ())]
        if not values:
            return None
        return {name: statistics.median(v[name] for v in values) for name in UNITS}

    def state(self, key: str) -> str:
        """Of a point's row."""
        if self.both(key):
            return "ok"
        return LEFT_OUT if key in self.late or key not in self.failed else "failed"

    def both(self, key: str) -> bool:
        """Whether a point ran on both layouts."""
        return key not in self.failed and all((side, key) in self.served for side in SIDES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Runs points on layouts of `world` ranks.

    Args:
        step_tokens: of the deployment; under request-DP each rank has its part of them.
        limit_s: for the sweep of one layout; heavier loads are left out. 0: none.
    """

    ctx: Context
    record: Record
    found: Found
    points: Sequence[Point]
    world: int
    step_tokens: int
    limit_s: float

    def run(self, models: dict[Side, CausalLM | None]) -> None:
        """Run every point on the layouts that are named, in turns.

        Args:
            models: the network of a slice that is loaded already; taken out, so that it can be
                freed at the end.

        Raises:
            CapacityError: when a layout does not fit the device.
        """
        total = len(self.points)
        with ExitStack() as stack:
            engines: dict[Side, Engine] = {}
            for side in list(models):
                self.ctx.progress(f"start {side}", 0, total)
                engines[side] = stack.enter_context(self._engine(side, models.pop(side)))
                self.found.budgets[side] = engines[side].budget
                self._warm_up(engines[side], side)
            start = time.monotonic()
            for done, point in enumerate(self.points):
                self._point(engines, point, done, time.monotonic() - start)

    @contextmanager
    def _engine(self, side: Side, model: CausalLM | None) -> Iterator[Engine]:
        config = self._config(side)
        engine = Engine(config, model=model)
        del model
        try:
            yield engine
        finally:
            engine.close()
            release_memory()  # the next network needs it

    def _config(self, side: Side) -> EngineConfig:
        ranks = self.world if side == "dp" else 1
        most = max(point.load.num_requests for point in self.points)
        # Placement by tokens may give one rank more requests than its part.
        batch = min(most, 2 * math.ceil(most / ranks))
        config = self.ctx.config
        return replace(
            config,
            parallel=layout_of(side, self.world),
            max_model_len=max(point.load.max_tokens for point in self.points),
            scheduler=replace(
                config.scheduler,
                max_batch=batch,
                token_budget=max(batch, self.step_tokens // ranks),
            ),
        )

    def _warm_up(self, engine: Engine, side: Side) -> None:
        most = max(point.load.num_requests for point in self.points)
        for isl in sorted({point.isl for point in self.points if point.isl}):
            what = warming_up(f"{side}, ISL {isl}")
            self.ctx.progress(what, 0, len(self.points))
            budget = engine.config.scheduler.token_budget * engine.config.parallel.dp
            watch = partial(self._watch, what, 0)
            run = run_workload(engine, warm_load(most, isl, budget), observer=watch)
            if run.failure:
                raise CapacityError(f"the loads do not fit the device: {run.failure}")
        run_workload(engine, self.points[0].load)  # else the first one pays for what was missed

    def _watch(self, what: str, done: int, seen: Progress) -> None:
        finished = f"{seen.sample.finished} of {seen.num_requests} requests"
        self.ctx.progress(f"{what}, {finished}", done, len(self.points))

    def _point(
        self, engines: Mapping[Side, Engine], point: Point, done: int, spent_s: float
    ) -> None:
        sides = [side for side in point.sides if side in engines]
        if not sides or point.key in self.found.failed:
            return
        if reason := self._too_long(sides, point, spent_s):
            self.found.failed[point.key] = reason
            self.found.late.add(point.key)
            return
        for repeat in range(self.ctx.repeats):
            for side in sides if repeat % 2 == 0 else sides[::-1]:
                what = f"{side} {point.load.name}"
                self.ctx.progress(what, done, len(self.points))
                begin = time.monotonic()
                watch = partial(self._watch, what, done)
                served = attempt(partial(_serve, engines[side], point, watch))
                if isinstance(served, Failed):
                    self.found.failed[point.key] = f"{side}: {served.reason}"
                    return
                self.found.seconds[side, point.key] = time.monotonic() - begin
                self._add(side, point, served)

    def _too_long(self, sides: Sequence[Side], point: Point, spent_s: float) -> str:
        """Why a load of the sweep is left out, judged by the heaviest lighter one that ran.

        None that is heavier than one left out for its time is run.
        """
        limit_s = self.limit_s * len(sides)
        lighter = [p for p in self.points if p.isl == point.isl and p.in_flight < point.in_flight]
        if not limit_s or not lighter:
            return ""
        for other in lighter:
            if other.key in self.found.late:
                return f"left out as {other.in_flight} in flight is; raise --limit for both"
        seconds = self.found.seconds
        ran = [p for p in lighter if all((side, p.key) in seconds for side in sides)]
        more_s = 0.0
        if ran:
            last = max(ran, key=lambda p: p.in_flight)
            once_s = sum(seconds[side, last.key] for side in sides)
            more_s = self.ctx.repeats * once_s * point.in_flight / last.in_flight
        if spent_s + more_s <= limit_s:
            return ""
        return (
            f"{'+'.join(sides)}: about {more_s:.0f} s more after {spent_s:.0f} s would pass the "
            f"limit of {limit_s:g} s; raise --limit for it"
        )

    def _add(self, side: Side, point: Point, served: Served) -> None:
        self.found.served.setdefault((side, point.key), []).append(served)
        for name, value in served.values().items():
            self.record.add(
                f"{name}.{side}.{point.key}",
                value,
                unit=UNITS[name],
                direction="higher" if name.endswith("_per_s") else "lower",
            )


def _serve(engine: Engine, point: Point, watch: Observer) -> Served:
    engine.placement = PLACEMENTS[point.placement]
    run = run_workload(engine, point.load, observer=watch)
    if run.failure:
        raise CapacityError(run.failure)
    return Served(
        ttft_s=run.mean("ttft_s"),
        tpot_s=run.mean("tpot_s"),
        output_tokens_per_s=run.output_tokens_per_s,
    )
