"""The collectives that layers use, as one protocol with several implementations.

Each call returns at once with a handle; the result may be read after `handle.wait()`. On a
GPU `wait` orders the current stream behind the transfer and does not block the host.
"""

from typing import Protocol

from torch import Tensor


class Handle(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when (on a GPU: order the current stream so that) the result can be read."""


class Communicator(Protocol):
    """A group of ranks. All ranks of the group make the same calls in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Handle:
        """Sum `x` over the ranks, in place."""

    def all_gather(self, out: Tensor, x: Tensor) -> Handle:
        """Concatenate every rank's `x` [n, ...] into `out` [size * n, ...], in rank order."""

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Handle:
        """Sum `x` [size * n, ...] over the ranks and leave this rank's part in `out` [n, ...]."""

    def all_to_all(
        self, out: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int]
    ) -> Handle:
        """Send `in_splits[r]` rows of `x` to rank r; receive `out_splits[r]` rows from it."""

    def ring_shift(self, out: Tensor, x: Tensor) -> Handle:
        """Send `x` to the next rank and receive `out` from the previous one."""

    def send(self, x: Tensor, to: int) -> Handle:
        """Send `x` to rank `to`, which calls `receive` with the same shape and dtype."""

    def receive(self, out: Tensor, source: int) -> Handle:
        """Receive what rank `source` sends."""
