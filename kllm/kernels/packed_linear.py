"""Matrix products on a CPU with weights in a layout made for its vector units.

`F.linear` in float32 reads row-major weights; oneDNN, and MKL on the Intel CPUs it is made for,
read weights that were reordered once. The reorders and products are what torch's own compiler
emits for frozen weights. Measured with SmolLM2's four matrices a layer, 30 layers:

- one core of an AMD EPYC, `F.linear` -> oneDNN: 25.3 -> 12.9 ms for one row, 45.8 -> 18.1 ms
  for 8, 156 -> 64 ms for 64;
- two cores of an Intel Xeon with AVX-512, `F.linear`, oneDNN, MKL: 22.5, 29.8 and 22.1 ms for one
  row, 49.1, 39.9 and 31.1 ms for 8, 102, 107 and 79 ms for 64.
"""

from functools import cache

import torch
from torch import Tensor

from kllm.hardware.machine import cpu_name

# What MKL is told of the rows that a weight will meet, which decides the layout: with 64 no number
# of rows is slow, with 8 all above 8 are.
EXPECTED_ROWS = 64


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
def prefers_mkl() -> bool:
    """Whether MKL is there and this is a CPU that it is made for."""
    return (
        bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
        and "Intel" in cpu_name()
        and hasattr(torch.ops.mkl, "_mkl_linear")
        and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight")
    )


class PackedWeight:
    """A reordered copy of a [out, in] weight for which `can_pack` holds.

    Made with as many threads as will use it: MKL multiplies with no more than it packed with.
    """

    def __init__(self, weight: Tensor) -> None:
        weight = weight.detach()
        # MKL's product asks the weight itself for its shape, and reads nothing else of it.
        self._shape = weight.new_empty(()).expand(weight.shape) if prefers_mkl() else None
        self._packed: Tensor
        if self._shape is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        else:
            reorder = torch.ops.mkl._mkl_reorder_linear_weight
            self._packed = reorder(weight.contiguous(), EXPECTED_ROWS)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., in] -> [..., out], as `F.linear` with the weight that was packed."""
        y: Tensor
        if self._shape is None:
            y = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        else:
            rows = x.numel() // x.shape[-1]
            y = torch.ops.mkl._mkl_linear(x, self._packed, self._shape, bias, rows)
        return y
