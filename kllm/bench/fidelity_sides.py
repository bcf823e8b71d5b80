"""The two sides of a comparison of fidelities: one layout, run by all its ranks or one of them."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from kllm.bench.base import SPARE_TOKENS
from kllm.bench.serve_loop import run_workload, warm_up
from kllm.bench.workloads import Lengths, Workload
from kllm.config import EngineConfig, ParallelConfig
from kllm.engine.engine import Engine
from kllm.engine.executor import DeviceExecutor
from kllm.engine.multi_rank import MultiRankExecutor
from kllm.engine.rank_pool import RankPool, launch
from kllm.engine.sliced import SlicedExecutor
from kllm.errors import CapacityError, ConfigError
from kllm.models.load import resolve
from kllm.models.shape import model_shape
from kllm.parallel.layout import check, sampling_rank

GIB = float(1 << 30)
MEMORY = "peak_gib"
UNITS = {
    "prefill_step_ms": "ms",
    "decode_step_ms": "ms",
    "decode_rank_ms": "ms",  # of a decode step, the slowest rank's; the rest is the engine's
    "ttft_ms": "ms",
    "tpot_ms": "ms",
    "output_tokens_per_s": "tokens/s",
    MEMORY: "GiB",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityLoad:
    """Requests that arrive at once, all of the same lengths."""

    isl: int  # prompt tokens
    osl: int  # output tokens
    requests: int  # over all groups

    def check(self, positions: int) -> None:
        """Check that requests fit the positions of a model.

        Raises:
            ConfigError: they are longer.
        """
        if self.isl + self.osl > positions:
            raise ConfigError(
                f"requests of {self.isl} prompt and {self.osl} output tokens are longer than the "
                f"model's {positions} positions; choose a shorter --isl or --osl"
            )

    def workload(self, seed: int) -> Workload:
        """The requests, with prompts by the seed."""
        return Workload(
            isl=Lengths(self.isl),
            osl=Lengths(self.osl),
            num_requests=self.requests,
            concurrency=self.requests,
            seed=seed,
        )


class Ranks:
    """Processes for the real side, started when first needed and again when a layout ended them."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._pool: RankPool | None = None

    def pool(self) -> RankPool:
        """The processes.

        Raises:
            WorkerError: when they cannot be started.
        """
        if self._pool is None or not self._pool.alive:
            self._pool = launch(self._world)
        return self._pool

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pool is not None:
            self._pool.close()


class Side:
    """An engine of one layout at one fidelity.

    Args:
        config: of the model and the slice's link; layout and fidelity are set here.
        ranks: where the real side runs.

    Raises:
        ConfigError, CapacityError, WorkerError: when the layout cannot be set up.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: ParallelConfig,
        fidelity: Literal["real", "rank-slice"],
        load: FidelityLoad,
        ranks: Ranks,
    ) -> None:
        resolved = resolve(config)
        check(model_shape(resolved.family, resolved.config).dims, layout)
        if load.requests % layout.dp:
            raise CapacityError(
                f"{load.requests} requests are no whole number for each of {layout.dp} groups; "
                "use a multiple"
            )
        most: int = resolved.config.max_position_embeddings
        length = load.isl + load.osl
        scheduler = replace(config.scheduler, max_batch=load.requests // layout.dp)
        # Of a pipeline the rank that samples, whose steps end last.
        rank = sampling_rank(layout)
        self._config = config = replace(
            config,
            slice_rank=rank,
            scale=resolved.scale,
            dtype=resolved.dtype,
            parallel=layout,
            fidelity=fidelity,
            scheduler=scheduler,
            max_model_len=max(length, min(length + SPARE_TOKENS, most)),
        )
        self._load = load
        self._counts = resolved.device.startswith("cuda")  # whether memory is counted
        sliced = fidelity == "rank-slice"
        self._rank = rank
        resolved = resolve(config)
        self._executor: DeviceExecutor = (
            SlicedExecutor(config, resolved)
            if sliced
            else MultiRankExecutor(config, resolved, ranks.pool())
        )
        self._engine = Engine(config, executor=self._executor)

    @property
    def pool_tokens(self) -> int:
        """Tokens that the KV pages of a rank hold."""
        return self._executor.sharing.budget.num_tokens

    def warm_up(self, seed: int) -> None:
        """Compile and capture what the runs need; memory is counted from here on."""
        warm_up(self._engine, self._load.workload(seed))
        self._executor.settle()

    def run(self, seed: int) -> Mapping[str, float]:
        """One run of the load; values by the names of UNITS.

        Raises:
            CapacityError: when memory ran out or the requests never decoded together.
        """
        workload = self._load.workload(seed)
        run = run_workload(self._engine, workload)
        if run.failure:
            raise CapacityError(run.failure)
        batch = workload.num_requests
        prefill = [s.duration_s for s in run.steps if s.num_tokens > s.num_decodes]
        decode = [s for s in run.steps if s.num_decodes == s.num_tokens == batch]
        if not prefill or not decode:
            raise CapacityError(
                f"no step decoded all {batch} requests; use more output tokens than there are "
                "prefill steps"
            )
        # The runs of both sides have the same steps: a mean compares all chunks of the prompts.
        found = {
            "prefill_step_ms": statistics.mean(prefill) * 1e3,
            "decode_step_ms": statistics.median(s.duration_s for s in decode) * 1e3,
            "decode_rank_ms": statistics.median(s.run_s for s in decode) * 1e3,
            "ttft_ms": run.mean("ttft_s") * 1e3,
            "tpot_ms": run.mean("tpot_s") * 1e3,
            "output_tokens_per_s": run.output_tokens_per_s,
        }
        memory = self._executor.settle()
        if self._counts:
            here = memory[self._rank if len(memory) > 1 else 0]
            found[MEMORY] = (here.held + here.passing) / GIB
        return found

    def close(self) -> None:
        """Give memory and processes back."""
        self._engine.close()
