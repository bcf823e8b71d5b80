# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Routed experts in Triton for small batches: decode steps read each chosen expert once.

Three launches and a sum: sort the (token, choice) pairs by expert, w13 with SwiGLU, w2 with
the routing weights. Tiles that an expert has no rows for end at once, so shapes depend on the
number of tokens only and a CUDA graph can hold the step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kllm.kernels.swiglu_triton import silu_mul

MAX_PAIRS = 4096  # (token, choice) pairs that one program sorts


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_pairs(
    ids_ptr, order_ptr, starts_ptr, num_pairs, first_expert, PAIRS: tl.constexpr
):  # fmt: skip
    """Place one expert's pairs behind those of smaller experts; foreign pairs go nowhere."""
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    live = pair < num_pairs
    local = tl.load(ids_ptr + pair, live, other=-1) - first_expert
    mine = live & (local == expert)
    start = tl.sum((live & (local >= 0) & (local < expert)).to(tl.int32), axis=0)
    mark = mine.to(tl.int32)
    rank = tl.cumsum(mark, axis=0) - 1
    tl.store(order_ptr + start + rank, pair, mine)
    tl.store(starts_ptr + expert * 2, start)
    tl.store(starts_ptr + expert * 2 + 1, start + tl.sum(mark, axis=0))


@triton.jit(do_not_specialize=["tiles"])
def _gate_up(
    x_ptr, w_ptr, order_ptr, starts_ptr, out_ptr, top_k, dim, hidden, x_stride, limit, tiles,
    LIMITED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """silu(x W1^T) * (x W3^T) of one expert's tile: rows in sorted order, [pairs, I]."""
    expert = (tl.program_id(1) // tiles).to(tl.int64)
    tile = tl.program_id(1) % tiles
    row = tl.load(starts_ptr + expert * 2) + tile * ROWS + tl.arange(0, ROWS)
    end = tl.load(starts_ptr + expert * 2 + 1)
    if tl.load(starts_ptr + expert * 2) + tile * ROWS >= end:
        return
    live = row < end
    token = (tl.load(order_ptr + row, live, other=0) // top_k).to(tl.int64)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    k = tl.arange(0, K)
    gate = tl.zeros((ROWS, COLS), tl.float32)
    up = tl.zeros((ROWS, COLS), tl.float32)
    x_at = x_ptr + token[:, None] * x_stride + k[None, :]
    w_at = w_ptr + (expert * 2 * hidden + col[None, :]) * dim + k[:, None]
    for start in range(0, dim, K):
        inside = start + k < dim
        w_mask = (col < hidden)[None, :] & inside[:, None]
        x = tl.load(x_at + start, live[:, None] & inside[None, :], other=0.0)
        w1 = tl.load(w_at + start, w_mask, other=0.0)
        w3 = tl.load(w_at + hidden * dim + start, w_mask, other=0.0)
        gate = tl.dot(x, w1, gate, input_precision="ieee")
        up = tl.dot(x, w3, up, input_precision="ieee")
    y = silu_mul(gate, up, limit, LIMITED)
    target = out_ptr + row.to(tl.int64)[:, None] * hidden + col[None, :]
    tl.store(target, y.to(out_ptr.dtype.element_ty), live[:, None] & (col < hidden)[None, :])


@triton.jit(do_not_specialize=["tiles"])
def _down(
    h_ptr, w_ptr, order_ptr, starts_ptr, weights_ptr, out_ptr, dim, hidden, tiles,
    ROWS: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """weight * (h W2^T) of one expert's tile, written to each pair's own row of [pairs, dim]."""
    expert = (tl.program_id(1) // tiles).to(tl.int64)
    tile = tl.program_id(1) % tiles
    row = tl.load(starts_ptr + expert * 2) + tile * ROWS + tl.arange(0, ROWS)
    end = tl.load(starts_ptr + expert * 2 + 1)
    if tl.load(starts_ptr + expert * 2) + tile * ROWS >= end:
        return
    live = row < end
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    k = tl.arange(0, K)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    h_at = h_ptr + row.to(tl.int64)[:, None] * hidden + k[None, :]
    w_at = w_ptr + (expert * dim + col[None, :]) * hidden + k[:, None]
    for start in range(0, hidden, K):
        inside = start + k < hidden
        h = tl.load(h_at + start, live[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_at + start, (col < dim)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(h, w, acc, input_precision="ieee")
    pair = tl.load(order_ptr + row, live, other=0).to(tl.int64)
    weight = tl.load(weights_ptr + pair, live, other=0.0)
    target = out_ptr + pair[:, None] * dim + col[None, :]
    tl.store(target, acc * weight[:, None], live[:, None] & (col < dim)[None, :])


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float | None,
    first_expert: int,
) -> Tensor:
    """See `kllm.kernels.reference.moe`; for at most MAX_PAIRS (token, choice) pairs."""
    (tokens, dim), k = x.shape, topk_ids.shape[1]
    experts, hidden, pairs = w13.shape[0], w2.shape[2], tokens * k
    assert pairs <= MAX_PAIRS
    assert x.stride(1) == 1
    if tokens == 0:
        return torch.empty_like(x)
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    starts = torch.empty(experts, 2, dtype=torch.int32, device=x.device)
    _sort_pairs[(experts,)](
        topk_ids.contiguous(), order, starts, pairs, first_expert,
        PAIRS=max(16, triton.next_power_of_2(pairs)),
    )  # fmt: skip
    # An expert gets a token at most once: `tokens` rows bound what it can have to do.
    rows = min(max(16, triton.next_power_of_2(tokens)), 64)
    tiles = triton.cdiv(tokens, rows)
    cols, depth = (64, 32) if x.dtype == torch.float32 else (64, 128)
    act = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    _gate_up[(triton.cdiv(hidden, cols), experts * tiles)](
        x, w13, order, starts, act, k, dim, hidden, x.stride(0),
        0.0 if limit is None else limit, tiles,
        LIMITED=limit is not None, ROWS=rows, COLS=cols, K=depth, num_warps=4, num_stages=3,
    )  # fmt: skip
    # Zeros: pairs of foreign experts are in no tile.
    out = torch.zeros(pairs, dim, dtype=torch.float32, device=x.device)
    _down[(triton.cdiv(dim, cols), experts * tiles)](
        act, w2, order, starts, topk_weights.contiguous(), out, dim, hidden, tiles,
        ROWS=rows, COLS=cols, K=depth, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out.view(tokens, k, dim).sum(dim=1).to(x.dtype)
