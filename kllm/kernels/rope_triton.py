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
    target = out_ptr + (token * num_heads + heads) * (2 * HALF)
    tl.store(target + first, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask)
    tl.store(target + second, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, inverse: bool) -> Tensor:
    """See `kllm.kernels.reference.rope`. The last dimension of `x` must have stride 1."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    heads = x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)  # [T, H, R]
    half = x.shape[-1] // 2
    block = triton.next_power_of_2(half)
    per_program = min(triton.next_power_of_2(heads.shape[1]), max(1, TILE // block))
    _rope[(heads.shape[0], triton.cdiv(heads.shape[1], per_program))](
        heads,
        cos.contiguous(),
        sin.contiguous(),
        out,
        heads.shape[1],
        heads.stride(0),
        heads.stride(1),
        HALF=half,
        BLOCK=block,
        HEADS=per_program,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        num_warps=4 if per_program * block >= 512 else 1,
    )
    return out
