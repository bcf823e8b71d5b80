"""Selecting entries that lie on several ranks: index keys travel, the best so far stay.

Shared by DeepSeek-V4's CSA and by DSA. The selection is that of one rank which has all entries:
of two entries with the same score the lower one goes first, whichever came first.

What a row pays beside one rank that scores all entries at once, in bytes for each block and
selected entry: 12 for the score and the index that the choice writes, 16 for turning the index into
the entry's number (read 8 + 4, written 4), 16 for laying blocks side by side, and about 24, six
passes over the scores, for choosing among those of `KEPT_BLOCKS` blocks. Together about
`overlap.PICK_BYTES`. Nothing here waits for the device.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from kllm import kernels
from kllm.attention.context import ForwardContext, all_to_device, once_a_step
from kllm.attention.indexing import SCORE_BYTES, IndexQuery
from kllm.attention.ring import ShardedPiece, Shards, find_shards, travelling, unpack_part
from kllm.attention.workspace import Rows, row_blocks
from kllm.cache.shards import entry_places, entry_ranks

KEPT_BLOCKS = 8  # the best entries of so many blocks are kept before the best of them are chosen


class _Best:
    """The best entries of some queries so far: those of several blocks side by side.

    Args:
        topk: entries that a query selects.
    """

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self._scores: list[Tensor] = []  # [queries, s] float32 of each block; -inf: not seen
        self._ids: list[Tensor] = []  # [queries, s] int32 entries of the request

    def add(self, scores: Tensor, ids: Tensor) -> None:
        """Take in the best of one more block."""
        if len(self._scores) == KEPT_BLOCKS:
            scores_so_far, ids_so_far = self._merge()
            self._scores, self._ids = [scores_so_far], [ids_so_far]
        self._scores.append(scores)
        self._ids.append(ids)

    def _merge(self) -> tuple[Tensor, Tensor]:
        """Scores and entries of the best of all."""
        if len(self._scores) == 1:
            return self._scores[0], self._ids[0]
        scores, ids = torch.cat(self._scores, dim=1), torch.cat(self._ids, dim=1)
        if not scores.is_cuda:  # where `top_entries` breaks ties by place, places follow entries
            ids, order = ids.sort(dim=1)
            scores = scores.gather(1, order)
        best, which = kernels.top_entries(scores, self.topk)
        return best, ids.gather(1, which)

    def finish(self) -> Tensor:
        """[queries, topk] int32 entries, in no order; -1: none."""
        scores, ids = self._merge()
        return _widened(ids.masked_fill_(scores == float("-inf"), -1), self.topk, -1)


def _widened(x: Tensor, width: int, value: float) -> Tensor:
    """[n, s] with columns of `value` behind, up to `width`."""
    return F.pad(x, (0, width - x.shape[1]), value=value) if x.shape[1] < width else x


@dataclass(frozen=True, slots=True)
class _Directory:
    """Where the entries of any request lie, as far as those of the step reach."""

    part: int  # places of the longest part, in any rank's numbering
    # [entries + 1] int32: rank * part + place; the last is -1, so that -1 (no entry) leads to -1
    numbers: Tensor
    ids: Tensor  # [ranks, part] int32, the inverse


@dataclass(frozen=True, slots=True)
class ListedEntries:
    """What some queries have selected, by the rank that holds it: worked out once for all hops."""

    places: Tensor  # [n, topk] int32 in the part of a rank; those of one rank stand together
    starts: Tensor  # [n, ranks + 1] int32, where in its row each rank's begin

    def bounds(self, source: int) -> tuple[Tensor, Tensor]:
        """[n] int32 each: which stretch of each row lies on `source`."""
        return self.starts[:, source], self.starts[:, source + 1]


def list_entries(ctx: ForwardContext, shards: Shards, ids: Tensor) -> ListedEntries:
    """Selected entries [n, topk] int32 of requests, -1: none, by the rank that holds each."""
    directory = _directory(ctx, shards.ratio)
    numbers = directory.numbers[ids]
    return ListedEntries(*kernels.split_lists(numbers, directory.part, shards.entries.ranks))


def select_travelling(
    ctx: ForwardContext, layer: int, shards: Shards, index: IndexQuery
) -> list[Tensor | None]:
    """The entries that the queries of each piece select, over the shards of all ranks.

    Called on all ranks of the group; the step's index keys are in their pages already.

    Returns:
        Of each piece [rows, topk] int32 entries of its request, -1: none; or None where no query
        sees more than `topk` entries, so that each attends to all it sees.
    """
    selecting = [piece.end // shards.ratio > index.topk for piece in shards.pieces]
    if not any(selecting):  # alike on all ranks
        return [None] * len(selecting)
    best = [_Best(index.topk) if selects else None for selects in selecting]
    ids, seen = _directory(ctx, shards.ratio).ids, _visible(ctx, shards.ratio)
    for source, block in travelling(ctx, index.state, layer, shards):
        for piece, running, visible in zip(shards.pieces, best, seen, strict=True):
            if running is not None and piece.spans[source]:
                keys = unpack_part(ctx.pool, index.state, block[piece.parts[source]]).squeeze(1)
                _add_block(running, piece, index, keys, ids[source], visible[source])
    none = torch.empty(0, index.topk, dtype=torch.int32, device=index.q.device)
    return [
        None if running is None else running.finish() if piece.runs else none
        for running, piece in zip(best, shards.pieces, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Visible:
    """How many entries of a part each row of a piece sees; it grows along the rows."""

    host: NDArray[np.int32]  # [rows]
    device: Tensor  # the same


def _add_block(
    best: _Best, piece: ShardedPiece, index: IndexQuery, keys: Tensor, ids: Tensor, seen: _Visible
) -> None:
    """Score the keys [s, D] of one rank for a piece's queries, in blocks of these."""
    count, width = len(seen.host), min(best.topk, int(seen.host[-1]))
    found, which = Rows(count), Rows(count)
    for rows in row_blocks(count, SCORE_BYTES * len(keys)):
        own = slice(piece.rows.start + rows.start, piece.rows.start + rows.stop)
        most = int(seen.host[rows.stop - 1])
        visible = None if seen.host[rows.start] == most else seen.device[rows]
        scores = kernels.index_scores(index.q[own], index.weights[own], keys[:most], None, visible)
        top, places = kernels.top_entries(scores, width)
        found.put(rows, _widened(top, width, float("-inf")))
        which.put(rows, _widened(ids[:most][places], width, -1))
    best.add(found.finish(), which.finish())


