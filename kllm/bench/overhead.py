"""`kllm bench overhead`: what a step costs besides the model.

With ranks that compute nothing, the time of a decode step is the engine's own: choosing requests,
building the plan, telling the processes of a layout's ranks, advancing requests. With the real
model it is what is left of a step beside the slowest rank's share.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kllm.bench.base import Context, doubling
from kllm.bench.record import Record
from kllm.bench.timing import Failed, attempt
from kllm.config import EngineConfig, ParallelConfig
from kllm.core import Outcome, Plan, Request, SamplingParams
from kllm.engine.engine import Engine, StepStats
from kllm.engine.executor import sharing_of
from kllm.engine.memory import KVBudget
from kllm.engine.rank_pool import RankPool, launch
from kllm.engine.rank_protocol import StandIn
from kllm.engine.rank_steps import RankSteps
from kllm.engine.step import MicroStep, RankOutcome, merge, sampled_on, steps_of
from kllm.errors import CapacityError, ConfigError
from kllm.parallel.layout import place
from kllm.parallel.stripes import Stripes

PAGE_SIZE = 16  # tokens; a page boundary every 16 steps is part of what is timed
ISL = 64
WARMUP_STEPS, STEPS = 32, 256
MODEL_STEPS = 64
LIMIT_US = 300.0  # what a step of the most requests may cost
LIMIT_SHARE = 0.10  # of a step with the model
UNITS = dict.fromkeys(("overhead_us", "schedule_us", "execute_us", "output_us"), "us")


class NullRank:
    """Answers every step at once with the same token, in place of a rank.

    Args:
        cp: which of the ranks that share a prompt it is.
        stripes: how prompts are dealt to these.
        samples: whether it is one that samples.
    """

    def __init__(self, cp: int = 0, stripes: Stripes | None = None, samples: bool = True) -> None:
        self._cp, self._stripes, self._samples = cp, stripes, samples

    def run(self, micro: Sequence[MicroStep], requests: Sequence[Request]) -> RankOutcome:
        """One token for each request that is sampled here."""
        here = sampled_on(micro, self._cp, self._stripes) if self._samples else []
        sampled = np.array(here, np.int64)
        return RankOutcome(sampled, np.ones_like(sampled))


class NullExecutor:
    """One rank in this process that computes nothing.

    Plans are cut and outcomes merged as for a rank: that is part of what a step costs besides it.
    """

    run_s = 0.0

    def __init__(self, config: EngineConfig, max_batch: int, max_model_len: int) -> None:
        self.sharing = sharing_of(config, _budget(max_batch, max_model_len))
        self._rank = NullRank()

    def execute(self, plans: Sequence[Plan | None]) -> list[Outcome | None]:
        """One token for each request that samples."""
        (micro,) = steps_of(plans, ParallelConfig(), None)
        found = self._rank.run(micro, ())
        return [merge([found], len(found.sampled))]

    def close(self) -> None:
        """There is nothing to free."""


class NullRanks:
    """All ranks of a layout in processes of their own that compute nothing.

    What is left of a step is what is said between the processes. The least that can take is two
    hops of a socket, each with waking the process at its end.
    """

    run_s = 0.0

    def __init__(
        self, config: EngineConfig, max_batch: int, max_model_len: int, pool: RankPool
    ) -> None:
        layout, budget = config.parallel, _budget(max_batch, max_model_len)
        self.sharing = sharing_of(config, budget)
        stripes = self.sharing.stripes
        places = [place(layout, rank) for rank in range(layout.world)]
        pool.call(
            [
                StandIn(NullRank(at.cp, stripes, at.tp == 0 and at.pp == layout.pp - 1))
                for at in places
            ]
        )
        self._steps = RankSteps(pool, layout, stripes)

    def execute(self, plans: Sequence[Plan | None]) -> list[Outcome | None]:
        """Run one step of every group, on ranks that answer at once."""
        return self._steps.execute(plans)

    def close(self) -> None:
        """The ranks stay for the next layout."""


def _budget(max_batch: int, max_model_len: int) -> KVBudget:
    pages_each = -(-max_model_len // PAGE_SIZE)
    return KVBudget(
        num_pages=max_batch * (pages_each + 1),
        page_size=PAGE_SIZE,
        max_batch=max_batch,
        max_model_len=max_model_len,
        kv_dtype="float32",
        rewind_tokens=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadBench:
    """Null steps up to `running` requests; real steps at `batch`."""

    running: int = 256
    batch: int = 64

    def __post_init__(self) -> None:
        if self.running < 1 or self.batch < 1:
            raise ConfigError(
                f"running and batch must be 1 or more, got {self.running} and {self.batch}"
            )

    @property
    def name(self) -> str:
        """As it is called on the command line."""
        return "overhead"

    def workload(self) -> Mapping[str, Any]:
        """Options that two comparable runs share."""
        return {"running": self.running, "batch": self.batch, "isl": ISL}

    def measure(self, ctx: Context, record: Record) -> None:
        """The sweep without the model, then the share with it."""
        sizes = doubling(self.running)
        world = ctx.config.parallel.world
        with launch(world) if world > 1 else nullcontext() as pool:
            for done, running in enumerate(sizes):
                ctx.progress(f"{running} running, no model", done, len(sizes) + 1)
                self._null(ctx, record, running, pool)
        ctx.progress(f"batch {self.batch}, with the model", len(sizes), len(sizes) + 1)
        found = attempt(lambda: self._real(ctx, record))
        if isinstance(found, Failed):
            record.row("model", {"batch": self.batch, "state": "failed", "reason": found.reason})
        ctx.progress("done", len(sizes) + 1, len(sizes) + 1)

    def _null(self, ctx: Context, record: Record, running: int, pool: RankPool | None) -> None:
        length = ISL + WARMUP_STEPS + STEPS + 1
        config = _with_batch(ctx.config, running)
        found = []
        for _ in range(ctx.repeats):
            executor = (
                NullRanks(config, running, length, pool)
                if pool
                else NullExecutor(config, running, length)
            )
            engine = Engine(config, executor=executor)
            try:
                steps = decode_steps(engine, running, STEPS, ctx.seed)
            finally:
                engine.close()
            found.append(steps)
            value = statistics.median(s.seconds for s in steps) * 1e6
            record.add(f"overhead_us.running{running}", value, unit="us", direction="lower")
        record.row(
            "sweep",
            {
                "running": running,
                "overhead_us": _median_us(found, lambda s: s.seconds),
                "schedule_us": _median_us(found, lambda s: s.stats.schedule_s),
                "execute_us": _median_us(found, lambda s: s.stats.execute_s),
                "output_us": _median_us(found, lambda s: s.stats.output_s),
            },
            UNITS,
        )

    def _real(self, ctx: Context, record: Record) -> None:
        length = ISL + WARMUP_STEPS + MODEL_STEPS + 1
        shares: list[float] = []
        own: list[float] = []
        whole: list[float] = []
        with ctx.engine(max_batch=self.batch, max_tokens=length) as engine:
            for repeat in range(ctx.repeats):
                steps = decode_steps(engine, self.batch, MODEL_STEPS, ctx.seed + repeat)
                own.append(statistics.median(s.seconds - s.stats.run_s for s in steps) * 1e6)
                whole.append(statistics.median(s.seconds for s in steps) * 1e6)
                shares.append(own[-1] / whole[-1])
                at = f"batch{self.batch}"
                record.add(f"overhead_share.{at}", shares[-1], unit="", direction="lower")
                record.add(f"overhead_us.{at}", own[-1], unit="us", direction="lower")
        row = {
            "batch": self.batch,
            "step_ms": statistics.median(whole) / 1e3,
            "overhead_us": statistics.median(own),
            "overhead_share": statistics.median(shares),
        }
        record.row("model", row, {"step_ms": "ms", "overhead_us": "us"})

    def conclude(self, record: Record) -> None:
        """Hold the two figures against their targets."""
        rows, model = record.ok_rows("sweep"), record.ok_rows("model")
        if not rows:
            record.verdict = "Nothing was measured."
            return
        parts = [
            f"{row['overhead_us']:.0f} us a step with {row['running']} running requests, "
            f"{_held(row['overhead_us'], LIMIT_US)} {LIMIT_US:.0f} us"
            for row in rows[-1:]
        ]
        parts += [
            f"{row['overhead_share']:.1%} of a step at batch {row['batch']}, "
            f"{_held(row['overhead_share'], LIMIT_SHARE)} {LIMIT_SHARE:.0%}"
            for row in model
        ]
        record.verdict = "; ".join(parts) + "."
        beyond = [row["running"] for row in rows if row["overhead_us"] > LIMIT_US]
        record.boundary = (
            f"From {beyond[0]} running requests on a step costs more than {LIMIT_US:.0f} us."
            if beyond
            else f"Up to {rows[-1]['running']} running requests no step costs {LIMIT_US:.0f} us."
        )


def _held(value: float, limit: float) -> str:
    return "above the target of" if value > limit else "within the target of"


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One decode step of the whole batch."""

    seconds: float
    stats: StepStats


