"""One rank gets from its group what the collectives mean; so do the test ranks of threads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kllm.parallel.communicator import Communicator
from kllm.parallel.single import SingleComm
from tests.parallel.threads import run_ranks

Work = Callable[[Communicator], Tensor]


def alone(work: Work) -> Tensor:
    return work(SingleComm())


def threaded(work: Work) -> Tensor:
    return run_ranks(1, work)[0]


def numbers(rank: int = 0) -> Tensor:
    """[4, 2], other ones on every rank."""
    return torch.arange(8.0).view(4, 2) + 100 * rank


def all_reduce(comm: Communicator) -> Tensor:
    x = numbers(comm.rank)
    comm.all_reduce(x).wait()
    return x


def all_gather(comm: Communicator) -> Tensor:
    out = torch.full((4 * comm.size, 2), torch.nan)
    comm.all_gather(out, numbers(comm.rank)).wait()
    return out


def reduce_scatter(comm: Communicator) -> Tensor:
    out = torch.full((4 // comm.size, 2), torch.nan)
    comm.reduce_scatter(out, numbers(comm.rank)).wait()
    return out


def all_to_all(comm: Communicator) -> Tensor:
    """Rank 0 keeps a row and sends three, rank 1 sends three and keeps one."""
    splits = [[1, 3], [3, 1]][comm.rank] if comm.size == 2 else [4]
    out = torch.full((4, 2), torch.nan)
    comm.all_to_all(out, numbers(comm.rank), splits, splits).wait()
    return out


def ring_shift(comm: Communicator) -> Tensor:
    out = torch.full((4, 2), torch.nan)
    comm.ring_shift(out, numbers(comm.rank)).wait()
    return out


COLLECTIVES = [all_reduce, all_gather, reduce_scatter, all_to_all, ring_shift]


@pytest.mark.parametrize("run", [alone, threaded])
@pytest.mark.parametrize("work", COLLECTIVES)
def test_one_rank_gets_its_own_data_back(work: Work, run: Callable[[Work], Tensor]) -> None:
    assert torch.equal(run(work), numbers())


def test_buffers_that_are_the_same_memory_stay_as_they_are() -> None:
    x = numbers()
    comm = SingleComm()
    comm.all_gather(x, x).wait()
    comm.reduce_scatter(x, x).wait()
    comm.all_to_all(x, x, [4], [4]).wait()
    comm.ring_shift(x, x).wait()
    assert torch.equal(x, numbers())


def test_two_ranks_exchange_what_the_protocol_says() -> None:
    a, b = numbers(0), numbers(1)
    expected = [
        (all_reduce, (a + b, a + b)),
        (all_gather, (torch.cat([a, b]), torch.cat([a, b]))),
        (reduce_scatter, ((a + b)[:2], (a + b)[2:])),
        (all_to_all, (torch.cat([a[:1], b[:3]]), torch.cat([a[1:], b[3:]]))),
        (ring_shift, (b, a)),
    ]
    for work, wanted in expected:
        for got, want in zip(run_ranks(2, work), wanted, strict=True):
            assert torch.equal(got, want), work.__name__


def test_a_rank_that_fails_ends_the_others() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            raise ValueError("rank 1")
        comm.all_reduce(numbers()).wait()

    with pytest.raises(ValueError, match="rank 1"):
        run_ranks(3, work)
