"""Attention over a sliding window and compressed entries (DeepSeek-V4).

All heads of a token attend to the same keys, which are the values too: the newest `window`
tokens from a ring, and entries that summarise groups of tokens, from pages. CSA attends to the
entries its indexer scores best, HCA to all visible ones. One softmax runs over both sets.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kllm import kernels
from kllm.attention.chunks import Chunk, chunks, prompts, rows_of, tokens_seen
from kllm.attention.compressor import Compression
from kllm.attention.context import ForwardContext, once_a_step
from kllm.attention.gathered import gather_prompts, gathers
from kllm.attention.indexing import (
    IndexQuery,
    best_entries,
    best_slots,
    read_entries,
    request_slots,
    stored_keys,
    visible_entries,
    visible_slots,
)
from kllm.attention.ring import (
    find_shards,
    ring_context,
    sharded_context,
    travelling,
    unpack_part,
)
from kllm.attention.ring_buffers import (
    near_rows,
    read_near,
    window_lists,
    window_slots,
    write_near,
)
from kllm.attention.ring_selection import list_entries, select_travelling
from kllm.attention.workspace import Rows, row_blocks
from kllm.kernels import SoftmaxState

WINDOW = "window"  # the ring state of the newest keys
KEPT_BYTES = 1 << 24  # of the lists of one ratio that layers share; others are made in each layer


@dataclass(frozen=True, slots=True)
class _Windows:
    """The window of all tokens of a step's chunks."""

    keys: Tensor  # [n, D]
    lists: Tensor  # [chunks' tokens, window] int32 of them; -1: none
    first: int  # the first of these tokens in the flat batch

    def of(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Of some tokens, as a segment for `kernels.sparse_attention`."""
        return self.keys, self.lists[rows.start - self.first : rows.stop - self.first]


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
    length = ctx.pool.rings(WINDOW, layer).shape[1]
    near = near_rows(ctx, length, window - 1)
    stored = read_near(ctx, near, WINDOW, layer, kv)
    write_near(ctx, near, WINDOW, layer, stored)
    count, out = ctx.num_decodes, Rows(len(q))
    if count < len(q) or (kind and sharded_context(ctx)):  # all ranks exchange sharded entries
        # What later steps will read, rounded alike: results do not depend on the chunk size.
        keys = ctx.pool.unpack(WINDOW, stored)
        seen = _Windows(keys, window_lists(ctx, length, window), count)
        if kind and ring_context(ctx):
            out.put(slice(None), _attend_travelling_entries(ctx, layer, q, seen, sink, kind, index))
        else:
            _attend_prompts(ctx, layer, q, seen, sink, kind, index, out)
    if count:
        rows = slice(0, count)
        out.put(rows, _attend_decodes(ctx, layer, q[rows], sink, window, kind, index))
    return out.finish()


def _attend_decodes(
    ctx: ForwardContext,
    layer: int,
    q: Tensor,
    sink: Tensor,
    window: int,
    kind: Compression | None,
    index: IndexQuery | None,
) -> Tensor:
    length = ctx.pool.rings(WINDOW, layer).shape[1]
    segments = [stored_keys(ctx.pool, WINDOW, layer, window_slots(ctx, length, window))]
    if kind:
        slots = visible_slots(ctx, kind.ratio)
        if index and slots.shape[1] > index.topk:
            slots = best_slots(ctx, layer, slots, index)
        segments.append(stored_keys(ctx.pool, kind.state, layer, slots))
    return kernels.sparse_attention(q, segments, q.shape[2] ** -0.5, sink)


def _attend_prompts(
    ctx: ForwardContext,
    layer: int,
    q: Tensor,
    near: _Windows,
    sink: Tensor,
    kind: Compression | None,
    index: IndexQuery | None,
    out: Rows,
) -> None:
    """Attention of the step's chunks to what lies on this rank; fills their rows of `out`."""
    scale, width = q.shape[2] ** -0.5, near.lists.shape[1]
    if kind is None:
        for block in row_blocks(len(near.lists), 16 * width):
            rows = slice(near.first + block.start, near.first + block.stop)
            out.put(rows, kernels.sparse_attention(q[rows], [near.of(rows)], scale, sink))
        return
    gathered = _gather_entries(ctx, layer, kind, index) if gathers(ctx) else None
    for runs in prompts(ctx):
        last, own = runs[-1], rows_of(runs)
        entries, count = None, last.end // kind.ratio
        if count and gathered is not None and last.piece >= 0:
            entries = gathered[last.piece]
        elif count:
            entries = _read_entries(ctx, layer, last, kind, index)
        for block in row_blocks(own.stop - own.start, 16 * (count + width)):
            rows = slice(own.start + block.start, own.start + block.stop)
            segments = [near.of(rows)]
            if entries and tokens_seen(runs, rows.stop - 1) >= kind.ratio:
                segments.append(entries.seen(ctx, runs, rows, index))
            out.put(rows, kernels.sparse_attention(q[rows], segments, scale, sink))


def _list_visible(ctx: ForwardContext, ratio: int, first: int, stop: int, count: int) -> Tensor:
    """[stop - first, count] int32: the entries that tokens of one prompt see; -1: not visible."""
    visible = visible_entries(ctx, ratio, first, stop).unsqueeze(1)
    every = torch.arange(count, dtype=torch.int32, device=visible.device)
    return every.masked_fill(every >= visible, -1)


_list_once = once_a_step(_list_visible)


@dataclass(frozen=True, slots=True)
class _Entries:
    """The entries of one request, as far as its chunks see them."""

    ratio: int
    values: Tensor  # [n, D]
    keys: Tensor | None  # [n, index dim]; None: nothing is selected

    def seen(
        self, ctx: ForwardContext, runs: list[Chunk], rows: slice, index: IndexQuery | None
    ) -> tuple[Tensor, Tensor]:
        """What some tokens of the request attend to: a segment for `kernels.sparse_attention`.

        Where that is all they see, layers share the list if lists as wide as this one, for all
        tokens of the step, have at most `KEPT_BYTES`.
        """
        count = tokens_seen(runs, rows.stop - 1) // self.ratio
        if index and self.keys is not None and count > index.topk:
            visible = visible_entries(ctx, self.ratio, rows.start, rows.stop)
            return self.values, best_entries(index, rows, self.keys[:count], visible)
        kept = 4 * count * ctx.num_tokens <= KEPT_BYTES
        find = _list_once if kept else _list_visible
        return self.values, find(ctx, self.ratio, rows.start, rows.stop, count)


def _read_entries(
    ctx: ForwardContext,
    layer: int,
    last: Chunk,
    kind: Compression,
    index: IndexQuery | None,
) -> _Entries:
    """The entries that the last chunk of a request sees; this rank has all of them."""
    count = last.end // kind.ratio
    slots = request_slots(ctx, last.request, count, kind.ratio)
    keys = None
    if index and count > index.topk:
        keys = read_entries(ctx.pool, index.state, layer, slots)
    return _Entries(kind.ratio, read_entries(ctx.pool, kind.state, layer, slots), keys)


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


def _attend_travelling_entries(
    ctx: ForwardContext,
    layer: int,
    q: Tensor,
    near: _Windows,
    sink: Tensor,
    kind: Compression,
    index: IndexQuery | None,
) -> Tensor:
    """Attention of the chunks where entries lie on all ranks: [T, H, D], zeros for decodes.

    The softmax starts with the window, whose keys are here, and takes in the entries of one rank
    after the other. Called on all ranks of the group, also on those without chunks.
    """
    scale = q.shape[2] ** -0.5
    state = SoftmaxState.empty(len(q), q.shape[1], q.shape[2], q.device)
    if chunks(ctx):
        some = slice(near.first, len(q))
        kernels.sparse_block_attention(state.rows(some), q[some], *near.of(some), scale)
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
