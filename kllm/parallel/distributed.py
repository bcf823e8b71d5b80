"""Collectives between processes, through torch.distributed: NCCL on GPUs, gloo on CPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kllm.parallel.communicator import Communicator, Handle
from kllm.parallel.layout import Groups
from kllm.parallel.single import SingleComm

# Longer than any honest wait for a slow rank. Whoever watches the ranks ends a hung job sooner.
TIMEOUT = timedelta(minutes=10)

# torch 2.13 gave both a new name and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class _Works:
    """Transfers under way, as one handle."""

    works: Sequence[dist.Work | None]

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self.works:
            assert work is not None  # this rank belongs to the group
            work.wait()


class TorchComm:
    """This rank's part of a process group.

    Args:
        ranks: the global ranks of the group, in the order of its own ranks.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self.group = group  # for libraries that communicate on their own
        self._ranks = tuple(ranks)
        self.size = len(ranks)
        self.rank = self._ranks.index(dist.get_rank())

    def all_reduce(self, x: Tensor) -> Handle:
        """See `Communicator.all_reduce`."""
        return _Works((dist.all_reduce(x, group=self.group, async_op=True),))

    def all_gather(self, out: Tensor, x: Tensor) -> Handle:
        """See `Communicator.all_gather`."""
        return _Works((_all_gather(out, x.contiguous(), group=self.group, async_op=True),))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Handle:
        """See `Communicator.reduce_scatter`."""
        return _Works((_reduce_scatter(out, x.contiguous(), group=self.group, async_op=True),))

    def all_to_all(
        self, out: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int]
    ) -> Handle:
        """See `Communicator.all_to_all`."""
        work = dist.all_to_all_single(
            out, x.contiguous(), out_splits, in_splits, group=self.group, async_op=True
        )
        return _Works((work,))

    def ring_shift(self, out: Tensor, x: Tensor) -> Handle:
        """See `Communicator.ring_shift`."""
        following = self._ranks[(self.rank + 1) % self.size]
        previous = self._ranks[self.rank - 1]
        # In one batch: a send that waits for its peer's receive would deadlock a ring on a GPU.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x.contiguous(), following, self.group),
                dist.P2POp(dist.irecv, out, previous, self.group),
            ]
        )
        return _Works(works)

    def send(self, x: Tensor, to: int) -> Handle:
        """See `Communicator.send`."""
        return self._alone(dist.isend, x.contiguous(), to)

    def receive(self, out: Tensor, source: int) -> Handle:
        """See `Communicator.receive`."""
        return self._alone(dist.irecv, out, source)

    def _alone(self, operation: Any, x: Tensor, peer: int) -> Handle:
        # As a batch of one, which takes the group's connections: NCCL would make others for each
        # pair of ranks, and torch warn of it.
        one = dist.P2POp(operation, x, self._ranks[peer], self.group)
        return _Works(dist.batch_isend_irecv([one]))


def host_store(host: str) -> tuple[Any, int]:
    """Where ranks meet: a store that lives as long as the answer is held, and its port."""
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    return store, store.port


def connect(at: tuple[str, int], prefix: str, rank: int, world: int, device: torch.device) -> None:
    """Join the default process group; every rank does.

    Args:
        at: host and port of the store.
        prefix: of the group's keys there: a store may serve one group after the other.

    Raises:
        RuntimeError: from torch, when a rank does not come.
    """
    store = dist.TCPStore(*at, is_master=False)  # type: ignore[attr-defined]
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.PrefixStore(prefix, store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world,
        timeout=TIMEOUT,
        device_id=device if on_gpu else None,
    )


def disconnect() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def join(groups: Groups) -> Communicator:
    """This rank's communicator among groups that hold every rank once; all ranks call it alike."""
    if all(len(ranks) == 1 for ranks in groups):
        return SingleComm()
    me, mine = dist.get_rank(), None
    for ranks in groups:
        group = dist.new_group(list(ranks), timeout=TIMEOUT)
        if me in ranks:
            mine = TorchComm(group, ranks)
    assert mine is not None
    return mine
