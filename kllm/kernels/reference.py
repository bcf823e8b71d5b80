"""Plain torch twins of the kernels: what the CPU runs, and what the tests compare with."""

import torch
from torch import Tensor
from torch.nn import functional as F


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w * x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32.

    Args:
        x: [..., D].
        weight: [D].
    """
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rmsnorm(x + residual), x + residual), both [..., D] in the dtype of `x`."""
    total = x + residual
    return rmsnorm(total, weight, eps), total


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, inverse: bool) -> Tensor:
    """Rotate channel pairs by the angles of their positions (Su et al. 2021), in float32.

    Args:
        x: [T, ..., R], the rotated channels only.
        cos, sin: [T, R / 2] float32.
        interleaved: pairs are (2i, 2i + 1); otherwise (i, i + R / 2).
        inverse: rotate by the negative angles.

    Returns:
        A new tensor like `x`.
    """
    middle = (1,) * (x.dim() - 2)
    cos = cos.view(cos.shape[0], *middle, cos.shape[1])
    sin = sin.view(sin.shape[0], *middle, sin.shape[1])
    if inverse:
        sin = -sin
    if interleaved:
        even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    else:
        low, high = x.float().chunk(2, dim=-1)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    return turned.to(x.dtype)


def swiglu(gate_up: Tensor, limit: float | None) -> Tensor:
    """silu(gate) * up of [..., 2 I] -> [..., I], gate half first.

    With `limit` L the gate is clamped from above and `up` to [-L, L] (DeepSeek-V4).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up
