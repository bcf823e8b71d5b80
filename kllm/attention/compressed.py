"""Attention over a sliding window and compressed entries (DeepSeek-V4).

All heads of a token attend to the same keys, which are the values too: the newest `window`
tokens from a ring, and entries that summarise groups of tokens, from pages. CSA attends to the
entries its indexer scores best, HCA to all visible ones. One softmax runs over both sets.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kllm import kernels
from kllm.attention.compressor import Compression, request_slots
from kllm.attention.context import ForwardContext
from kllm.attention.rings import Chunk, chunks, read_ring, window_slots, write_ring
from kllm.cache.pool import KVPool

WINDOW = "window"  # the ring state of the newest keys
BLOCK_BYTES = 1 << 28  # bounds index lists and scores of long prefills


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """What the step's tokens ask the indexer."""

    state: str  # paged state of the index keys
    q: Tensor  # [T, index heads, index dim]
    weights: Tensor  # [T, index heads] float32, scale factors included
    topk: int  # entries a token attends to


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
    out = torch.empty_like(q)
    for chunk in chunks(ctx):
        out[chunk.rows] = _attend_chunk(ctx, layer, chunk, q, kv, sink, window, kind, index)
    write_ring(ctx, WINDOW, layer, kv)
    if ctx.num_decodes:
        count = slice(0, ctx.num_decodes)
        length = ctx.pool.rings(WINDOW, layer).shape[1]
        segments = [stored_keys(ctx.pool, WINDOW, layer, window_slots(ctx, length, window))]
        if kind:
            slots = _visible_slots(ctx, kind.ratio)
            if index and slots.shape[1] > index.topk:
                slots = _best_slots(ctx, layer, slots, index)
            segments.append(stored_keys(ctx.pool, kind.state, layer, slots))
        out[count] = kernels.sparse_attention(q[count], segments, q.shape[2] ** -0.5, sink)
    return out


def stored_keys(pool: KVPool, name: str, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """A segment for `kernels.sparse_attention` of single-head entries in the pool.

    Args:
        slots: [T, n] int64 entry slots; -1: none.
    """
    if pool.kv_dtype != "fp8":
        return pool.pages(name, layer).flatten(0, -2), slots
    rows = pool.read(name, layer, slots.clamp_min(0)).flatten(0, -2)  # [T n, D]
    idx = torch.arange(slots.numel(), device=slots.device).view_as(slots)
    return rows, idx.masked_fill(slots < 0, -1)


def _visible_slots(ctx: ForwardContext, ratio: int) -> Tensor:
    """[decodes, entries of the widest block table] int64 slots; -1: not visible yet."""
    key = f"visible {ratio}"
    if key not in ctx.shared:
        per_page = ctx.pool.page_size // ratio
        device = ctx.positions.device
        pages = ctx.block_tables[: ctx.num_decodes].long().unsqueeze(2)
        slots = (pages * per_page + torch.arange(per_page, device=device)).flatten(1)
        visible = (ctx.positions[: ctx.num_decodes] + 1) // ratio
        hidden = torch.arange(slots.shape[1], device=device) >= visible.unsqueeze(1)
        ctx.shared[key] = slots.masked_fill(hidden, -1)
    found: Tensor = ctx.shared[key]
    return found


def _best_slots(ctx: ForwardContext, layer: int, slots: Tensor, index: IndexQuery) -> Tensor:
    """[decodes, topk]: the slots that each decode's indexer scores best, -1 where fewer."""
    best = []
    block = max(1, BLOCK_BYTES // (4 * slots.shape[1] * index.q.shape[2]))
    for start in range(0, len(slots), block):
        rows = slice(start, min(start + block, len(slots)))
        keys, own = stored_keys(ctx.pool, index.state, layer, slots[rows])
        scores = kernels.index_scores(index.q[rows], index.weights[rows], keys, own)
        best.append(slots[rows].gather(1, scores.topk(index.topk, sorted=False).indices))
    return torch.cat(best)


def _attend_chunk(
    ctx: ForwardContext,
    layer: int,
    chunk: Chunk,
    q: Tensor,
    kv: Tensor,
    sink: Tensor,
    window: int,
    kind: Compression | None,
    index: IndexQuery | None,
) -> Tensor:
    """Attention of one chunk, in blocks of queries: [rows of the chunk, H, D]."""
    device = q.device
    kept = min(window - 1, chunk.start)  # older tokens that the chunk's first queries see
    older = read_ring(ctx, WINDOW, layer, chunk.request, chunk.start - kept, chunk.start)
    near = torch.cat((older, kv[chunk.rows]))  # [kept + rows, D]
    count = chunk.end // kind.ratio if kind else 0
    entries = keys = None
    if kind and count:
        slots = request_slots(ctx, chunk.request, 0, count, kind.ratio)
        entries = ctx.pool.read(kind.state, layer, slots).squeeze(1)  # [count, D]
        if index and count > index.topk:
            keys = ctx.pool.read(index.state, layer, slots).squeeze(1)
    back = torch.arange(window - 1, -1, -1, device=device)
    out = torch.empty_like(q[chunk.rows])
    block = max(16, BLOCK_BYTES // (16 * (count + window)))
    for start in range(0, len(out), block):
        stop = min(start + block, len(out))
        rows = slice(chunk.rows.start + start, chunk.rows.start + stop)
        places = torch.arange(start, stop, device=device).unsqueeze(1)
        segments = [(near, (places + kept - back).clamp_min(-1))]
        if kind and entries is not None:
            visible = (places + (chunk.start + 1)) // kind.ratio
            if index and keys is not None:
                scores = kernels.index_scores(index.q[rows], index.weights[rows], keys)
                segments.append((entries, _best_entries(scores, visible, index.topk)))
            else:
                every = torch.arange(count, device=device)
                segments.append((entries, torch.where(every < visible, every, -1)))
        out[start:stop] = kernels.sparse_attention(q[rows], segments, q.shape[2] ** -0.5, sink)
    return out


def _best_entries(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """[T, topk]: entries below `visible` [T, 1] with the largest scores [T, n]; -1 where fewer."""
    hidden = torch.arange(scores.shape[1], device=scores.device) >= visible
    best = scores.masked_fill(hidden, float("-inf")).topk(topk, sorted=False).indices
    return torch.where(best < visible, best, -1)
