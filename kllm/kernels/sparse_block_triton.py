# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The step of ring attention over listed keys, and the lists that such steps share, in Triton.

A program of the step owns one token and a block of its heads: it loads their queries and their
softmax state, walks the keys that the token lists in this block, and writes the state back. With
R channels of latent, D of key, e bytes an element and c listed keys it moves, for each head,

    D e                     the query
    2 * 4 * (R + 2)         the state, read and written

and for all heads c D e of keys. A token that lists nothing here costs two loads of its list's
bounds: whether any token does need not be known on the host.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kllm.kernels.block_attention_reference import SoftmaxState
from kllm.kernels.merge_triton import LOG2_E
from kllm.kernels.sparse_attention_triton import tile_sizes, walk


@triton.jit(do_not_specialize=["width", "stride", "size"])
def _split_lists(
    lists_ptr, places_ptr, starts_ptr, width, stride, size,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    number = tl.load(lists_ptr + row * stride + col, col < width, other=-1)
    part = tl.where(number < 0, PARTS, number // size)
    begin = 0
    for i in range(PARTS):
        tl.store(starts_ptr + row * (PARTS + 1) + i, begin)
        here = (part == i).to(tl.int32)
        place = begin + tl.cumsum(here, axis=0) - 1
        tl.store(places_ptr + row * width + place, number % size, here > 0)
        begin += tl.sum(here, axis=0)
    tl.store(starts_ptr + row * (PARTS + 1) + PARTS, begin)


def split_lists(lists: Tensor, size: int, parts: int) -> tuple[Tensor, Tensor]:
    """See `kllm.kernels.reference.split_lists`."""
    count, width = lists.shape
    places = torch.empty(count, width, dtype=torch.int32, device=lists.device)
    starts = torch.zeros(count, parts + 1, dtype=torch.int32, device=lists.device)
    if count and width:
        assert lists.stride(1) == 1
        block = triton.next_power_of_2(width)
        _split_lists[(count,)](
            lists, places, starts, width, lists.stride(0), size, PARTS=parts, BLOCK=block
        )
    return places, starts


# The bounds of one part are views into those of all parts: their alignment differs from hop to hop.
@triton.jit(do_not_specialize=["width", "begin_ptr", "end_ptr"])
def _sparse_block_attention(
    q_ptr, kv_ptr, idx_ptr, begin_ptr, end_ptr, m_ptr, l_ptr, o_ptr,
    width, heads, scale_log2, q_stride, q_head, kv_stride, idx_stride, begin_stride, end_stride,
    VALUE: tl.constexpr, VALUE_BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    begin, count = 0, width
    if BOUNDED:
        begin = tl.load(begin_ptr + token * begin_stride)
        count = tl.load(end_ptr + token * end_stride) - begin
    if count > 0:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        valid = head < heads
        cols, more = tl.arange(0, VALUE_BLOCK), tl.arange(0, REST_BLOCK)
        mask = valid[:, None] & (cols < VALUE)[None, :]
        q_rows = q_ptr + token * q_stride + head[:, None] * q_head
        q = tl.load(q_rows + cols[None, :], mask, other=0.0)
        rest_mask = valid[:, None] & (more < REST)[None, :]
        q_rest = tl.load(q_rows + VALUE + more[None, :], rest_mask, other=0.0)
        place = token * heads + head
        old = tl.load(m_ptr + place, valid, other=float("-inf"))
        start = old * 1.4426950408889634
        total = tl.load(l_ptr + place, valid, other=0.0)
        target = o_ptr + place[:, None] * VALUE + cols[None, :]
        acc = tl.load(target, mask & (total > 0)[:, None], other=0.0)
        peak, total, acc = walk(
            q, q_rest, start, total, acc, kv_ptr, idx_ptr + token * idx_stride + begin, count,
            kv_stride, scale_log2, 0, 1, VALUE, VALUE_BLOCK, REST, REST_BLOCK, KEYS,
        )  # fmt: skip
        # There and back again is not exact: a maximum that did not move is not touched.
        tl.store(m_ptr + place, peak * 0.6931471805599453, valid & (peak != start))
        tl.store(l_ptr + place, total, valid)
        tl.store(target, acc, mask)


def sparse_block_attention(
    state: SoftmaxState,
    q: Tensor,
    kv: Tensor,
    idx: Tensor,
    scale: float,
    value_dim: int | None = None,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> None:
    """See `kllm.kernels.block_attention_reference.sparse_block_attention`."""
    tokens, heads, dim = q.shape
    value_dim = value_dim or dim
    width = idx.shape[1]
    if tokens == 0 or width == 0:
        return
    assert q.stride(-1) == kv.stride(-1) == idx.stride(-1) == 1
    assert all(x.is_contiguous() for x in (state.m, state.l, state.o))
    begin, end = bounds or (idx, idx)
    head_block, key_block = tile_sizes(tokens, heads, q.dtype, q.device)
    rest = dim - value_dim
    _sparse_block_attention[(tokens, triton.cdiv(heads, head_block))](
        q, kv, idx, begin, end, state.m, state.l, state.o,
        width, heads, scale * LOG2_E, q.stride(0), q.stride(1), kv.stride(0), idx.stride(0),
        begin.stride(0), end.stride(0),
        VALUE=value_dim,
        VALUE_BLOCK=max(16, triton.next_power_of_2(value_dim)),
        REST=rest,
        REST_BLOCK=max(16, triton.next_power_of_2(max(rest, 1))),
        HEADS=head_block,
        KEYS=key_block,
        BOUNDED=bounds is not None,
        num_warps=8 if head_block == 64 else 4,
        num_stages=1 if q.dtype == torch.float32 else 2,
    )  # fmt: skip
