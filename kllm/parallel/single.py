"""The communicator of a single rank: every collective is a copy or nothing."""

from torch import Tensor


class Done:
    """The handle of a transfer that has already happened."""

    def wait(self) -> None:
        """Return at once."""


class SingleComm:
    """A group of one rank."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Done:
        """The sum over one rank is `x` itself."""
        return Done()

    def all_gather(self, out: Tensor, x: Tensor) -> Done:
        """Copy `x` to `out`, unless they are the same memory."""
        return _copy(out, x)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Done:
        """Copy `x` to `out`, unless they are the same memory."""
        return _copy(out, x)

    def all_to_all(
        self, out: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int]
    ) -> Done:
        """Copy `x` to `out`, unless they are the same memory."""
        return _copy(out, x)

    def ring_shift(self, out: Tensor, x: Tensor) -> Done:
        """Copy `x` to `out`: the next and the previous rank are this one."""
        return _copy(out, x)

    def send(self, x: Tensor, to: int) -> Done:
        """A single rank has nobody to send to."""
        raise AssertionError("a group of one rank has no other rank to send to")

    def receive(self, out: Tensor, source: int) -> Done:
        """A single rank has nobody to receive from."""
        raise AssertionError("a group of one rank has no other rank to receive from")


def _copy(out: Tensor, x: Tensor) -> Done:
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    return Done()