@once_a_step
def _visible(ctx: ForwardContext, ratio: int) -> list[list[_Visible]]:
    """Of each piece and rank."""
    shards = find_shards(ctx, ratio)
    ranks = shards.entries.ranks
    hosts = [_seen(piece, source) for piece in shards.pieces for source in range(ranks)]
    found = map(_Visible, hosts, all_to_device(hosts, ctx.positions.device))
    return [[next(found) for _ in range(ranks)] for _ in shards.pieces]


def _seen(piece: ShardedPiece, source: int) -> NDArray[np.int32]:
    host = np.zeros(piece.rows.stop - piece.rows.start, np.int32)
    for span in piece.spans[source]:
        host[span.rows] = np.minimum(
            span.keys, np.maximum(span.first + np.arange(span.count), 0) // span.step
        )
    return host


@once_a_step
def _directory(ctx: ForwardContext, ratio: int) -> _Directory:
    shards = find_shards(ctx, ratio)
    ranks, device = shards.entries.ranks, ctx.positions.device
    longest = max(piece.end // ratio for piece in shards.pieces)
    part = max(shards.entries.count(rank, longest) for rank in range(ranks))
    ids = torch.arange(longest, device=device)
    numbers = entry_ranks(shards.entries, ids) * part + entry_places(shards.entries, ids)
    numbers = torch.cat((numbers, numbers.new_full((1,), -1)))
    inverse = torch.zeros(ranks * part, dtype=torch.int32, device=device)
    inverse[numbers[:-1]] = ids.int()
    return _Directory(part, numbers.int(), inverse.view(ranks, part))
