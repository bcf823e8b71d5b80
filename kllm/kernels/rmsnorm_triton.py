# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""RMS normalisation in Triton: one pass over memory, several rows a program when rows are short."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements a program works on; a longer row is one program's


@triton.jit(do_not_specialize=["num_rows"])
def _rmsnorm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    num_rows,
    x_stride,
    residual_stride,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = (rows < num_rows) & (cols < D)
    x = tl.load(x_ptr + rows * x_stride + cols, mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + rows * residual_stride + cols, mask, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + rows * D + cols, rounded, mask)
        x = rounded.to(tl.float32)  # what is normed is what the next layer will add to
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + eps)
    weight = tl.load(weight_ptr + cols, cols < D, other=0.0).to(tl.float32)
    y = x * scale[:, None] * weight
    tl.store(out_ptr + rows * D + cols, y.to(out_ptr.dtype.element_ty), mask)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor, eps: float
) -> None:
    dim = x.shape[-1]
    flat = x.reshape(-1, dim)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    other = flat if residual is None else residual.reshape(-1, dim).contiguous()
    block = triton.next_power_of_2(dim)
    rows = max(1, TILE // block)
    if flat.shape[0] == 0:
        return
    _rmsnorm[(triton.cdiv(flat.shape[0], rows),)](
        flat,
        other,
        weight,
        out,
        total,
        flat.shape[0],
        flat.stride(0),
        other.stride(0),
        eps,
        D=dim,
        BLOCK_D=block,
        ROWS=rows,
        ADD=residual is not None,
        num_warps=min(max(rows * block // 1024, 1), 16),
    )


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kllm.kernels.reference.rmsnorm`. `x` may be a view with any row stride."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, out, eps)
    return out


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kllm.kernels.reference.add_rmsnorm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _launch(x, residual, weight, out, total, eps)
    return out, total
