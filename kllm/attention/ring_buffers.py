"""Ring buffers: the newest rows of each request's window and tails, addressed by position.

A step writes the rows of its tokens and reads older ones. Requests that run one token (decodes)
are handled as tensors, with shapes that depend on the batch only, so that a CUDA graph can hold
them; longer ones (chunks) one by one, with lengths the host knows. (The ring of ring attention is
another one, of ranks: `kllm.attention.ring`.)

Under context parallelism a chunk is one stretch of a piece that the ranks of a group run together,
and each rank keeps the rings of all requests. So the rows of a piece that stay in the ring are
gathered over the group, and those that are read across the seam between two stretches, whose
ranks may differ (`gather_tails`). What comes before the piece is in every rank's ring.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kllm.attention.chunks import Chunk, chunks
from kllm.attention.context import ForwardContext, once_a_step, to_device
from kllm.parallel.sequence import Piece
from kllm.parallel.stripes import Stripes


@dataclass(frozen=True, slots=True)
class Tails:
    """One state's rows near the ends of the stretches of a context-parallel step, of all ranks."""

    seams: "_Seams"
    rows: Tensor  # [S, channels]

    def read(self, piece: int, start: int, end: int) -> Tensor:
        """[end - start, channels] of a piece's positions, the last of them before a stretch."""
        first = self.seams.first(piece, start)
        return self.rows[first : first + end - start]


@dataclass(frozen=True, slots=True)
class _Seams:
    """Which rows the ranks share, in order of piece and position: S of them."""

    positions: tuple[NDArray[np.int64], ...]  # of each piece
    source: Tensor  # [n] tokens of this rank that it sends; as many on each rank, some repeated
    order: Tensor  # [S] where each row stands among the [ranks * n] received ones
    newest: Tensor  # [N] which of the S rows stay in the ring
    slots: Tensor  # [N] int64 ring slots of these

    def first(self, piece: int, position: int) -> int:
        """The index of a piece's position among the S rows."""
        before = sum(len(positions) for positions in self.positions[:piece])
        return before + int(np.searchsorted(self.positions[piece], position))


def gather_tails(
    ctx: ForwardContext, name: str, layer: int, rows: Tensor, reach: int
) -> Tails | None:
    """Exchange what ranks need of each other's rows; None without context parallelism.

    Called once for each state and layer, on all ranks of the group.

    Args:
        rows: [T, channels] of the step's tokens, as `write_ring` gets them.
        reach: how many rows before a chunk's first will be read.
    """
    if ctx.sequence is None:
        return None
    seams = _find_seams(ctx, ctx.pool.rings(name, layer).shape[1], reach)
    comm = ctx.sequence.comm
    sent = ctx.pool.pack(name, rows[seams.source])
    received = sent.new_empty(comm.size * len(sent), *sent.shape[1:])
    comm.all_gather(received, sent).wait()
    return Tails(seams, ctx.pool.unpack(name, received[seams.order]))


@once_a_step
def _find_seams(ctx: ForwardContext, length: int, reach: int) -> _Seams:
    assert ctx.sequence is not None
    device, step = ctx.positions.device, ctx.sequence.step
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
    sent = np.pad(sent, (0, most - len(sent)))
    arrays = (sent, order, np.concatenate(newest), np.concatenate(slots))
    return _Seams(tuple(positions), *(to_device(a, device) for a in arrays))


def _shared(stripes: Stripes, piece: Piece, length: int, reach: int) -> NDArray[np.int64]:
    """Positions of a piece that other ranks need: the newest ones, and those before a seam."""
    wanted = np.zeros(piece.end - piece.start, np.bool_)
    wanted[-length:] = True
    first = (piece.start // stripes.tokens + 1) * stripes.tokens
    for seam in range(first, piece.end, stripes.tokens):
        last = seam - piece.start
        wanted[max(0, last - reach) : last] = True
    return np.flatnonzero(wanted) + piece.start


def write_ring(
    ctx: ForwardContext, name: str, layer: int, rows: Tensor, tails: Tails | None
) -> None:
    """Store the rows [T, channels] of the step's tokens; of a long chunk only the newest fit.

    With `tails` the chunks' rows come from there: the newest of the group's pieces.
    """
    length = ctx.pool.rings(name, layer).shape[1]
    slots = ctx.ring_slots(length)
    if tails is not None:
        count = ctx.num_decodes
        slots = torch.cat((slots[:count], tails.seams.slots))
        rows = torch.cat((rows[:count], tails.rows[tails.seams.newest]))
    elif any(chunk.end - chunk.start > length for chunk in chunks(ctx)):
        kept = _newest(ctx, length)
        slots, rows = slots[kept], rows[kept]
    ctx.pool.write(name, layer, slots, rows)


@once_a_step
def _newest(ctx: ForwardContext, length: int) -> Tensor:
    """Indices of the step's tokens that are among the newest `length` of their request."""
    parts = [np.arange(ctx.num_decodes)]
    for chunk in chunks(ctx):
        first = max(chunk.rows.start, chunk.rows.stop - length)
        parts.append(np.arange(first, chunk.rows.stop))
    return to_device(np.concatenate(parts), ctx.positions.device)


def read_older(
    ctx: ForwardContext, name: str, layer: int, chunk: Chunk, start: int, tails: Tails | None
) -> Tensor:
    """Rows [chunk.start - start, channels] of the positions from `start` to before a chunk's.

    Those that this step runs on some rank come from `tails`, older ones from the ring.
    """
    begin = chunk.start
    if ctx.sequence is not None:
        begin = max(start, ctx.sequence.step.pieces[chunk.piece].start)
    length = ctx.pool.rings(name, layer).shape[1]
    positions = torch.arange(start, begin, device=ctx.positions.device)
    older = ctx.pool.read(name, layer, ctx.rows[chunk.request] * length + positions % length)
    if tails is None or begin == chunk.start:
        return older
    return torch.cat((older, tails.read(chunk.piece, begin, chunk.start)))


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
