"""Matrix products on a CPU with weights in oneDNN's blocked layout.

`F.linear` in float32 goes to the BLAS library, which reads row-major weights; oneDNN reads
weights that were reordered once for the vector units of this CPU. Measured on one core of an
AMD EPYC with SmolLM2's four matrices a layer, 30 layers: 25.3 -> 12.9 ms for one row, 45.8 ->
18.1 ms for 8, 156 -> 64 ms for 64. The reorder and the product are what torch's own compiler
emits for frozen weights.

On Intel CPUs the BLAS library is MKL, which is the faster one for a few rows: one row by the same
matrices takes 16 ms with it and 21 ms with oneDNN, 8 rows 39 and 33 ms (two cores of a
Xeon with AVX-512). There both layouts are kept.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from kllm.hardware.machine import cpu_name

FEW_ROWS = 3
# Elements of weights that are kept in both layouts: smaller ones take as long as the call itself,
# larger ones as long as their bytes.
BOTH = range(1 << 18, 1 << 23)


def can_pack(weight: Tensor) -> bool:
    """Whether `PackedWeight` takes this weight: float32 on a CPU, in a torch with oneDNN."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() > 0
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


@cache
def has_mkl() -> bool:
    """Whether `F.linear` runs in MKL on a CPU that it is made for."""
    return bool(torch.backends.mkl.is_available() and "Intel" in cpu_name())  # type: ignore[no-untyped-call]


class PackedWeight:
    """A reordered copy of a [out, in] weight for which `can_pack` holds."""

    def __init__(self, weight: Tensor) -> None:
        weight = weight.detach()
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._plain = weight if has_mkl() and weight.numel() in BOTH else None

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., in] -> [..., out], as `F.linear` with the weight that was packed."""
        if self._plain is not None and x.numel() <= FEW_ROWS * x.shape[-1]:
            return F.linear(x, self._plain, bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return y
