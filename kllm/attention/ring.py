"""Ring attention: foreign entries come hop by hop, and only one block of them is here at a time.

Each rank holds the entries of its own stripes of every prompt (`kllm.parallel.stripes`). Blocks
travel round the group: what rank r holds of all pieces of the step, packed one piece after the
other and padded to the longest block, whose length the host knows. Two buffers do: the next block
is received in one while the layer computes with the other.

What a run of queries (a stretch of a piece) sees of a shard is always a prefix of it, because
shards are in the order of positions: of a foreign shard the same for the whole run, as no entry of
another rank lies within it; of the own shard one that grows along the run.

How entries are spread (`find_shards`) is the same where they are gathered and do not travel
(`kllm.attention.gathered`).

Source: Liu et al. 2023 (ring attention); the state that is carried: `kernels.SoftmaxState`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kllm.attention.chunks import Chunk, chunks
from kllm.attention.context import ForwardContext, SequenceContext, once_a_step
from kllm.cache.pool import KVPool
from kllm.cache.shards import held_slots
from kllm.kernels import Span
from kllm.parallel.communicator import Communicator
from kllm.parallel.sequence import SequenceStep
from kllm.parallel.stripes import Stripes

UNPACK_BYTES = 1 << 28  # bounds what unpacking fp8 entries takes besides its result


@dataclass(frozen=True, slots=True)
class ShardedPiece:
    """A prompt chunk of the group, as this rank sees it."""

    rows: slice  # this rank's tokens of it in the flat batch; empty: it has none
    runs: tuple[Chunk, ...]  # its stretches, which `rows` are made of
    end: int  # tokens of the request once the step has run
    parts: tuple[slice, ...]  # [ranks] where its entries lie in the block of each rank
    spans: tuple[tuple[Span, ...], ...]  # [ranks] what its rows see of each part, both from 0


@dataclass(frozen=True, slots=True)
class Shards:
    """How the entries of one ratio are spread over the ranks of a step."""

    entries: Stripes  # the deal of entries
    ratio: int  # tokens an entry
    pieces: tuple[ShardedPiece, ...]
    slots: Tensor  # [longest block] int64, this rank's entries; the padding repeats slot 0


def ring_context(ctx: ForwardContext) -> SequenceContext | None:
    """The group and its step, where prompts run as a ring."""
    sequence = ctx.sequence
    return sequence if sequence is not None and sequence.step.kind == "ring" else None


def sharded_context(ctx: ForwardContext) -> SequenceContext | None:
    """The group and its step, where each rank keeps a part of the prompts."""
    sequence = ctx.sequence
    return sequence if sequence is not None and sequence.step.sharded else None


@once_a_step
def find_shards(ctx: ForwardContext, ratio: int) -> Shards:
    """The spread of the entries of `ratio` over the ranks, for sharded prompts."""
    assert ctx.sequence is not None
    sequence, step, runs = ctx.sequence, ctx.sequence.step, chunks(ctx)
    stripes = step.stripes.scaled(ratio)
    filled = [0] * stripes.ranks
    pieces, slots = [], []
    for i, piece in enumerate(step.pieces):
        parts = []
        for rank in range(stripes.ranks):
            count = stripes.count(rank, piece.end // ratio)
            parts.append(slice(filled[rank], filled[rank] + count))
            filled[rank] += count
        mine = tuple(run for run in runs if run.piece == i)
        rows = slice(mine[0].rows.start, mine[-1].rows.stop) if mine else slice(0, 0)
        spans = tuple(_spans(step, mine, rank, ratio) for rank in range(stripes.ranks))
        pieces.append(ShardedPiece(rows, mine, piece.end, tuple(parts), spans))
        slots.append(held_slots(step, i, sequence.block_tables, ctx.pool.page_size, ratio))
    padding = max(filled) - filled[step.rank]
    slots.append(torch.zeros(padding, dtype=torch.int64, device=ctx.positions.device))
    return Shards(stripes, ratio, tuple(pieces), torch.cat(slots))


def _spans(step: SequenceStep, runs: Sequence[Chunk], source: int, ratio: int) -> tuple[Span, ...]:
    """What runs of this rank see of the part of their piece that `source` holds, if anything."""
    found = []
    for run in runs:
        rows = slice(run.rows.start - runs[0].rows.start, run.rows.stop - runs[0].rows.start)
        keys = step.stripes.scaled(ratio).count(source, run.end // ratio)
        first, each = keys, 1
        if source == step.rank:
            # Stripes are whole entries, so tokens held here and entries held here keep step.
            first, each = step.stripes.count(source, run.start) + 1, ratio
        if keys:
            found.append(Span(rows, first, keys, each))
    return tuple(found)


def causal_span(run: Chunk, first: int) -> Span:
    """What a run sees of its request's entries in order, its rows counted from row `first`."""
    return Span(slice(run.rows.start - first, run.rows.stop - first), run.start + 1, run.end)


def travel(comm: Communicator, block: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Send blocks once round the ring: (rank that a block is of, block), this rank's own first.

    The caller computes with a block before it asks for the next one, and takes all of them: every
    rank has to pass on what the others wait for. `block` and one tensor like it are all the memory
    there is; a block is overwritten when the next but one is asked for. Empty blocks stay at home.
    """
    if not len(block):
        return
    source, other = comm.rank, torch.empty_like(block) if comm.size > 1 else block
    for hop in range(comm.size):
        last = hop == comm.size - 1
        coming = None if last else comm.ring_shift(other, block)
        yield source, block
        if coming is not None:
            coming.wait()
        block, other = other, block
        source = (source - 1) % comm.size


def travelling(
    ctx: ForwardContext, name: str, layer: int, shards: Shards
) -> Iterator[tuple[int, Tensor]]:
    """`travel` of the entries of a paged state, as they are stored: [longest, heads, channels].

    The step's own entries must be in their pages already.
    """
    assert ctx.sequence is not None
    pages = ctx.pool.pages(name, layer)
    return travel(ctx.sequence.comm, pages.view(-1, *pages.shape[2:]).index_select(0, shards.slots))


def unpack_part(pool: KVPool, name: str, stored: Tensor) -> Tensor:
    """Stored entries [n, ...] in the compute dtype, fp8 ones in blocks."""
    size = max(1, UNPACK_BYTES // max(1, 8 * stored[:1].numel()))
    if pool.kv_dtype != "fp8" or len(stored) <= size:
        return pool.unpack(name, stored)
    starts = range(0, len(stored), size)
    return torch.cat([pool.unpack(name, stored[start : start + size]) for start in starts])
