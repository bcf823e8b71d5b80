# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Rotary embedding in Triton, for whole tensors and for strided views of the rotated channels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # channel pairs a program rotates


@triton.jit
def _rope(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_heads,
    x_stride_t,
    x_stride_h,
    out_stride_t,
    out_stride_h,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    mask = (heads < num_heads) & (pair < HALF)
    first = pair * 2 if INTERLEAVED else pair
    second = pair * 2 + 1 if INTERLEAVED else pair + HALF

    cos = tl.load(cos_ptr + token * HALF + pair, pair < HALF, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + pair, pair < HALF, other=0.0)
    if INVERSE:
        sin = -sin
    source = x_ptr + token * x_stride_t + heads * x_stride_h
    a = tl.load(source + first, mask, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask, other=0.0).to(tl.float32)
    target = out_ptr + token * out_stride_t + heads * out_stride_h
    tl.store(target + first, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask)
    tl.store(target + second, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask)


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    inverse: bool,
    out: Tensor | None = None,
) -> Tensor:
    """See `kllm.kernels.reference.rope`. The last dimension of `x` and `out` has stride 1."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    source, target = (t.unsqueeze(1) if t.dim() == 2 else t.flatten(1, -2) for t in (x, out))
    assert target.data_ptr() == out.data_ptr(), "the heads of `out` must have one stride"
    tokens, heads = source.shape[:2]  # [T, H, R]
    half = x.shape[-1] // 2
    block = triton.next_power_of_2(half)
    per_program = min(triton.next_power_of_2(heads), max(1, TILE // block))
    _rope[(tokens, triton.cdiv(heads, per_program))](
        source,
        cos.contiguous(),
        sin.contiguous(),
        target,
        heads,
        source.stride(0),
        source.stride(1),
        target.stride(0),
        target.stride(1),
        HALF=half,
        BLOCK=block,
        HEADS=per_program,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        num_warps=4 if per_program * block >= 512 else 1,
    )
    return out
