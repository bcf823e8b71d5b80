# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""SwiGLU in Triton: gate and up halves read once, computed in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # outputs a program


@triton.jit
def silu_mul(gate, up, limit, LIMITED: tl.constexpr):
    """silu(gate) * up of float32 tiles, clamped as DeepSeek-V4 does where LIMITED."""
    if LIMITED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _swiglu(
    x_ptr, out_ptr, x_stride, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LIMITED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    gate = tl.load(x_ptr + row * x_stride + cols, mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + WIDTH + cols, mask, other=0.0).to(tl.float32)
    y = silu_mul(gate, up, limit, LIMITED)
    tl.store(out_ptr + row * WIDTH + cols, y.to(out_ptr.dtype.element_ty), mask)


def swiglu(gate_up: Tensor, limit: float | None) -> Tensor:
    """See `kllm.kernels.reference.swiglu`."""
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    flat = gate_up.reshape(-1, 2 * width)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    _swiglu[(flat.shape[0], triton.cdiv(width, BLOCK))](
        flat,
        out,
        flat.stride(0),
        0.0 if limit is None else limit,
        WIDTH=width,
        BLOCK=BLOCK,
        LIMITED=limit is not None,
    )
    return out
