"""Normalisation layers; the arithmetic is in kllm.kernels."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kllm import kernels


class RMSNorm(nn.Module):
    """w * x / sqrt(mean(x^2) + eps), computed in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim], same dtype."""
        return kernels.rmsnorm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual): the two passes over memory made one."""
        return kernels.add_rmsnorm(x, residual, self.weight, self.eps)


class LayerNorm(nn.Module):
    """w * (x - mean) / sqrt(variance + eps) + b (Ba et al. 2016)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim], same dtype; sums in float32."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)
