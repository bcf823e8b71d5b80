"""All ranks of a layout as threads of one process, each with the groups it belongs to."""

from collections.abc import Callable
from typing import TypeVar

from kllm.config import ParallelConfig
from kllm.models.base import Groups
from kllm.parallel.communicator import Communicator
from kllm.parallel.expert_placement import ExpertOptions
from kllm.parallel.layout import ep_groups, tp_groups
from kllm.parallel.single import SingleComm
from tests.parallel.threads import ThreadComm, ThreadGroup, run_ranks

T = TypeVar("T")


def run_layout(layout: ParallelConfig, work: Callable[[int, Groups], T]) -> list[T]:
    """What `work` returned on each rank, given the rank and its groups."""
    options = ExpertOptions.of(layout)
    tp = [ThreadGroup(layout.tp) for _ in tp_groups(layout)]
    ep = [ThreadGroup(layout.ep) for _ in ep_groups(layout)]

    def run(world: Communicator) -> T:
        def mine(groups: list[ThreadGroup], size: int) -> Communicator:
            if size == 1:
                return SingleComm()
            return ThreadComm(groups[world.rank // size], world.rank % size)

        inner, experts = mine(tp, layout.tp), mine(ep, layout.ep)
        one = SingleComm()
        try:
            return work(world.rank, Groups(inner, inner, inner, experts, one, one, options))
        except BaseException:
            for group in (*tp, *ep):
                group.barrier.abort()
            raise

    return run_ranks(layout.world, run)
