"""Ranks as threads of one process, with collectives that move real data."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch
from torch import Tensor

from kllm.parallel.communicator import Communicator
from kllm.parallel.single import Done

T = TypeVar("T")
TIMEOUT_S = 30.0


def run_ranks(size: int, work: Callable[[Communicator], T]) -> list[T]:
    """What `work` returned on each rank; the first error of a rank ends all of them."""
    group = ThreadGroup(size)

    def run(rank: int) -> T:
        try:
            return work(ThreadComm(group, rank))
        except BaseException:
            group.barrier.abort()  # the others must not wait for this rank
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


class ThreadGroup:
    """Where the ranks of a group meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = Barrier(size, timeout=TIMEOUT_S)
        self.sent: list[list[Tensor]] = [[] for _ in range(size)]
        self.mail: dict[tuple[int, int], Queue[Tensor]] = {
            (source, to): Queue() for source in range(size) for to in range(size)
        }


class ThreadComm:
    """One rank of a group of threads. Collectives are over when the call returns."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.size = group.size

    def all_reduce(self, x: Tensor) -> Done:
        x.copy_(torch.stack([sent[0] for sent in self._exchange([x])]).sum(dim=0))
        return Done()

    def all_gather(self, out: Tensor, x: Tensor) -> Done:
        out.copy_(torch.cat([sent[0] for sent in self._exchange([x])]))
        return Done()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Done:
        total = torch.stack([sent[0] for sent in self._exchange([x])]).sum(dim=0)
        out.copy_(total.chunk(self.size)[self.rank])
        return Done()

    def all_to_all(
        self, out: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int]
    ) -> Done:
        received = [sent[self.rank] for sent in self._exchange(list(x.split(in_splits)))]
        assert [len(rows) for rows in received] == out_splits
        out.copy_(torch.cat(received))
        return Done()

    def ring_shift(self, out: Tensor, x: Tensor) -> Done:
        out.copy_(self._exchange([x])[self.rank - 1][0])
        return Done()

    def send(self, x: Tensor, to: int) -> Done:
        self._group.mail[self.rank, to].put(x.clone())
        return Done()

    def receive(self, out: Tensor, source: int) -> Done:
        out.copy_(self._group.mail[source, self.rank].get(timeout=TIMEOUT_S))
        return Done()

    def _exchange(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        """What every rank gave, once all of them have."""
        self._group.sent[self.rank] = [tensor.clone() for tensor in tensors]
        self._group.barrier.wait()
        everyone = list(self._group.sent)
        self._group.barrier.wait()  # nobody begins the next exchange before all have read
        return everyone
