# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The step of ring attention in Triton: one block of keys into the softmax state of all queries.

A program owns a tile of query rows (tokens times the heads that share a KV head), loads their
state, walks the block's keys with an online softmax, and writes the state back: the state
crosses memory once a block, scores never do. Keys that every row of the tile sees are walked
without masks; the diagonal follows. The running maximum stays in natural units, so that a row
that sees nothing keeps its state bit by bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kllm.kernels.block_attention_reference import SoftmaxState, Span


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a dense program; all powers of two."""

    rows: int
    keys: int
    warps: int
    stages: int


def dense_tile(dim: int, value_dim: int, dtype: torch.dtype) -> Tile:
    """A tile whose operands fit the 227 KiB of shared memory of a Hopper processor."""
    widest = max(dim, value_dim)
    if dtype == torch.float32:  # products of float32 tiles live in registers
        return Tile(16, 16, 4, 1)
    if widest > 256:  # an accumulator of 64 x 512 fills the registers of eight warps
        return Tile(64, 32, 8, 2)
    if widest > 192:  # queries 64 KiB, keys and values 32 KiB each a stage
        return Tile(128, 64, 8, 2)
    if widest > 128:
        return Tile(128, 64, 8, 3)
    return Tile(128, 128, 8, 2)


@triton.jit
def _steps(
    q, q_rest, peak, total, acc, k_ptr, v_ptr, begin, end, limit, scale, k_stride, v_stride,
    MAIN: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    VALUE: tl.constexpr, VALUE_BLOCK: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Go on with the softmax (peak, total, acc) over the keys [begin, end).

    Without `MASKED` every row sees all of them and their number is a multiple of `KEYS`.
    """
    LOG2: tl.constexpr = 1.4426950408889634
    cols = tl.arange(0, MAIN)[None, :]
    more = tl.arange(0, REST_BLOCK)[None, :]
    values = tl.arange(0, VALUE_BLOCK)[None, :]
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        k_rows = k_ptr + key.to(tl.int64)[:, None] * k_stride
        there = (key < end)[:, None]
        k = tl.load(k_rows + cols, there, other=0.0) if MASKED else tl.load(k_rows + cols)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST > 0:
            if MASKED or REST != REST_BLOCK:
                k_rest = tl.load(k_rows + MAIN + more, there & (more < REST), other=0.0)
            else:
                k_rest = tl.load(k_rows + MAIN + more)
            s = tl.dot(q_rest, tl.trans(k_rest), s, input_precision="ieee")
        if MASKED:
            s = tl.where(key[None, :] < limit[:, None], s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, axis=1) * scale)
        # A row that has seen no key yet keeps a peak of -inf; 0 stands in to avoid inf - inf.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak) * LOG2
        p = tl.exp2(s * (scale * LOG2) - base[:, None])
        fade = tl.exp2(peak * LOG2 - base)
        total = total * fade + tl.sum(p, axis=1)
        if SHARED:
            v = k
        else:
            v_rows = v_ptr + key.to(tl.int64)[:, None] * v_stride
            if MASKED or VALUE != VALUE_BLOCK:
                v = tl.load(v_rows + values, there & (values < VALUE), other=0.0)
            else:
                v = tl.load(v_rows + values)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        peak = new_peak
    return peak, total, acc


