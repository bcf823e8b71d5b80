"""Which layouts a study compares, and what a rank of each one has: computed, not allocated.

A cut model stands for the whole one: layouts are left out where a rank could not hold its part of
the whole model, and the KV pool of a cut holds the tokens that the whole one's would.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from kllm import hardware
from kllm.bench.workloads import Workload
from kllm.config import EngineConfig, ParallelConfig
from kllm.engine.memory import SCRATCH
from kllm.errors import CapacityError, ConfigError
from kllm.models.load import WEIGHT_SHARE, ResolvedModel, resolve
from kllm.models.shape import model_shape
from kllm.parallel.footprint import ModelShape, StageFootprint, footprint
from kllm.parallel.layout import DEGREES, check, layouts, problem, short_name
from kllm.tuners.space import Settings, Value

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The layouts of one model on one kind of device.

    Args:
        shape: of the model at the scale that runs.
        whole: of the model that it stands for; the same where nothing is cut.
        memory_bytes: of each rank's device; None: no limit is known (ranks on a CPU).
        dtype: of the loaded weights.
        allowed: layouts to compare, the default one first.
        excluded: layouts that are left out, with the reason.
    """

    shape: ModelShape
    whole: ModelShape
    memory_bytes: int | None
    dtype: str
    allowed: tuple[ParallelConfig, ...]
    excluded: tuple[tuple[ParallelConfig, str], ...] = ()

    @cached_property
    def rows(self) -> tuple[dict[str, Value], ...]:
        """The allowed layouts as values of the layout's parameters."""
        return tuple(row_of(layout) for layout in self.allowed)

    @property
    def limited(self) -> bool:
        """Whether the KV pool is made smaller than the device would allow."""
        return self.shape is not self.whole and self.memory_bytes is not None

    def config(self, config: EngineConfig, kv_dtype: str, page_tokens: int) -> EngineConfig:
        """The config of a trial: which rank is run, and no more KV than the whole model leaves.

        Args:
            kv_dtype: resolved.
            page_tokens: of a page, resolved.
        """
        layout = config.parallel
        stages = footprint(self.shape, layout, dtype=self.dtype, kv_dtype=kv_dtype)
        if config.fidelity == "rank-slice":
            # The stage with the most weights is the one that the others of a pipeline wait for.
            slowest = max(range(layout.pp), key=lambda i: stages[i].weight_bytes)
            config = replace(config, slice_rank=slowest * layout.world // layout.pp)
        if not self.limited or config.cache.memory_bytes:
            return config
        requests = config.scheduler.max_batch + SCRATCH
        tokens = self.rank_tokens(layout, kv_dtype, requests, config.cache.memory_fraction)
        most = max(_pool_bytes(stage, tokens + SCRATCH * page_tokens, requests) for stage in stages)
        return replace(config, cache=replace(config.cache, memory_bytes=max(1, int(most))))

    def rank_tokens(
        self, layout: ParallelConfig, kv_dtype: str, requests: int, fraction: float
    ) -> int:
        """Tokens of KV that the whole model leaves room for on a rank."""
        assert self.memory_bytes is not None
        found = []
        for stage in footprint(self.whole, layout, dtype=self.dtype, kv_dtype=kv_dtype):
            left = fraction * (self.memory_bytes - stage.weight_bytes)
            left -= requests * stage.state_bytes_per_request
            if stage.kv_bytes_per_token:
                found.append(left / stage.kv_bytes_per_token)
        return max(0, int(min(found)))


def _pool_bytes(stage: StageFootprint, tokens: int, requests: int) -> float:
    return tokens * stage.kv_bytes_per_token + requests * stage.state_bytes_per_request


def row_of(layout: ParallelConfig) -> dict[str, Value]:
    """A layout as values of the layout's parameters."""
    return {name: getattr(layout, name) for name in (*DEGREES, "cp_kind")}


def layout_of(settings: Settings) -> ParallelConfig | None:
    """The layout among settings; None where layouts are not tuned."""
    if "tp" not in settings:
        return None
    values = {name: settings[name] for name in (*DEGREES, "cp_kind")}
    return ParallelConfig(**values)  # type: ignore[arg-type]  # rows hold what it takes


def layout_name(settings: Settings) -> str:
    """Short name of the layout among settings; "" where layouts are not tuned."""
    layout = layout_of(settings)
    return "" if layout is None else short_name(layout)


def share_of(workload: Workload, dp: int) -> tuple[Workload, int]:
    """The part of a workload that one of `dp` groups of ranks serves: every dp-th request.

    Returns:
        The part and the number of such groups, no more than there are requests in flight.
    """
    groups = min(dp, workload.concurrency or dp, workload.num_requests)
    if groups == 1:
        return workload, 1
    rows = tuple(workload.shapes()[::groups])
    concurrency = workload.concurrency
    return (
        replace(
            workload,
            trace=rows,
            num_requests=len(rows),
            concurrency=None if concurrency is None else -(-concurrency // groups),
            rate=None,
        ),
        groups,
    )


def by_custom(shape: ModelShape, found: Sequence[ParallelConfig]) -> list[ParallelConfig]:
    """Layouts in order of how near they are to what a deployment of the model begins with today.

    Dense models: tensor parallelism over all ranks. Models with experts: attention by request and
    experts by rank on all of them (dp = ep = world), as DeepSeek deploys its models, because
    latents and compressed entries have no heads to cut and tensor parallelism would copy them.
    """
    if shape.dims.experts:
        return sorted(found, key=lambda a: (a.pp, a.cp, a.tp, -a.ep))
    return sorted(found, key=lambda a: (a.pp, a.cp, -a.tp))


def find_deployment(
    config: EngineConfig, *, chosen: ParallelConfig | None = None
) -> tuple[ResolvedModel, Deployment]:
    """The model at a scale that suits the layouts of `config.parallel.world` ranks, and these.

    Scale `auto` is the largest that fits with the lightest layout; on a CPU, whose ranks stand for
    GPUs, it is tiny for random weights.

    Args:
        chosen: the only layout to look at.

    Raises:
        ConfigError: the model allows no such layout.
        CapacityError: no layout fits.
    """
    world = config.parallel.world
    full = resolve(replace(config, scale="full", parallel=ParallelConfig(), slice_rank=0))
    whole = model_shape(full.family, full.config)
    if chosen is not None:
        check(whole.dims, chosen)
    choices = (chosen,) if chosen is not None else layouts(whole.dims, world)
    if not choices:
        raise ConfigError(f"{full.name} allows no layout of {world} ranks; choose another --world")
    lightest = min(choices, key=lambda layout: _weights(whole, layout, full.dtype))
    config = replace(config, parallel=lightest)
    device = torch.device(full.device)
    if config.scale == "auto" and device.type == "cpu" and full.weights is None:
        config = replace(config, scale="tiny")
    resolved = resolve(config)
    shape = whole
    if resolved.scale != "full":
        shape = model_shape(resolved.family, resolved.config)
    choices = tuple(layout for layout in choices if problem(shape.dims, layout) is None)
    if not choices:
        raise ConfigError(
            f"no layout of {world} ranks suits {full.name} at scale {resolved.scale}; choose a "
            "larger scale or another --world"
        )
    memory = None
    if device.type == "cuda":
        memory = hardware.detect().gpus[device.index or 0].memory_bytes
    # Where no layout holds the whole model, or it is tiny, what runs stands for itself.
    candidates = [whole, shape] if resolved.scale.startswith("layers:") else [shape]
    for model in candidates:
        allowed, excluded = _divide(model, choices, full.dtype, memory)
        if allowed:
            return resolved, Deployment(
                shape=shape,
                whole=model,
                memory_bytes=memory,
                dtype=full.dtype,
                allowed=tuple(by_custom(model, allowed)),
                excluded=tuple(excluded),
            )
    assert memory is not None
    needed = _weights(shape, min(choices, key=lambda a: _weights(shape, a, full.dtype)), full.dtype)
    raise CapacityError(
        f"no layout of {world} ranks leaves room for KV: the lightest has "
        f"{needed / GIB:.1f} GiB of weights on a rank of {memory / GIB:.1f} GiB; "
        "use a smaller --scale, or a larger --world"
    )


def _divide(
    model: ModelShape, choices: Sequence[ParallelConfig], dtype: str, memory: int | None
) -> tuple[list[ParallelConfig], list[tuple[ParallelConfig, str]]]:
    """Layouts with room for KV beside the weights, and the others with the reason."""
    allowed, excluded = [], []
    for layout in choices:
        held = _weights(model, layout, dtype)
        if memory is None or held <= WEIGHT_SHARE * memory:
            allowed.append(layout)
            continue
        reason = (
            f"{held / GIB:.1f} GiB of weights on a rank of {memory / GIB:.1f} GiB leave less than "
            f"{1 - WEIGHT_SHARE:.0%} to KV and activations"
        )
        excluded.append((layout, reason))
    return allowed, excluded


def _weights(model: ModelShape, layout: ParallelConfig, dtype: str) -> int:
    stages = footprint(model, layout, dtype=dtype, kv_dtype=dtype)
    return max(stage.weight_bytes for stage in stages)
