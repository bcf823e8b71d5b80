# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The softmax state of block attention in Triton: adding a finished result, and finishing.

Each is one pass over the state. Rows of o of queries that have seen no key are not read: nobody
has written them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kllm.kernels.block_attention_reference import SoftmaxState

ELEMENTS = 2048  # channels of the state that a program takes


@triton.jit
def _add_result(
    m_ptr, l_ptr, o_ptr, out_ptr, lse_ptr, lines, heads,
    out_stride, out_head, lse_stride, lse_head,
    DIM: tl.constexpr, BLOCK: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    LOG2: tl.constexpr = 1.4426950408889634
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    valid = line < lines
    row, head = line // heads, line % heads
    cols = tl.arange(0, BLOCK)[None, :]
    mask = valid[:, None] & (cols < DIM)
    m = tl.load(m_ptr + line, valid, other=float("-inf"))
    lse = tl.load(lse_ptr + row * lse_stride + head * lse_head, valid, other=float("-inf"))
    new = tl.maximum(m, lse)
    base = tl.where(new == float("-inf"), 0.0, new)
    mine, theirs = tl.exp2((m - base) * LOG2), tl.exp2((lse - base) * LOG2)
    total = tl.load(l_ptr + line, valid, other=0.0) * mine + theirs
    target = o_ptr + line[:, None] * DIM + cols
    out_rows = out_ptr + row[:, None] * out_stride + head[:, None] * out_head
    out = tl.load(out_rows + cols, mask, other=0.0).to(tl.float32)
    o = tl.load(target, mask & (m > float("-inf"))[:, None], other=0.0)
    o = o * mine[:, None] + out * theirs[:, None]
    tl.store(m_ptr + line, new, valid)
    tl.store(l_ptr + line, total, valid)
    tl.store(target, o, mask)


def add_result(state: SoftmaxState, out: Tensor, lse: Tensor) -> None:
    """Add a finished attention over disjoint keys to `state`, in place, in one pass over both.

    Args:
        out: [n, H, Dv], normalised.
        lse: [n, H] float32, natural log-sum-exp of the scaled scores.
    """
    count, heads, dim = out.shape
    block = max(16, triton.next_power_of_2(dim))
    lines = max(1, ELEMENTS // block)
    _add_result[(triton.cdiv(count * heads, lines),)](
        state.m, state.l, state.o, out, lse, count * heads, heads,
        out.stride(0), out.stride(1), lse.stride(0), lse.stride(1),
        DIM=dim,
        BLOCK=block,
        LINES=lines,
    )  # fmt: skip


@triton.jit
def _finish(
    m_ptr, l_ptr, o_ptr, sink_ptr, out_ptr, lines, heads,
    DIM: tl.constexpr, BLOCK: tl.constexpr, LINES: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    LOG2: tl.constexpr = 1.4426950408889634
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    valid = line < lines
    total = tl.load(l_ptr + line, valid, other=0.0)
    seen = total > 0
    weight = tl.where(seen, 1.0 / total, 0.0)
    if SINK:
        m = tl.load(m_ptr + line, valid, other=float("-inf"))
        sink = tl.load(sink_ptr + line % heads, valid, other=0.0).to(tl.float32)
        base = tl.maximum(m, sink)
        fade = tl.exp2((m - base) * LOG2)
        weight = fade / (total * fade + tl.exp2((sink - base) * LOG2))
    cols = tl.arange(0, BLOCK)[None, :]
    place = line[:, None] * DIM + cols
    mask = valid[:, None] & (cols < DIM)
    o = tl.load(o_ptr + place, mask & seen[:, None], other=0.0) * weight[:, None]
    tl.store(out_ptr + place, o.to(out_ptr.dtype.element_ty), mask)


def finish_softmax(state: SoftmaxState, dtype: torch.dtype, sink: Tensor | None) -> Tensor:
    """See `kllm.kernels.block_attention_reference.finish_softmax`."""
    count, heads, dim = state.o.shape
    out = torch.empty(state.o.shape, dtype=dtype, device=state.o.device)
    if out.numel() == 0:
        return out
    block = max(16, triton.next_power_of_2(dim))
    lines = max(1, ELEMENTS // block)
    _finish[(triton.cdiv(count * heads, lines),)](
        state.m, state.l, state.o, state.m if sink is None else sink, out, count * heads, heads,
        DIM=dim,
        BLOCK=block,
        LINES=lines,
        SINK=sink is not None,
    )  # fmt: skip
    return out
