"""Selecting entries that lie on several ranks: index keys travel, the best so far stay.

Shared by DeepSeek-V4's CSA and by DSA. The selection is that of one rank which has all entries:
of two entries with the same score the lower one goes first, whichever came first.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kllm import kernels
from kllm.attention.context import ForwardContext
from kllm.attention.indexing import IndexQuery
from kllm.attention.ring import ShardedPiece, Shards, travelling, unpack_part
from kllm.attention.workspace import row_blocks
from kllm.cache.shards import entry_places, entry_ranks, held_entries
from kllm.kernels import Span


@dataclass(frozen=True, slots=True)
class _Best:
    """The best entries of some queries so far, updated in place."""

    scores: Tensor  # [n, topk] float32; -inf: none
    ids: Tensor  # [n, topk] int64 entries of the request; -1: none

    @classmethod
    def empty(cls, queries: int, topk: int, device: torch.device) -> "_Best":
        scores = torch.full((queries, topk), float("-inf"), device=device)
        return cls(scores, torch.full((queries, topk), -1, device=device))

    def add(self, rows: slice, scores: Tensor, ids: Tensor) -> None:
        """Take in the scores [rows, s] of the entries `ids` [s], which are in order."""
        topk = self.ids.shape[1]
        top = kernels.top_entries(scores, topk)
        scores = torch.cat((self.scores[rows], scores.gather(1, top)), dim=1)
        found = torch.cat((self.ids[rows], ids[top]), dim=1)
        if not scores.is_cuda:  # where `top_entries` breaks ties by place, places follow entries
            found, order = found.sort(dim=1)
            scores = scores.gather(1, order)
        top = kernels.top_entries(scores, topk)
        self.scores[rows] = scores.gather(1, top)
        self.ids[rows] = found.gather(1, top)


def select_travelling(
    ctx: ForwardContext, layer: int, shards: Shards, index: IndexQuery
) -> list[Tensor | None]:
    """The entries that the queries of each piece select, over the shards of all ranks.

    Called on all ranks of the group; the step's index keys are in their pages already.

    Returns:
        Of each piece [rows, topk] int64 entries of its request, -1: none; or None where no query
        sees more than `topk` entries, so that each attends to all it sees.
    """
    selects = [piece.end // shards.ratio > index.topk for piece in shards.pieces]
    if not any(selects):  # alike on all ranks
        return [None] * len(selects)
    best = [
        _Best.empty(piece.rows.stop - piece.rows.start, index.topk, index.q.device)
        for piece in shards.pieces
    ]
    for source, block in travelling(ctx, index.state, layer, shards):
        for piece, running in zip(shards.pieces, best, strict=True):
            spans = shards.spans(piece, source)
            if not spans or piece.end // shards.ratio <= index.topk:
                continue
            keys = unpack_part(ctx.pool, index.state, block[piece.parts[source]]).squeeze(1)
            ids = held_entries(shards.entries, source, 0, len(keys), keys.device)
            for span in spans:
                _add_span(running, piece, span, keys[: span.keys], ids[: span.keys], index)
    return [
        running.ids.masked_fill(running.scores == float("-inf"), -1) if selected else None
        for running, selected in zip(best, selects, strict=True)
    ]


def _add_span(
    best: _Best, piece: ShardedPiece, span: Span, keys: Tensor, ids: Tensor, index: IndexQuery
) -> None:
    """Score the keys [s, D] of one rank for a span of a piece's queries, in blocks of these."""
    place = torch.arange(len(keys), device=keys.device)
    for block in row_blocks(span.count, 16 * len(keys)):
        start, stop = block.start, block.stop
        rows = slice(span.rows.start + start, span.rows.start + stop)
        own = slice(piece.rows.start + rows.start, piece.rows.start + rows.stop)
        scores = kernels.index_scores(index.q[own], index.weights[own], keys)
        if span.seen(start) < len(keys):
            row = torch.arange(start, stop, device=keys.device).unsqueeze(1)
            hidden = place >= (span.first + row) // span.step
            scores = scores.masked_fill(hidden, float("-inf"))
        best.add(rows, scores, ids)


def part_of(shards: Shards, ids: Tensor, source: int) -> Tensor:
    """Where selected entries [n, topk] lie in the part that `source` holds; -1: not there."""
    here = (ids >= 0) & (entry_ranks(shards.entries, ids) == source)
    return torch.where(here, entry_places(shards.entries, ids), -1)
