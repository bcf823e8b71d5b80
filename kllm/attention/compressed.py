"""Attention over a sliding window and compressed entries (DeepSeek-V4).

All heads of a token attend to the same keys, which are the values too: the newest `window`
tokens from a ring, and entries that summarise groups of tokens, from pages. CSA attends to the
entries its indexer scores best, HCA to all visible ones. One softmax runs over both sets.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kllm import kernels
from kllm.attention.chunks import Chunk, chunks, prompts
from kllm.attention.compressor import Compression, request_slots
from kllm.attention.context import ForwardContext
from kllm.attention.gathered import gather_prompts, gathers
from kllm.attention.indexing import (
    IndexQuery,
    best_entries,
    best_slots,
    stored_keys,
    visible_slots,
)
from kllm.attention.ring import find_shards, ring_context, travelling, unpack_part
from kllm.attention.ring_buffers import (
    Tails,
    gather_tails,
    read_older,
    window_slots,
    write_ring,
)
from kllm.attention.ring_selection import list_entries, select_travelling
from kllm.attention.workspace import row_blocks
from kllm.kernels import SoftmaxState

WINDOW = "window"  # the ring state of the newest keys


def attend(
    ctx: ForwardContext,
    layer: int,
    q: Tensor,
    kv: Tensor,
    sink: Tensor,
    window: int,
    kind: Compression | None,
    index: IndexQuery | None,
) -> Tensor:
    """Store this step's window keys, then attend to window and visible entries.

    The entries that this step completes must be in their pages already.

    Args:
        q: [T, H, D]; the softmax scale is D^-0.5.
        kv: [T, D], keys that are values too.
        sink: [H] float32 logits in the softmax's denominator.
        window: tokens a query sees, itself included.
        kind: the layer's compressed state; None: window only.
        index: selects among the entries; None: all of them.

    Returns:
        [T, H, D].
    """
    # What later steps will read, rounded alike: results do not depend on the chunk size.
    kv = ctx.pool.unpack(WINDOW, ctx.pool.pack(WINDOW, kv))
    tails = gather_tails(ctx, WINDOW, layer, kv, window - 1)
    near = [_near(ctx, layer, chunk, kv, window, tails) for chunk in chunks(ctx)]
    write_ring(ctx, WINDOW, layer, kv, tails)
    if kind and ring_context(ctx):
        out = _attend_travelling_entries(ctx, layer, q, near, sink, window, kind, index)
    else:
        out = torch.empty_like(q)
        keys = iter(near)
        gathered = _gather_entries(ctx, layer, kind, index) if kind and gathers(ctx) else None
        for runs in prompts(ctx):
            last, entries = runs[-1], None
            if kind and last.end >= kind.ratio:
                if gathered is not None and last.piece >= 0:
                    entries = gathered[last.piece]
                else:
                    entries = _read_entries(ctx, layer, last, kind, index)
            for run in runs:
                out[run.rows] = _attend_chunk(run, q, next(keys), sink, window, entries, index)
    if ctx.num_decodes:
        count = slice(0, ctx.num_decodes)
        length = ctx.pool.rings(WINDOW, layer).shape[1]
        segments = [stored_keys(ctx.pool, WINDOW, layer, window_slots(ctx, length, window))]
        if kind:
            slots = visible_slots(ctx, kind.ratio)
            if index and slots.shape[1] > index.topk:
                slots = best_slots(ctx, layer, slots, index)
            segments.append(stored_keys(ctx.pool, kind.state, layer, slots))
        out[count] = kernels.sparse_attention(q[count], segments, q.shape[2] ** -0.5, sink)
    return out


def _near(
    ctx: ForwardContext, layer: int, chunk: Chunk, kv: Tensor, window: int, tails: Tails | None
) -> Tensor:
    """[kept + rows, D]: the older keys that a chunk's first queries see, and its own."""
    kept = min(window - 1, chunk.start)
    older = read_older(ctx, WINDOW, layer, chunk, chunk.start - kept, tails)
    return torch.cat((older, kv[chunk.rows]))


def _window_rows(chunk: Chunk, rows: slice, near: Tensor, window: int) -> Tensor:
    """[rows, window] int64: which of a chunk's near keys some of its tokens see; -1: none."""
    kept = len(near) - (chunk.end - chunk.start)
    places = torch.arange(rows.start, rows.stop, device=near.device).unsqueeze(1)
    back = torch.arange(window - 1, -1, -1, device=near.device)
    return (places + kept - back).clamp_min(-1)


