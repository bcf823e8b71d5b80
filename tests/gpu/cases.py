"""Seeded inputs and comparisons that the kernel tests share."""

import os

import torch
from torch import Tensor

from tests.tolerances import TOLERANCE

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter truncates to bfloat16 instead of rounding to nearest.
DTYPES = [torch.float32, torch.float16 if INTERPRET else torch.bfloat16]
TOKENS = [0, 1, 17, 300]  # empty, one, odd, several programs


def randn(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed + 7 * len(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def assert_near(found: Tensor, want: Tensor, scale: float = 1.0) -> None:
    """Equal within the dtype's tolerance times `scale`; NaN never passes."""
    limit = TOLERANCE[found.dtype] * scale
    torch.testing.assert_close(found.float(), want.float(), rtol=limit, atol=limit)


def distance(x: Tensor, y: Tensor) -> float:
    """1 - 2<x,y> / (<x,x> + <y,y>): 0 for equal tensors."""
    x, y = x.double(), y.double()
    if not x.any() and not y.any():  # no choice was one of these experts
        return 0.0
    return float(1 - 2 * (x * y).sum() / ((x * x).sum() + (y * y).sum()))
