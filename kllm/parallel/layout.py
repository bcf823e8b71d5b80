"""Layouts: their text form, where their ranks stand, and which of them a model allows. No torch.

Ranks are numbered with tensor parallelism innermost: neighbours exchange the most.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import gcd

from kllm.config import CP_KINDS, ParallelConfig
from kllm.errors import ConfigError

Groups = tuple[tuple[int, ...], ...]
DEGREES = ("tp", "dp", "ep", "cp", "pp")
COUNTS = (*DEGREES, "redundant_experts")


def parse(text: str) -> ParallelConfig:
    """A layout from text such as "tp=2,dp=4,ep=8" or "cp=4,cp_kind=ring".

    Raises:
        ConfigError: for anything that is no layout.
    """
    known = [field.name for field in fields(ParallelConfig)]
    found: dict[str, str | int] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in known:
            raise ConfigError(
                f"layout '{text}' cannot be read at '{part.strip()}'; give degrees as in "
                f"tp=2,dp=4,ep=8 (known: {', '.join(known)})"
            )
        if key in found:
            raise ConfigError(f"layout '{text}' names {key} twice; give it once")
        if key in COUNTS and not value.isdecimal():
            raise ConfigError(f"layout '{text}' needs a whole number for {key}, got '{value}'")
        found[key] = int(value) if key in COUNTS else value.replace("-", "_")
    return ParallelConfig(**found)  # type: ignore[arg-type]  # ParallelConfig checks the values


def short_name(layout: ParallelConfig) -> str:
    """The degrees above 1 as people write them: "dp4·tp2+ep8", "cp4 ring", "1 rank"."""
    kind = "" if layout.cp_kind == "auto" else " " + layout.cp_kind.replace("_", "-")
    parts = [
        f"{axis}{getattr(layout, axis)}{kind if axis == 'cp' else ''}"
        for axis in ("pp", "dp", "cp", "tp")
        if getattr(layout, axis) > 1
    ]
    experts = f"+ep{layout.ep}" if layout.ep > 1 else ""
    return "·".join(parts) + experts if parts else "1 rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """What of a model a layout cuts."""

    layers: int
    cuts: tuple[tuple[str, int], ...]  # (what, how many): tensor parallelism divides each
    experts: int = 0  # routed experts of a layer; 0: a dense model
    expert_columns: int = 0  # hidden features of one expert


def problem(dims: Dimensions, layout: ParallelConfig) -> str | None:
    """Why a model cannot run in a layout, in one sentence; None: it can."""
    cuts = dict(dims.cuts)
    if dims.experts and layout.ep == 1:
        cuts["expert columns"] = dims.expert_columns
    for what, count in cuts.items():
        if count % layout.tp:
            tps = ", ".join(str(n) for n in _divisors(gcd(*cuts.values())))
            return f"tp {layout.tp} does not divide the {count} {what}; use a tp of {tps}"
    if layout.ep > 1 and not dims.experts:
        return f"ep {layout.ep} has nothing to spread: the model has no experts; use an ep of 1"
    slots, copies = dims.experts + layout.redundant_experts, layout.redundant_experts
    if slots > dims.experts * layout.ep:
        return (
            f"{copies} redundant experts are more than ep {layout.ep} has room for: a rank holds "
            f"an expert once; use at most {dims.experts * (layout.ep - 1)}"
        )
    if layout.ep > 1 and slots % layout.ep:
        return (
            f"ep {layout.ep} does not divide the {slots} experts"
            + (f" ({copies} of them redundant)" if copies else "")
            + f"; use an ep that does, or redundant_experts={copies - slots % -layout.ep}"
        )
    if layout.pp > dims.layers:
        return (
            f"pp {layout.pp} leaves pipeline stages empty: the model has {dims.layers} layers; "
            f"use a pp of at most {dims.layers}"
        )
    return None


def check(dims: Dimensions, layout: ParallelConfig) -> None:
    """Check that a model can run in a layout.

    Raises:
        ConfigError: when it cannot.
    """
    why = problem(dims, layout)
    if why is not None:
        raise ConfigError(why)


def layouts(dims: Dimensions, world: int) -> tuple[ParallelConfig, ...]:
    """All layouts of `world` ranks that a model allows, by each kind of context parallelism."""
    found = (layout for layout in _all_layouts(world) if problem(dims, layout) is None)
    return tuple(found)


def _all_layouts(world: int) -> Iterator[ParallelConfig]:
    for pp in _divisors(world):
        stage = world // pp
        for cp in _divisors(stage):
            for tp in _divisors(stage // cp):
                spreads = {1, *(ep for ep in _divisors(stage) if ep % tp == 0)}
                for ep in sorted(spreads):
                    for kind in CP_KINDS[1:] if cp > 1 else CP_KINDS[:1]:
                        dp = stage // cp // tp
                        yield ParallelConfig(tp=tp, dp=dp, ep=ep, cp=cp, pp=pp, cp_kind=kind)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def stage_bounds(layers: int, stages: int) -> tuple[int, ...]:
    """First layers of the pipeline stages, and the end: the first ones may have one more.

    The last stage is not among the longer ones, because the lm head is its work too.
    """
    each, more = divmod(layers, stages)
    return tuple(each * i + min(i, more) for i in range(stages + 1))


@dataclass(frozen=True, slots=True)
class Place:
    """The coordinates of a rank."""

    pp: int  # pipeline stage
    dp: int  # which requests
    cp: int  # which part of a prompt
    tp: int  # which heads and columns


def place(layout: ParallelConfig, rank: int) -> Place:
    """The coordinates of `rank`."""
    rank, tp = divmod(rank, layout.tp)
    rank, cp = divmod(rank, layout.cp)
    pp, dp = divmod(rank, layout.dp)
    return Place(pp, dp, cp, tp)


def rank_of(layout: ParallelConfig, at: Place) -> int:
    """The rank with these coordinates."""
    return ((at.pp * layout.dp + at.dp) * layout.cp + at.cp) * layout.tp + at.tp


def sampling_rank(layout: ParallelConfig) -> int:
    """The first of the ranks that sample: those of the last stage do."""
    return rank_of(layout, Place(layout.pp - 1, 0, 0, 0))


def tp_groups(layout: ParallelConfig) -> Groups:
    """Ranks that split heads, columns and vocabulary."""
    return _runs(range(layout.world), layout.tp)


def ep_groups(layout: ParallelConfig) -> Groups:
    """Ranks that hold the experts of a stage together."""
    return _runs(range(layout.world), layout.ep)


def cp_groups(layout: ParallelConfig) -> Groups:
    """Ranks that share the prompts of the same requests, with the same heads."""
    return _strided(layout, layout.tp, layout.cp)


def pp_groups(layout: ParallelConfig) -> Groups:
    """Ranks that pass a batch on from stage to stage."""
    return _strided(layout, layout.world // layout.pp, layout.pp)


def _runs(ranks: range, size: int) -> Groups:
    return tuple(tuple(ranks[start : start + size]) for start in range(0, len(ranks), size))


def _strided(layout: ParallelConfig, stride: int, count: int) -> Groups:
    span = stride * count
    return tuple(
        tuple(range(block + offset, block + span, stride))
        for block in range(0, layout.world, span)
        for offset in range(stride)
    )
