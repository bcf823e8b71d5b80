"""What `kllm bench tp-vs-dp-attention` measures on a machine unless it is told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from kllm.bench.base import Bench, is_small
from kllm.bench.tp_vs_dp_serve import layout_of
from kllm.config import EngineConfig
from kllm.errors import ConfigError
from kllm.models.load import resolve
from kllm.results.schema import Fidelity

FIDELITIES = ("auto", "real", "rank-slice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Where and how both layouts run."""

    world: int
    scale: str
    fidelity: Fidelity
    repeats: int
    small: bool  # tiny models and CPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    world: int
    in_flight: tuple[int, ...]
    isls: tuple[int, ...]
    osl: int
    skewed: int
    step_tokens: int
    limit_s: float
    repeats: int


# Two ranks on two cores within 3 minutes; eight ranks, as the claim has them, one of them sliced
# within 3 minutes of a large GPU.
_SMALL = _Sizes(
    world=2,
    in_flight=(1, 4, 8, 16),
    isls=(32, 96),
    osl=6,
    skewed=8,
    step_tokens=128,
    limit_s=0.0,
    repeats=2,
)
_LARGE = _Sizes(
    world=8,
    in_flight=(8, 32, 128, 512),
    isls=(512, 2048),
    osl=64,
    skewed=64,
    step_tokens=8192,
    limit_s=50.0,
    repeats=1,
)


def setup_for(config: EngineConfig, *, world: int, fidelity: str, repeats: int) -> Setup:
    """What is left open, by machine; 0 and "auto" are open.

    Raises:
        ConfigError: an unknown fidelity, or a model that cannot be.
    """
    if fidelity not in FIDELITIES:
        raise ConfigError(f"unknown fidelity '{fidelity}'; known: {', '.join(FIDELITIES)}")
    kind = torch.device(resolve(replace(config, scale="tiny", load="random")).device).type
    world = world or (_SMALL if kind == "cpu" else _LARGE).world
    chosen: Literal["real", "rank-slice"] = "real"
    enough = kind == "cpu" or torch.cuda.device_count() >= world
    if fidelity == "rank-slice" or (fidelity == "auto" and not enough):
        chosen = "rank-slice"
    resolved = resolve(replace(config, parallel=layout_of("dp", world), fidelity=chosen))
    small = is_small(resolved.scale, resolved.device)
    return Setup(
        world=world,
        scale=resolved.scale,
        fidelity=chosen,
        repeats=repeats or (_SMALL if small else _LARGE).repeats,
        small=small,
    )


def bench_for(
    make: Callable[..., Bench],
    setup: Setup,
    *,
    in_flight: Sequence[int] = (),
    isls: Sequence[int] = (),
    osl: int = 0,
    skewed: int = 0,
    step_tokens: int = 0,
    limit_s: float = 0.0,
) -> Bench:
    """The bench with what is given, and the machine's sizes for what is empty or 0."""
    sizes = _SMALL if setup.small else _LARGE
    return make(
        world=setup.world,
        in_flight=tuple(in_flight) or sizes.in_flight,
        isls=tuple(isls) or sizes.isls,
        osl=osl or sizes.osl,
        skewed=skewed or max(sizes.skewed, 2 * setup.world),
        step_tokens=step_tokens or sizes.step_tokens,
        limit_s=limit_s or sizes.limit_s,
    )