@dataclass(frozen=True, slots=True)
class _Entries:
    """The entries of one request, as far as its chunks see them."""

    ratio: int
    values: Tensor  # [n, D]
    keys: Tensor | None  # [n, index dim]; None: nothing is selected

    def seen(self, chunk: Chunk, rows: slice, index: IndexQuery | None) -> tuple[Tensor, Tensor]:
        """What some tokens of a chunk attend to, as a segment for `kernels.sparse_attention`."""
        device, count = self.values.device, chunk.end // self.ratio
        places = torch.arange(rows.start, rows.stop, device=device, dtype=torch.int32)
        visible = (places + (chunk.start + 1)) // self.ratio
        if index and self.keys is not None and count > index.topk:
            own = slice(chunk.rows.start + rows.start, chunk.rows.start + rows.stop)
            return self.values, best_entries(index, own, self.keys[:count], visible)
        every = torch.arange(count, device=device)
        return self.values, torch.where(every < visible.unsqueeze(1), every, -1)


def _read_entries(
    ctx: ForwardContext,
    layer: int,
    last: Chunk,
    kind: Compression,
    index: IndexQuery | None,
) -> _Entries:
    """The entries that the last chunk of a request sees; this rank has all of them."""
    count = last.end // kind.ratio
    slots = request_slots(ctx, last.request, 0, count, kind.ratio)
    keys = None
    if index and count > index.topk:
        keys = ctx.pool.read(index.state, layer, slots).squeeze(1)
    return _Entries(kind.ratio, ctx.pool.read(kind.state, layer, slots).squeeze(1), keys)


def _gather_entries(
    ctx: ForwardContext, layer: int, kind: Compression, index: IndexQuery | None
) -> list[_Entries]:
    """The same of each piece, gathered from all ranks; called on all of them."""
    values = gather_prompts(ctx, kind.state, layer, kind.ratio)
    keys: list[Tensor | None] = [None] * len(values)
    if index and any(len(entries) > index.topk for entries in values):
        keys[:] = gather_prompts(ctx, index.state, layer, kind.ratio)
    return [
        _Entries(kind.ratio, own.squeeze(1), None if key is None else key.squeeze(1))
        for own, key in zip(values, keys, strict=True)
    ]


def _attend_chunk(
    chunk: Chunk,
    q: Tensor,
    near: Tensor,
    sink: Tensor,
    window: int,
    entries: _Entries | None,
    index: IndexQuery | None,
) -> Tensor:
    """Attention of one chunk, in blocks of queries: [rows of the chunk, H, D]."""
    out = torch.empty_like(q[chunk.rows])
    count = chunk.end // entries.ratio if entries else 0
    for rows in row_blocks(len(out), 16 * (count + window)):
        segments = [(near, _window_rows(chunk, rows, near, window))]
        if entries and count:
            segments.append(entries.seen(chunk, rows, index))
        queries = q[chunk.rows][rows]
        out[rows] = kernels.sparse_attention(queries, segments, q.shape[2] ** -0.5, sink)
    return out


def _attend_travelling_entries(
    ctx: ForwardContext,
    layer: int,
    q: Tensor,
    near: list[Tensor],
    sink: Tensor,
    window: int,
    kind: Compression,
    index: IndexQuery | None,
) -> Tensor:
    """Attention of the chunks where entries lie on all ranks: [T, H, D], zeros for decodes.

    The softmax starts with the window, whose keys are here, and takes in the entries of one rank
    after the other. Called on all ranks of the group, also on those without chunks.
    """
    scale = q.shape[2] ** -0.5
    state = SoftmaxState.empty(len(q), q.shape[1], q.shape[2], q.device)
    for chunk, keys in zip(chunks(ctx), near, strict=True):
        idx = _window_rows(chunk, slice(0, chunk.end - chunk.start), keys, window)
        kernels.sparse_block_attention(state.rows(chunk.rows), q[chunk.rows], keys, idx, scale)
    shards = find_shards(ctx, kind.ratio)
    if len(shards.slots):  # some rank has an entry; the same on all ranks
        chosen: list[Tensor | None] = [None] * len(shards.pieces)
        if index:
            chosen = select_travelling(ctx, layer, shards, index)
        listed = [None if ids is None else list_entries(ctx, shards, ids) for ids in chosen]
        for source, block in travelling(ctx, kind.state, layer, shards):
            for piece, own in zip(shards.pieces, listed, strict=True):
                spans = piece.spans[source]
                if not spans:
                    continue
                rows, queries = state.rows(piece.rows), q[piece.rows]
                keys = unpack_part(ctx.pool, kind.state, block[piece.parts[source]])
                if own is None:
                    kernels.block_attention(rows, queries, keys, keys, spans, scale)
                else:
                    idx, bounds = own.places, own.bounds(source)
                    kernels.sparse_block_attention(
                        rows, queries, keys.squeeze(1), idx, scale, bounds=bounds
                    )
    return kernels.finish_softmax(state, q.dtype, sink)
