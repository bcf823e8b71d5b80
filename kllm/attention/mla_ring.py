"""MLA over a ring: latents travel, in the form they are cached in (see `kllm.attention.ring`).

All heads of a rank attend to a block of latents before the next one is theirs. In the expanded
form a rank makes keys and values of every block itself, which saves sending them and costs each
rank of the group the same products: it pays for many queries a rank. Selected entries (DSA) are
attended to in the absorbed form, in each block those that lie there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kllm import kernels
from kllm.attention.context import ForwardContext
from kllm.attention.latent import LatentHeads, causal_pairs
from kllm.attention.ring import RingPiece, Shards, find_shards, travelling, unpack_part
from kllm.attention.rings import Chunk
from kllm.cache.shards import entry_places, entry_ranks
from kllm.kernels import SoftmaxState, Span

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


class _Job:
    """The softmax of one piece's queries, in one of the forms."""

    def __init__(
        self,
        shards: Shards,
        piece: RingPiece,
        q: Tensor,
        heads: LatentHeads,
        chosen: tuple[_Located | None, ...],
    ) -> None:
        self.shards, self.piece, self.heads = shards, piece, heads
        self.chosen = chosen  # of each run
        dense = all(located is None for located in chosen)
        self.expanded = dense and expanding_pays(heads, piece)
        self.q = q if self.expanded else heads.absorb(q)
        width = heads.values.shape[1] if self.expanded else heads.keys.shape[2]
        self.state = SoftmaxState.empty(q.shape[0], q.shape[1], width, q.device)

    def add(self, source: int, entries: Tensor) -> None:
        """Take in the entries [s, R + rope] of one rank."""
        spans = self.shards.spans(self.piece, source)
        if self.expanded:
            self.heads.add_expanded(self.state, self.q, entries, spans)
            return
        sparse = {run.rows.start - self.piece.rows.start for run in self._sparse_runs()}
        dense = [span for span in spans if span.rows.start not in sparse]
        if dense:
            self._add_dense(entries, dense)
        for run, located in zip(self.piece.runs, self.chosen, strict=True):
            if located is not None and self.shards.visible(run, source):
                self._add_selected(run, entries, located.within(source))

    def _sparse_runs(self) -> list[Chunk]:
        runs = zip(self.piece.runs, self.chosen, strict=True)
        return [run for run, located in runs if located is not None]

    def _add_dense(self, entries: Tensor, spans: list[Span]) -> None:
        rank = self.heads.keys.shape[2]
        key = entries.unsqueeze(1)
        kernels.block_attention(self.state, self.q, key, key[..., :rank], spans, self.heads.scale)

    def _add_selected(self, run: Chunk, entries: Tensor, idx: Tensor) -> None:
        first = self.piece.rows.start
        rows = slice(run.rows.start - first, run.rows.stop - first)
        rank = self.heads.keys.shape[2]
        kernels.sparse_block_attention(
            self.state.rows(rows), self.q[rows], entries, idx, self.heads.scale, rank
        )

    def finish(self) -> Tensor:
        """[rows, H, V], when all ranks' entries have been taken in."""
        o = kernels.finish_softmax(self.state, self.q.dtype)
        return o if self.expanded else self.heads.project(o)


def attend_travelling(
    ctx: ForwardContext,
    layer: int,
    name: str,
    q: Tensor,
    heads: LatentHeads,
    chosen: tuple[Tensor | None, ...] | None,
    out: Tensor,
) -> None:
    """Attention of the step's prompts while latents travel; fills their rows of `out`.

    Called on all ranks of the group; the step's entries are in their pages already.

    Args:
        name: the paged state of the latents.
        q: [T, H, N + rope].
        chosen: of each chunk [rows, topk] entries, -1: none; None: all. None: no chunk selects.
        out: [T, H, V].
    """
    shards = find_shards(ctx, 1)
    located = _locate(ctx, shards, chosen)
    jobs, first = [], 0
    for index, piece in enumerate(shards.pieces):
        last = first + len(piece.runs)
        if piece.runs:
            jobs.append((index, _Job(shards, piece, q[piece.rows], heads, located[first:last])))
        first = last
    for source, block in travelling(ctx, name, layer, shards):
        for index, job in jobs:
            part = block[shards.pieces[index].parts[source]]
            if len(part):
                job.add(source, unpack_part(ctx.pool, name, part).squeeze(1))
    for _, job in jobs:
        out[job.piece.rows] = job.finish()


def expanding_pays(heads: LatentHeads, piece: RingPiece) -> bool:
    """Whether the expanded form of a dense piece costs this rank fewer FLOPs."""
    count = sum(run.end - run.start for run in piece.runs)
    pairs = sum(causal_pairs(run.start, run.end) for run in piece.runs)
    return heads.expanding_is_cheaper(piece.end, count, pairs, pairs)


def _locate(
    ctx: ForwardContext, shards: Shards, chosen: tuple[Tensor | None, ...] | None
) -> tuple[_Located | None, ...]:
    """Of each chunk of the step; worked out once for the layers that share a selection."""
    if chosen is None:
        return (None,) * sum(len(piece.runs) for piece in shards.pieces)
    known = ctx.shared.get(LOCATED)
    if known is None or known[0] is not chosen:
        found = tuple(None if ids is None else _Located.of(shards, ids) for ids in chosen)
        known = ctx.shared[LOCATED] = (chosen, found)
    result: tuple[_Located | None, ...] = known[1]
    return result
