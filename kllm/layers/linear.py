"""Linear layers that know how a tensor-parallel layout cuts them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kllm.errors import ConfigError
from kllm.kernels.packed_linear import PackedWeight, can_pack
from kllm.parallel.communicator import Communicator


def shard_size(what: str, total: int, parts: int) -> int:
    """`total / parts`.

    Raises:
        ConfigError: when `parts` does not divide `total`.
    """
    if total % parts:
        raise ConfigError(f"{what} = {total} cannot be split over {parts} ranks")
    return total // parts


class Linear(nn.Module):
    """y = W x + b, with W whole on every rank.

    Weights are created uninitialised, in the default dtype and device; a loader fills them.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self._packed: PackedWeight | None = None

    def pack(self) -> None:
        """Give the weight up for a reordered copy where that is faster; only `forward` stays."""
        if can_pack(self.weight):
            self._packed = PackedWeight(self.weight)
            self.register_parameter("weight", None)

    def product(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out] of this rank's weight alone."""
        if self._packed is not None:
            return self._packed.linear(x, self.bias)
        return F.linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return self.product(x)


class ColumnLinear(Linear):
    """Output features are split over the ranks of `comm`: [..., in] -> [..., out / size]."""

    def __init__(
        self, in_features: int, out_features: int, comm: Communicator, bias: bool = False
    ) -> None:
        super().__init__(in_features, shard_size("output features", out_features, comm.size), bias)
        self.comm = comm  # the loader asks it which rows are this rank's


class RowLinear(Linear):
    """Input features are split over the ranks of `comm`; partial sums are all-reduced."""

    def __init__(self, in_features: int, out_features: int, comm: Communicator) -> None:
        super().__init__(shard_size("input features", in_features, comm.size), out_features)
        self.comm = comm

    def forward(self, x: Tensor) -> Tensor:
        """[..., in / size] -> [..., out], the same on every rank."""
        y = self.product(x)
        if self.comm.size > 1:
            self.comm.all_reduce(y).wait()
        return y