def decode_steps(engine: Any, running: int, count: int, seed: int) -> list[TimedStep]:
    """`count` steps in which `running` requests decode one token each.

    Raises:
        CapacityError: they do not all run together.
    """
    rng = np.random.default_rng(seed)
    params = SamplingParams(max_tokens=WARMUP_STEPS + count + 1, temperature=0.0, ignore_eos=True)
    requests = [
        engine.add(rng.integers(0, engine.vocab_size, size=ISL).tolist(), params)
        for _ in range(running)
    ]
    steps: list[TimedStep] = []
    while engine.has_work:
        start = time.perf_counter()
        output = engine.step()
        seconds = time.perf_counter() - start
        if output.stats.num_decodes == output.stats.num_tokens == running:
            steps.append(TimedStep(seconds, output.stats))
        if len(steps) == WARMUP_STEPS + count:
            break
    for request in requests:
        engine.abort(request.id)
    if len(steps) <= WARMUP_STEPS:
        raise CapacityError(
            f"{running} requests never decoded together; lower the batch or give more KV memory"
        )
    return steps[WARMUP_STEPS:]


def _with_batch(config: EngineConfig, running: int) -> EngineConfig:
    scheduler = replace(
        config.scheduler,
        max_batch=running,
        token_budget=max(config.scheduler.token_budget, running),
    )
    return replace(config, scheduler=scheduler)


def _median_us(
    repeats: Sequence[Sequence[TimedStep]], value: Callable[[TimedStep], float]
) -> float:
    return statistics.median(value(s) for steps in repeats for s in steps) * 1e6
