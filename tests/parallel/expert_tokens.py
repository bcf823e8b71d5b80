"""Tokens of ranks whose experts multiply, to check an exchange with."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kllm.parallel.communicator import Communicator
from kllm.parallel.expert_dispatch import Dispatcher, DispatchStep, Routed
from tests.parallel.threads import run_ranks
from tests.tolerances import TOLERANCE

RANKS, PER_RANK, DIM, K = 4, 3, 8, 3
COUNTS = (5, 0, 9, 2)  # tokens of each rank


def routed(rank: int, dtype: torch.dtype = torch.float32, n: int | None = None) -> Routed:
    """A rank's tokens, `COUNTS` of them unless said otherwise."""
    generator = torch.Generator().manual_seed(rank)
    n = COUNTS[rank] if n is None else n
    slots = torch.rand(n, RANKS * PER_RANK, generator=generator).argsort(1)[:, :K].contiguous()
    x, weights = torch.randn(n, DIM, generator=generator), torch.rand(n, K, generator=generator)
    return Routed(x.to(dtype), slots, weights / (RANKS * PER_RANK))


def add_up(tokens: Routed, first: int) -> Tensor:
    """An expert multiplies by its slot number + 1: the weighted sum over the own ones."""
    local = tokens.slots - tokens.first
    own = (local >= 0) & (local < PER_RANK)
    factor = torch.where(own, (local + first + 1) * tokens.weights, 0.0).sum(dim=1, keepdim=True)
    out = torch.where(own.any(dim=1, keepdim=True), tokens.x * factor, 0.0)
    return out.to(tokens.x.dtype)


def check_sums(
    backend: Callable[[Communicator], Dispatcher],
    dtype: torch.dtype,
    decodes: Sequence[bool],
    counts: Sequence[int] = COUNTS,
) -> None:
    """Every token gets the sum over its experts, in steps with and without a prompt in a row."""

    def work(comm: Communicator) -> list[Tensor]:
        comm.group = comm  # type: ignore[attr-defined]
        dispatcher = backend(comm)
        out = []
        for decode_only in decodes:
            step = DispatchStep(max(counts), decode_only)
            trip = dispatcher.send(routed(comm.rank, dtype, counts[comm.rank]), step)
            arrived = trip.arrive()
            assert arrived.slots.dtype == torch.int64
            out.append(trip.combine(add_up(arrived, comm.rank * PER_RANK)))
        return out

    for rank, found in enumerate(run_ranks(RANKS, work)):
        tokens = routed(rank, dtype, counts[rank])
        want = tokens.x * ((tokens.slots + 1) * tokens.weights).sum(dim=1, keepdim=True)
        for got in found:
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)
