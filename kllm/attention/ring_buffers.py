"""Ring buffers: the newest rows of each request's window and tails, addressed by position.

A step reads older rows and writes those of its tokens. Requests that run one token (decodes) are
handled as tensors, with shapes that depend on the batch only, so that a CUDA graph can hold them.
Longer ones (chunks) are handled together: a layer lays all that they may see in one tensor
(`read_near`), and where each row stands in it is worked out on the host, once for all layers of a
step (`near_rows`). (The ring of ring attention is another one, of ranks: `kllm.attention.ring`.)

Under context parallelism a chunk is one stretch of a piece that the ranks of a group run together,
and each rank keeps the rings of all requests. So the rows of a piece that stay in the ring are
gathered over the group, and those that are read across the seam between two stretches, whose
ranks differ. What comes before the piece is in every rank's ring.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kllm.attention.chunks import Chunk, chunks
from kllm.attention.context import ForwardContext, all_to_device, once_a_step
from kllm.parallel.sequence import Piece
from kllm.parallel.stripes import Stripes

NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class NearRows:
    """Where the rows of a ring state lie that a step's chunks see, alike in all its layers.

    They stand one after the other: R older ones from the ring, S that the ranks of the group
    exchange, and those of the step's T tokens.
    """

    older: Tensor | None  # [R] int64 ring slots; None: none
    source: Tensor | None  # [n] int64 tokens that this rank sends, S = ranks * n; None: no group
    kept: Tensor | None  # [N] int64 which of the rows stay in the ring; None: the step's own
    slots: Tensor  # [N] int64 ring slots of these
    begins: tuple[int, ...]  # of each chunk the oldest position that it may read
    places: tuple[NDArray[np.int64], ...]  # of each chunk where its rows from there on stand


@once_a_step
def near_rows(ctx: ForwardContext, length: int, reach: int, ratio: int = 1) -> NearRows:
    """Where the layers of a ring state find what they read in a step, and what they keep of it.

    Args:
        length: rows a ring.
        reach: rows that a chunk needs before the group of tokens that its first one lies in.
        ratio: tokens a group.
    """
    found, device = chunks(ctx), ctx.positions.device
    if ctx.sequence is None and not found:
        return NearRows(None, None, None, ctx.ring_slots(length), (), ())
    begins = [max(0, chunk.start // ratio * ratio - reach) for chunk in found]
    older = [_older(ctx, chunk, begin) for chunk, begin in zip(found, begins, strict=True)]
    seams = None if ctx.sequence is None else _find_seams(ctx, length, reach)
    read = sum(map(len, older))
    own = read + (seams.received if seams else 0)
    kept, in_rings = NOTHING, NOTHING
    if seams:
        kept = np.concatenate((own + np.arange(ctx.num_decodes), read + seams.newest))
    elif any(chunk.end - chunk.start > length for chunk in found):
        in_rings = _newest(ctx, length)
        kept = own + in_rings
    arrays = {
        "requests": np.repeat([chunk.request for chunk in found], [len(some) for some in older]),
        "offsets": np.concatenate([NOTHING, *older]) % length,
        "kept": kept,
        "slots": seams.slots if seams else in_rings,
        "source": seams.source if seams else NOTHING,
    }
    long = [array.astype(np.int64) for array in arrays.values()]
    put = dict(zip(arrays, all_to_device(long, device), strict=True))
    slots = put["slots"] if seams else ctx.ring_slots(length)
    if seams and ctx.num_decodes:
        slots = torch.cat((ctx.ring_slots(length)[: ctx.num_decodes], slots))
    elif len(kept) and not seams:
        slots = slots[put["slots"]]
    return NearRows(
        older=ctx.rows[put["requests"]] * length + put["offsets"] if read else None,
        source=put["source"] if seams else None,
        kept=put["kept"] if len(kept) else None,
        slots=slots,
        begins=tuple(begins),
        places=tuple(_places(found, begins, older, seams, own)),
    )


def _older(ctx: ForwardContext, chunk: Chunk, begin: int) -> NDArray[np.int64]:
    """Positions before a chunk, from `begin` on, that were in the ring before the step."""
    end = chunk.start
    if ctx.sequence is not None:
        end = max(begin, ctx.sequence.step.pieces[chunk.piece].start)
    return np.arange(begin, end)


def _places(
    found: Sequence[Chunk],
    begins: Sequence[int],
    older: Sequence[NDArray[np.int64]],
    seams: "_Seams | None",
    own: int,
) -> list[NDArray[np.int64]]:
    """See `NearRows.places`; the step's own tokens stand from `own` on."""
    places, filled, read = [], 0, sum(map(len, older))
    for chunk, begin, positions in zip(found, begins, older, strict=True):
        parts = [np.arange(filled, filled + len(positions))]
        filled += len(positions)
        if seams:
            shared = np.arange(begin + len(positions), chunk.start)
            parts.append(read + seams.places(chunk.piece, shared))
        parts.append(np.arange(own + chunk.rows.start, own + chunk.rows.stop))
        places.append(np.concatenate(parts))
    return places


def _newest(ctx: ForwardContext, length: int) -> NDArray[np.int64]:
    """Indices of the step's tokens that are among the newest `length` of their request."""
    parts = [np.arange(ctx.num_decodes)]
    for chunk in chunks(ctx):
        first = max(chunk.rows.start, chunk.rows.stop - length)
        parts.append(np.arange(first, chunk.rows.stop))
    return np.concatenate(parts)


