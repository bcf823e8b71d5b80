# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Multi-query attention over index lists in Triton: sparse MLA, and DeepSeek-V4's attention.

A program owns one token, a block of its heads and a share of its keys. Keys are gathered by
index, serve as values too (their first channels), and are walked with an online softmax, so
that neither scores nor gathered keys reach memory. Where tokens are few the keys are split
over programs and the partial results merged after.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kllm.kernels.merge_triton import LOG2_E, choose_splits, merge_splits

MIN_SPLIT_KEYS = 128
MAX_SEGMENTS = 2


@triton.jit
def walk(
    q, q_rest, peak, total, acc, kv_ptr, idx_ptr, num_keys, kv_stride, scale_log2, split, splits,
    VALUE: tl.constexpr, VALUE_BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Go on with the online softmax (peak, total, acc) over one split of one segment."""
    cols = tl.arange(0, VALUE_BLOCK)
    share = tl.cdiv(tl.cdiv(num_keys, splits), KEYS) * KEYS
    begin = split * share
    for start in range(begin, tl.minimum(begin + share, num_keys), KEYS):
        key = start + tl.arange(0, KEYS)
        row = tl.load(idx_ptr + key, key < num_keys, other=-1).to(tl.int64)
        seen = row >= 0
        line = kv_ptr + row[:, None] * kv_stride
        k = tl.load(line + cols[None, :], seen[:, None] & (cols < VALUE)[None, :], other=0.0)
        k = k.to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST > 0:
            more = tl.arange(0, REST_BLOCK)
            mask = seen[:, None] & (more < REST)[None, :]
            k_rest = tl.load(line + VALUE + more[None, :], mask, other=0.0).to(q.dtype)
            s += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
        s = tl.where(seen[None, :], s * scale_log2, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, axis=1))
        # Before the first key the peak is -inf; 0 stands in to avoid inf - inf.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(p, axis=1)
        acc = acc * fade[:, None] + tl.dot(p.to(k.dtype), k, input_precision="ieee")
        peak = new_peak
    return peak, total, acc


@triton.jit(
    do_not_specialize=["num_tokens", "keys0", "idx0_stride", "keys1", "idx1_stride", "splits"]
)
def _attend(
    q_ptr, kv0_ptr, idx0_ptr, kv1_ptr, idx1_ptr, sink_ptr, out_ptr, lse_ptr,
    num_tokens, heads, scale_log2, q_stride_t, q_stride_h,
    keys0, kv0_stride, idx0_stride, keys1, kv1_stride, idx1_stride, splits,
    VALUE: tl.constexpr, VALUE_BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, PARTIAL: tl.constexpr, SEGMENTS: tl.constexpr,
    SINK: tl.constexpr,
):  # fmt: skip
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    valid = head < heads
    cols, more = tl.arange(0, VALUE_BLOCK), tl.arange(0, REST_BLOCK)
    q_rows = q_ptr + token * q_stride_t + head[:, None] * q_stride_h
    q = tl.load(q_rows + cols[None, :], valid[:, None] & (cols < VALUE)[None, :], other=0.0)
    rest_mask = valid[:, None] & (more < REST)[None, :]
    q_rest = tl.load(q_rows + VALUE + more[None, :], rest_mask, other=0.0)

    peak = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, VALUE_BLOCK), tl.float32)
    peak, total, acc = walk(
        q, q_rest, peak, total, acc, kv0_ptr, idx0_ptr + token * idx0_stride, keys0, kv0_stride,
        scale_log2, split, splits, VALUE, VALUE_BLOCK, REST, REST_BLOCK, KEYS,
    )  # fmt: skip
    if SEGMENTS > 1:
        peak, total, acc = walk(
            q, q_rest, peak, total, acc, kv1_ptr, idx1_ptr + token * idx1_stride, keys1,
            kv1_stride, scale_log2, split, splits, VALUE, VALUE_BLOCK, REST, REST_BLOCK, KEYS,
        )  # fmt: skip

    if SINK and not PARTIAL:
        sink = tl.load(sink_ptr + head, valid, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(peak, sink)
        fade = tl.exp2(peak - top)
        acc = acc * fade[:, None]
        total = total * fade + tl.exp2(sink - top)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    line = (split * num_tokens + token) * heads + head
    mask = valid[:, None] & (cols < VALUE)[None, :]
    target = out_ptr + line[:, None] * VALUE + cols[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask)
    if PARTIAL:
        tl.store(lse_ptr + line, peak + tl.log2(total), valid)


def tile_sizes(
    tokens: int, heads: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, int]:
    """(heads, keys) of a program: small head blocks where tokens alone do not fill the GPU."""
    padded = max(16, triton.next_power_of_2(heads))
    if dtype == torch.float32:  # float32 operands of 512 channels fill shared memory
        return 16, 16
    full = device.type == "cuda" and (
        tokens >= torch.cuda.get_device_properties(device).multi_processor_count
    )
    return min(padded, 64 if full else 16), 32


def sparse_attention(
    q: Tensor,
    segments: Sequence[tuple[Tensor, Tensor]],
    scale: float,
    sink: Tensor | None,
    value_dim: int | None,
) -> Tensor:
    """See `kllm.kernels.reference.sparse_attention`; at most two segments."""
    tokens, heads, dim = q.shape
    value_dim = value_dim or dim
    assert 1 <= len(segments) <= MAX_SEGMENTS
    out = torch.empty(tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    assert all(kv.stride(-1) == idx.stride(-1) == 1 for kv, idx in segments)
    (kv0, idx0), (kv1, idx1) = segments[0], segments[-1]
    head_block, key_block = tile_sizes(tokens, heads, q.dtype, q.device)
    head_blocks = triton.cdiv(heads, head_block)
    keys = max(idx.shape[1] for _, idx in segments)
    splits = choose_splits(tokens * head_blocks, keys, MIN_SPLIT_KEYS, q.device)
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty(splits, *out.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(splits, tokens, heads, dtype=torch.float32, device=q.device)
    rest = dim - value_dim
    _attend[(tokens, head_blocks, splits)](
        q, kv0, idx0, kv1, idx1, q if sink is None else sink, partial, lse,
        tokens, heads, scale * LOG2_E, q.stride(0), q.stride(1),
        idx0.shape[1], kv0.stride(0), idx0.stride(0),
        idx1.shape[1], kv1.stride(0), idx1.stride(0), splits,
        VALUE=value_dim,
        VALUE_BLOCK=max(16, triton.next_power_of_2(value_dim)),
        REST=rest,
        REST_BLOCK=max(16, triton.next_power_of_2(max(rest, 1))),
        HEADS=head_block,
        KEYS=key_block,
        PARTIAL=splits > 1,
        SEGMENTS=len(segments),
        SINK=sink is not None,
        num_warps=8 if head_block == 64 else 4,
        num_stages=1 if q.dtype == torch.float32 else 2,
    )  # fmt: skip
    if splits > 1:
        merge_splits(partial, lse, out, sink)
    return out
