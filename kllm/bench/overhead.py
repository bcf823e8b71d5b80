"""`kllm bench overhead`: what a step costs besides the model.

With an executor that computes nothing, the time of a decode step is the engine's own: choosing
requests, building the plan, advancing requests. With the real model the same times are given as
a share of the step.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kllm.bench.base import Context, doubling
from kllm.bench.record import Record
from kllm.bench.timing import Failed, attempt
from kllm.config import EngineConfig, ParallelConfig
from kllm.core import Outcome, Plan, SamplingParams
from kllm.engine.engine import Engine, StepStats
from kllm.engine.executor import Sharing, merge
from kllm.engine.memory import KVBudget
from kllm.engine.step import RankOutcome, steps_of
from kllm.errors import CapacityError, ConfigError

PAGE_SIZE = 16  # tokens; a page boundary every 16 steps is part of what is timed
ISL = 64
WARMUP_STEPS, STEPS = 32, 256
MODEL_STEPS = 64
LIMIT_US = 300.0  # what a step of the most requests may cost
LIMIT_SHARE = 0.10  # of a step with the model
UNITS = {"overhead_us": "us", "schedule_us": "us", "output_us": "us"}


class NullExecutor:
    """Answers every plan at once with the same token.

    Plans are cut and outcomes merged as for a rank: that is part of what a step costs besides it.
    """

    def __init__(self, max_batch: int, max_model_len: int) -> None:
        pages_each = -(-max_model_len // PAGE_SIZE)
        budget = KVBudget(
            num_pages=max_batch * (pages_each + 1),
            page_size=PAGE_SIZE,
            max_batch=max_batch,
            max_model_len=max_model_len,
            kv_dtype="float32",
            rewind_tokens=0,
        )
        self.sharing = Sharing(budget, groups=1, stripes=None, cp_kind="auto")

    def execute(self, plans: Sequence[Plan | None]) -> list[Outcome | None]:
        """One token for each request that samples."""
        (micro,) = steps_of(plans, ParallelConfig(), None)
        sampled = micro[0].sampled[micro[0].sampled >= 0]
        return [merge([RankOutcome(sampled, np.ones_like(sampled))], len(sampled))]

    def close(self) -> None:
        """There is nothing to free."""


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
        for done, running in enumerate(sizes):
            ctx.progress(f"{running} running, no model", done, len(sizes) + 1)
            self._null(ctx, record, running)
        ctx.progress(f"batch {self.batch}, with the model", len(sizes), len(sizes) + 1)
        found = attempt(lambda: self._real(ctx, record))
        if isinstance(found, Failed):
            record.row("model", {"batch": self.batch, "state": "failed", "reason": found.reason})
        ctx.progress("done", len(sizes) + 1, len(sizes) + 1)

    def _null(self, ctx: Context, record: Record, running: int) -> None:
        length = ISL + WARMUP_STEPS + STEPS + 1
        config = _with_batch(ctx.config, running)
        found = []
        for _ in range(ctx.repeats):
            engine = Engine(config, executor=NullExecutor(running, length))
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
                "output_us": _median_us(found, lambda s: s.stats.output_s),
            },
            UNITS,
        )

    def _real(self, ctx: Context, record: Record) -> None:
        length = ISL + WARMUP_STEPS + MODEL_STEPS + 1
        shares: list[float] = []
        milliseconds: list[float] = []
        with ctx.engine(max_batch=self.batch, max_tokens=length) as engine:
            for repeat in range(ctx.repeats):
                steps = decode_steps(engine, self.batch, MODEL_STEPS, ctx.seed + repeat)
                own = statistics.median(s.seconds - s.stats.execute_s for s in steps)
                whole = statistics.median(s.seconds for s in steps)
                shares.append(own / whole)
                milliseconds.append(whole * 1e3)
                record.add(
                    f"overhead_share.batch{self.batch}", own / whole, unit="", direction="lower"
                )
        row = {
            "batch": self.batch,
            "step_ms": statistics.median(milliseconds),
            "overhead_share": statistics.median(shares),
        }
        record.row("model", row, {"step_ms": "ms"})

    def conclude(self, record: Record) -> None:
        """Hold the two figures against their limits."""
        rows, model = record.ok_rows("sweep"), record.ok_rows("model")
        if not rows:
            record.verdict = "Nothing was measured."
            return
        parts = [
            f"{row['overhead_us']:.0f} us a step with {row['running']} running requests "
            f"(limit {LIMIT_US:.0f})"
            for row in rows[-1:]
        ]
        parts += [
            f"{row['overhead_share']:.1%} of a step at batch {row['batch']} "
            f"(limit {LIMIT_SHARE:.0%})"
            for row in model
        ]
        record.verdict = "; ".join(parts) + "."
        beyond = [row["running"] for row in rows if row["overhead_us"] > LIMIT_US]
        record.boundary = (
            f"From {beyond[0]} running requests on a step costs more than {LIMIT_US:.0f} us."
            if beyond
            else f"Up to {rows[-1]['running']} running requests no step costs {LIMIT_US:.0f} us."
        )


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
