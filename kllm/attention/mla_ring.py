"""MLA over a ring: latents travel, in the form they are cached in (see `kllm.attention.ring`).

All heads of a rank attend to a block of latents before the next one is theirs. In the expanded
form a rank makes keys and values of every block itself, which saves sending them and costs each
rank of the group the same products: it pays for many queries a rank. Selected entries (DSA) are
attended to in the absorbed form, in each block those that lie there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kllm.attention.context import ForwardContext
from kllm.attention.latent import LatentHeads, LatentSoftmax, expanding_pays
from kllm.attention.ring import ShardedPiece, Shards, find_shards, travelling, unpack_part
from kllm.cache.shards import entry_places, entry_ranks

LOCATED = "located selection"  # in a step's shared values


@dataclass(frozen=True, slots=True)
class _Located:
    """Which shard each selected entry of some queries is in, and where."""

    ranks: Tensor  # [n, topk] int8; -1: no entry
    places: Tensor  # [n, topk] int32 in that rank's part

    @classmethod
    def of(cls, shards: Shards, ids: Tensor) -> "_Located":
        ranks = torch.where(ids < 0, -1, entry_ranks(shards.entries, ids))
        return cls(ranks.to(torch.int8), entry_places(shards.entries, ids).int())

    def within(self, source: int) -> Tensor:
        """[n, topk] int32 rows of the part that `source` holds; -1: not there."""
        return torch.where(self.ranks == source, self.places, -1)


@dataclass(frozen=True, slots=True)
class _Job:
    """One piece's queries and what they have taken in."""

    piece: ShardedPiece
    softmax: LatentSoftmax
    chosen: tuple[_Located | None, ...]  # of each run; None: it attends to all it sees

    def add(self, shards: Shards, source: int, entries: Tensor) -> None:
        """Take in the entries [s, R + rope] of one rank."""
        first, dense = self.piece.rows.start, []
        seen = {span.rows.start: span for span in shards.spans(self.piece, source)}
        for run, located in zip(self.piece.runs, self.chosen, strict=True):
            span = seen.get(run.rows.start - first)
            if span is not None and located is None:
                dense.append(span)
            elif span is not None and located is not None:
                self.softmax.add_selected(span.rows, entries, located.within(source))
        self.softmax.add(entries, dense)


def attend_travelling_latents(
    ctx: ForwardContext,
    layer: int,
    name: str,
    q: Tensor,
    heads: LatentHeads,
    chosen: tuple[Tensor | None, ...],
    out: Tensor,
) -> None:
    """Attention of the step's prompts while latents travel; fills their rows of `out`.

    Called on all ranks of the group; the step's entries are in their pages already.

    Args:
        name: the paged state of the latents.
        q: [T, H, N + rope].
        chosen: of each chunk [rows, topk] entries, -1: none; None: it attends to all it sees.
        out: [T, H, V].
    """
    shards = find_shards(ctx, 1)
    located = _locate(ctx, shards, chosen)
    jobs, first = [], 0
    for piece in shards.pieces:
        last = first + len(piece.runs)
        if piece.runs:
            some = located[first:last]
            expanded = not any(some) and expanding_pays(heads, piece.runs, piece.end)
            softmax = LatentSoftmax(heads, q[piece.rows], expanded)
            jobs.append(_Job(piece, softmax, some))
        first = last
    for source, block in travelling(ctx, name, layer, shards):
        for job in jobs:
            part = block[job.piece.parts[source]]
            if len(part):
                job.add(shards, source, unpack_part(ctx.pool, name, part).squeeze(1))
    for job in jobs:
        out[job.piece.rows] = job.softmax.finish()


def _locate(
    ctx: ForwardContext, shards: Shards, chosen: tuple[Tensor | None, ...]
) -> tuple[_Located | None, ...]:
    """Of each chunk of the step; worked out once for the layers that share a selection."""
    known = ctx.shared.get(LOCATED)
    if known is None or known[0] is not chosen:
        found = tuple(None if ids is None else _Located.of(shards, ids) for ids in chosen)
        known = ctx.shared[LOCATED] = (chosen, found)
    result: tuple[_Located | None, ...] = known[1]
    return result
