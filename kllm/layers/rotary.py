"""Rotary position embedding: frequencies, and one table of cosines and sines a step."""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kllm.attention.context import ForwardContext, once_a_step


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN frequency scaling (Peng et al. 2023), the `rope_scaling` keys of a config."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1 (Grattafiori et al. 2024), the `rope_scaling` keys.

    Wavelengths above original / low_freq_factor are stretched by `factor`, those below
    original / high_freq_factor are kept, and the ones between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def apply(self, freq: Tensor) -> Tensor:
        """Scaled inverse frequencies, like `freq`."""
        turns = self.original_max_position * freq / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = ((turns - self.low_freq_factor) / span).clamp(0, 1)
        return freq * kept + freq / self.factor * (1 - kept)


@dataclass(frozen=True, slots=True)
class Rotary:
    """One kind of rotary embedding: all layers that share it share its tables.

    Angles are position (float32) times inverse frequency (float32), then cosine and sine in
    float32: the order of the reference implementations, which matters near 1M positions.
    """

    dim: int  # rotated channels
    theta: float
    yarn: Yarn | None = None
    llama3: Llama3Scaling | None = None

    def inv_freq(self) -> Tensor:
        """[dim / 2] float32, theta^(-2i/dim), with the scaling that is set."""
        freq = self.theta ** -(torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        if self.yarn:
            yarn = self.yarn

            def correction(rotations: float) -> float:
                wavelength = yarn.original_max_position / (rotations * 2 * math.pi)
                return self.dim * math.log(wavelength) / (2 * math.log(self.theta))

            low = max(math.floor(correction(yarn.beta_fast)), 0)
            high = min(math.ceil(correction(yarn.beta_slow)), self.dim - 1)
            steps = torch.arange(self.dim // 2, dtype=torch.float64)
            ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
            freq = freq * (1 - ramp) + freq / yarn.factor * ramp
        if self.llama3:
            freq = self.llama3.apply(freq)
        return freq.float()

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [*positions.shape, dim / 2] float32."""
        angles = positions.float().unsqueeze(-1) * _inv_freq_on(self, positions.device)
        return angles.cos(), angles.sin()

    def tables(self, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """`cos_sin` of the step's positions, computed once a step."""
        return _tables(ctx, self)


@once_a_step
def _tables(ctx: ForwardContext, rotary: Rotary) -> tuple[Tensor, Tensor]:
    return rotary.cos_sin(ctx.positions)


@cache
def _inv_freq_on(rotary: Rotary, device: torch.device) -> Tensor:
    # Copied once: a copy from the host cannot be part of a captured CUDA graph.
    return rotary.inv_freq().to(device)
