"""Where the ranks of a layout stand, and which of them form a group. No torch.

Ranks are numbered with tensor parallelism innermost: neighbours exchange the most.
"""

from dataclasses import dataclass

from kllm.config import ParallelConfig

Groups = tuple[tuple[int, ...], ...]


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
