"""Kernels: each has a plain torch reference and may have a Triton version.

The functions here choose by device: Triton where the tensors are on a GPU, otherwise the
reference. Nothing else in the engine knows which one ran.
"""

from torch import Tensor

from kllm.kernels import reference


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kllm.kernels.reference.rmsnorm`."""
    return reference.rmsnorm(x, weight, eps)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kllm.kernels.reference.add_rmsnorm`."""
    return reference.add_rmsnorm(x, residual, weight, eps)


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = True, inverse: bool = False
) -> Tensor:
    """See `kllm.kernels.reference.rope`."""
    return reference.rope(x, cos, sin, interleaved=interleaved, inverse=inverse)


def swiglu(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """See `kllm.kernels.reference.swiglu`."""
    return reference.swiglu(gate_up, limit)