@triton.jit(do_not_specialize=["row0", "count", "first", "keys", "step"])
def _block_attention(
    q_ptr, k_ptr, v_ptr, m_ptr, l_ptr, o_ptr,
    row0, count, first, keys, step, scale,
    q_stride, q_head, k_stride, k_head, v_stride, v_head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    VALUE: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    QUERIES: tl.constexpr = ROWS // HEADS
    # The last tiles see most keys: they go first, so that none is left to the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, part = tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, ROWS)
    query = tile * QUERIES + row // HEADS
    in_group = part * HEADS + row % HEADS
    valid = (query < count) & (in_group < GROUP)
    line = (row0 + query).to(tl.int64)
    head = kv_head * GROUP + in_group

    cols, more = tl.arange(0, MAIN)[None, :], tl.arange(0, REST_BLOCK)[None, :]
    values = tl.arange(0, VALUE_BLOCK)[None, :]
    q_rows = q_ptr + line[:, None] * q_stride + head[:, None] * q_head
    q = tl.load(q_rows + cols, valid[:, None], other=0.0)
    q_rest = tl.load(q_rows + MAIN + more, valid[:, None] & (more < REST), other=0.0)
    place = line * (KV_HEADS * GROUP) + head
    peak = tl.load(m_ptr + place, valid, other=float("-inf"))
    total = tl.load(l_ptr + place, valid, other=0.0)
    target = o_ptr + place[:, None] * VALUE + values
    mask = valid[:, None] & (values < VALUE)
    acc = tl.load(target, mask & (total > 0)[:, None], other=0.0)

    # Division rounds towards zero here and downwards in Python: negative numbers are cut first.
    limit = tl.minimum(tl.maximum(first + query, 0) // step, keys)
    last = tl.minimum(tile * QUERIES + QUERIES, count) - 1
    end = tl.minimum(tl.maximum(first + last, 0) // step, keys)
    least = tl.minimum(tl.maximum(first + tile * QUERIES, 0) // step, keys)
    plain = least // KEYS * KEYS
    k_ptr += kv_head.to(tl.int64) * k_head
    v_ptr += kv_head.to(tl.int64) * v_head
    peak, total, acc = _steps(
        q, q_rest, peak, total, acc, k_ptr, v_ptr, 0, plain, limit, scale, k_stride, v_stride,
        MAIN, REST, REST_BLOCK, VALUE, VALUE_BLOCK, KEYS, False, SHARED,
    )  # fmt: skip
    peak, total, acc = _steps(
        q, q_rest, peak, total, acc, k_ptr, v_ptr, plain, end, limit, scale, k_stride, v_stride,
        MAIN, REST, REST_BLOCK, VALUE, VALUE_BLOCK, KEYS, True, SHARED,
    )  # fmt: skip
    tl.store(m_ptr + place, peak, valid)
    tl.store(l_ptr + place, total, valid)
    tl.store(target, acc, mask)


def block_attention(
    state: SoftmaxState, q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], scale: float
) -> None:
    """See `kllm.kernels.block_attention_reference.block_attention`.

    One launch a span: its numbers are scalar arguments, so that nothing waits for a copy.
    """
    heads, dim = q.shape[1:]
    kv_heads, value_dim = v.shape[1:]
    group = heads // kv_heads
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert all(x.is_contiguous() for x in (state.m, state.l, state.o))
    tile = dense_tile(dim, value_dim, q.dtype)
    together = min(tile.rows, triton.next_power_of_2(group))  # heads of one token in a tile
    queries = tile.rows // together
    main = 1 << (dim.bit_length() - 1)  # the largest power of two; `rest` is padded
    rest = dim - main
    same = k.data_ptr() == v.data_ptr() and k.stride() == v.stride()
    for span in spans:
        if span.count == 0 or span.seen(span.count - 1) == 0:
            continue
        grid = (triton.cdiv(span.count, queries), kv_heads, triton.cdiv(group, together))
        _block_attention[grid](
            q, k, v, state.m, state.l, state.o,
            span.rows.start, span.count, span.first, span.keys, span.step, scale,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            GROUP=group,
            HEADS=together,
            KV_HEADS=kv_heads,
            MAIN=main,
            REST=rest,
            REST_BLOCK=max(16, triton.next_power_of_2(max(rest, 1))),
            VALUE=value_dim,
            VALUE_BLOCK=max(16, triton.next_power_of_2(value_dim)),
            ROWS=tile.rows,
            KEYS=tile.keys,
            SHARED=same and value_dim == main,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
