"""Attention over a sliding window and compressed entries (DeepSeek-V4).

All heads of a token attend to the same keys, which are the values too: the newest `window`
tokens from a ring, and entries that summarise groups of tokens, from pages. CSA attends to the
entries its indexer scores best, HCA to all visible ones. One softmax runs over both sets.
"""

import torch
from torch import Tensor

from kllm import kernels
from kllm.attention.compressor import Compression, request_slots
from kllm.attention.context import ForwardContext
from kllm.attention.indexing import (
    IndexQuery,
    best_entries,
    best_slots,
    stored_keys,
    visible_slots,
)
from kllm.attention.rings import (
    Chunk,
    Tails,
    chunks,
    gather_tails,
    read_older,
    window_slots,
    write_ring,
)

WINDOW = "window"  # the ring state of the newest keys
BLOCK_BYTES = 1 << 28  # bounds index lists and scores of long prefills


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
    out = torch.empty_like(q)
    for chunk in chunks(ctx):
        near = _near(ctx, layer, chunk, kv, window, tails)
        out[chunk.rows] = _attend_chunk(ctx, layer, chunk, q, near, sink, window, kind, index)
    write_ring(ctx, WINDOW, layer, kv, tails)
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


def _attend_chunk(
    ctx: ForwardContext,
    layer: int,
    chunk: Chunk,
    q: Tensor,
    near: Tensor,
    sink: Tensor,
    window: int,
    kind: Compression | None,
    index: IndexQuery | None,
) -> Tensor:
    """Attention of one chunk, in blocks of queries: [rows of the chunk, H, D]."""
    device = q.device
    kept = len(near) - (chunk.end - chunk.start)
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
                segments.append((entries, best_entries(scores, visible, index.topk)))
            else:
                every = torch.arange(count, device=device)
                segments.append((entries, torch.where(every < visible, every, -1)))
        out[start:stop] = kernels.sparse_attention(q[rows], segments, q.shape[2] ** -0.5, sink)
    return out