def read_near(ctx: ForwardContext, near: NearRows, name: str, layer: int, rows: Tensor) -> Tensor:
    """What a layer's chunks may see of a ring state: [R + S + T, channels or bytes], as stored.

    Called before `write_near`, once for each state and layer, on all ranks of the group.

    Args:
        rows: [T, channels] of the step's tokens.
    """
    parts, stored, rings = [], ctx.pool.pack(name, rows), ctx.pool.rings(name, layer)
    if near.older is not None:
        parts.append(rings.flatten(0, 1).index_select(0, near.older))
    if near.source is not None:
        assert ctx.sequence is not None
        comm, sent = ctx.sequence.comm, stored.index_select(0, near.source)
        received = sent.new_empty(comm.size * len(sent), *sent.shape[1:])
        comm.all_gather(received, sent).wait()
        parts.append(received)
    return torch.cat((*parts, stored)) if parts else stored


def write_near(ctx: ForwardContext, near: NearRows, name: str, layer: int, stored: Tensor) -> None:
    """Keep what later steps see of the rows that `read_near` returned; of long chunks the newest.

    Under context parallelism those of the group's pieces.
    """
    own = slice(len(stored) - len(near.slots), len(stored))
    kept = stored[own] if near.kept is None else stored.index_select(0, near.kept)
    ctx.pool.rings(name, layer).flatten(0, 1).index_copy_(0, near.slots, kept)


@once_a_step
def window_lists(ctx: ForwardContext, length: int, window: int) -> Tensor:
    """[chunks' tokens, window] int32: which near rows each token of the chunks sees; -1: none.

    Its own comes last. Kept for the step: 512 bytes a token with a window of 128.
    """
    near = near_rows(ctx, length, window - 1)
    depth, at, filled = [], [], 0
    for chunk, begin, places in zip(chunks(ctx), near.begins, near.places, strict=True):
        depth.append(np.arange(chunk.start - begin, chunk.end - begin))
        at.append(filled + depth[-1])
        filled += len(places)
    parts = (near.places, depth, at)
    arrays = [np.concatenate([NOTHING, *some]).astype(np.int32) for some in parts]
    rows, older, last = all_to_device(arrays, ctx.positions.device)
    back = torch.arange(window - 1, -1, -1, dtype=torch.int32, device=rows.device)
    lists = rows[(last.unsqueeze(1) - back).clamp_min(0)]
    return lists.masked_fill_(back > older.unsqueeze(1), -1)


@once_a_step
def window_slots(ctx: ForwardContext, length: int, window: int) -> Tensor:
    """[decodes, window] int64: ring slots of each decode's newest positions, its own last.

    `length` is the ring's. Positions before the first token give -1.
    """
    count = ctx.num_decodes
    back = torch.arange(window - 1, -1, -1, device=ctx.positions.device)
    positions = ctx.positions[:count].unsqueeze(1) - back
    slots = ctx.rows[:count].unsqueeze(1) * length + positions % length
    return slots.masked_fill(positions < 0, -1)


@dataclass(frozen=True, slots=True)
class _Seams:
    """Which rows the ranks share, in order of piece and position: as many are sent by each."""

    positions: tuple[NDArray[np.int64], ...]  # of each piece
    source: NDArray[np.int64]  # [n] tokens of this rank that it sends, some repeated
    received: int  # ranks * n
    order: NDArray[np.int64]  # where each shared row stands among the received ones
    newest: NDArray[np.int64]  # [N] which of the received rows stay in the ring
    slots: NDArray[np.int64]  # [N] ring slots of these

    def places(self, piece: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where positions of a piece stand among the received rows."""
        before = sum(map(len, self.positions[:piece]))
        return self.order[before + np.searchsorted(self.positions[piece], positions)]


def _find_seams(ctx: ForwardContext, length: int, reach: int) -> _Seams:
    assert ctx.sequence is not None
    step = ctx.sequence.step
    positions = [_shared(step.stripes, piece, length, reach) for piece in step.pieces]
    source, newest, slots, before = [], [], [], 0
    starts = {chunk.request: chunk.rows.start for chunk in chunks(ctx)}
    for piece, row, shared in zip(step.pieces, step.rows, positions, strict=True):
        own = shared[step.stripes.rank_of(shared) == step.rank]
        # A rank's tokens of a piece stand in the batch in order, one stretch after the other.
        at = starts.get(piece.entries.start, 0) - step.stripes.count(step.rank, piece.start)
        source.append(step.stripes.local(own) + at)
        kept = min(length, piece.end - piece.start)
        before += len(shared)
        newest.append(np.arange(before - kept, before))
        slots.append(int(row) * length + shared[-kept:] % length)
    ranks = step.stripes.rank_of(np.concatenate(positions))
    most = int(np.bincount(ranks).max())
    order = np.empty_like(ranks)
    for rank in range(step.stripes.ranks):
        own = np.flatnonzero(ranks == rank)
        order[own] = rank * most + np.arange(len(own))
    sent = np.concatenate(source)
    return _Seams(
        tuple(positions),
        np.pad(sent, (0, most - len(sent))),
        step.stripes.ranks * most,
        order,
        order[np.concatenate(newest)],
        np.concatenate(slots),
    )


def _shared(stripes: Stripes, piece: Piece, length: int, reach: int) -> NDArray[np.int64]:
    """Positions of a piece that other ranks need: the newest ones, and those before a seam."""
    wanted = np.zeros(piece.end - piece.start, np.bool_)
    wanted[-length:] = True
    first = (piece.start // stripes.tokens + 1) * stripes.tokens
    seams = np.arange(first, piece.end, stripes.tokens)
    for seam in seams[stripes.rank_of(seams - 1) != stripes.rank_of(seams)]:
        last = int(seam) - piece.start
        wanted[max(0, last - reach) : last] = True
    return np.flatnonzero(wanted) + piece.start
