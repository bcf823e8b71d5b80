"""Hyper-connections: several residual streams, mixed around each sublayer.

Source: Zhu et al. 2024 (hyper-connections), Xie et al. 2026 (manifold-constrained, mHC). The
arithmetic is in kllm.kernels; all parameters are float32 whatever the model's dtype.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kllm import kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """What all hyper-connections of a model share."""

    streams: int  # N
    dim: int  # channels of a stream
    norm_eps: float  # of the weightless norm before the projection
    eps: float  # of the collapse weights and the Sinkhorn normalisation
    iterations: int  # Sinkhorn-Knopp


def _float32(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)


class HyperConnection(nn.Module):
    """One site: `collapse` before a sublayer, `expand` after it."""

    def __init__(self, settings: StreamSettings) -> None:
        super().__init__()
        self.settings = settings
        n = settings.streams
        self.fn = _float32((2 + n) * n, n * settings.dim)
        self.base = _float32((2 + n) * n)
        self.scale = _float32(3)

    def collapse(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, N, d] -> the sublayer's input [T, d], and the two weights that `expand` takes."""
        s = self.settings
        return kernels.hc_pre(
            streams,
            self.fn,
            self.base,
            self.scale,
            norm_eps=s.norm_eps,
            eps=s.eps,
            iterations=s.iterations,
        )

    def expand(self, out: Tensor, streams: Tensor, weights: Tensor, mix: Tensor) -> Tensor:
        """The sublayer's output [T, d] and the streams [T, N, d] -> new streams [T, N, d]."""
        return kernels.hc_post(out, streams, weights, mix)


class HyperHead(nn.Module):
    """Collapses the streams after the last layer."""

    def __init__(self, settings: StreamSettings) -> None:
        super().__init__()
        self.settings = settings
        self.fn = _float32(settings.streams, settings.streams * settings.dim)
        self.base = _float32(settings.streams)
        self.scale = _float32(1)

    def forward(self, streams: Tensor) -> Tensor:
        """[T, N, d] -> [T, d]."""
        s = self.settings
        return kernels.hc_head(
            streams, self.fn, self.base, self.scale, norm_eps=s.norm_eps, eps=s.eps
        )
