"""The gated feed-forward block, split over its hidden features."""

from torch import Tensor, nn

from kllm import kernels
from kllm.layers.linear import ColumnLinear, RowLinear
from kllm.parallel.communicator import Communicator


class GatedMLP(nn.Module):
    """W_down(silu(W_gate x) * W_up x) (Shazeer 2020).

    Gate and up are one matrix: each rank holds its rows of the gate, then its rows of up.
    With `limit` both are clamped as `kllm.kernels.reference.swiglu` says.
    """

    def __init__(
        self, dim: int, hidden: int, comm: Communicator, limit: float | None = None
    ) -> None:
        super().__init__()
        self.gate_up = ColumnLinear(dim, 2 * hidden, comm)
        self.down = RowLinear(hidden, dim, comm)
        self.limit = limit

    def partial(self, x: Tensor) -> Tensor:
        """[T, dim] -> [T, dim]: this rank's part of the sum over the ranks."""
        return self.down.product(kernels.swiglu(self.gate_up(x), self.limit))

    def forward(self, x: Tensor) -> Tensor:
        """[T, dim] -> [T, dim]."""
        return self.down(kernels.swiglu(self.gate_up(x), self.limit))  # type: ignore[no-any-return]
