"""The communicators of a rank: process groups, or links to ranks that are not there."""

from pathlib import Path

import torch

from kllm.config import EngineConfig
from kllm.errors import WorkerError
from kllm.models.base import Groups
from kllm.parallel import distributed, layout
from kllm.parallel.communicator import Communicator
from kllm.parallel.emulated import EmulatedComm
from kllm.parallel.expert_counts import MeasuredRouting
from kllm.parallel.expert_placement import ExpertOptions
from kllm.parallel.link import parse_link


def joined_groups(config: EngineConfig) -> Groups:
    """Process groups; all ranks make the same ones in the same order."""
    parallel = config.parallel
    tp = distributed.join(layout.tp_groups(parallel))
    return Groups(
        attn=tp,
        ffn=tp,
        vocab=tp,
        ep=distributed.join(layout.ep_groups(parallel)),
        cp=distributed.join(layout.cp_groups(parallel)),
        pp=distributed.join(layout.pp_groups(parallel)),
        experts=_expert_options(config),
    )


def try_groups(groups: Groups, device: torch.device) -> None:
    """Sum the ranks' numbers in every group: a link that does not work shows here and not later.

    Raises:
        WorkerError: when a group comes to a wrong sum.
    """
    for what in ("attn", "ep", "cp", "pp"):
        comm: Communicator = getattr(groups, what)
        found = torch.full((1,), float(comm.rank), device=device)
        comm.all_reduce(found).wait()
        want = comm.size * (comm.size - 1) / 2
        if float(found) != want:
            raise WorkerError(
                f"the {what} group's sum came to {float(found)} on rank {comm.rank} and not to "
                f"{want}; the link between the ranks is broken"
            )


def sliced_groups(config: EngineConfig, device: torch.device) -> Groups:
    """Groups of which only `config.slice_rank` is present, over `config.link`."""
    parallel, link = config.parallel, parse_link(config.link, device.type)
    at = layout.place(parallel, config.slice_rank)
    stage_ranks = parallel.world // parallel.pp

    def comm(size: int, rank: int) -> EmulatedComm:
        return EmulatedComm(link, size=size, rank=rank, device=device)

    tp = comm(parallel.tp, at.tp)
    return Groups(
        attn=tp,
        ffn=tp,
        vocab=tp,
        ep=comm(parallel.ep, config.slice_rank % stage_ranks % parallel.ep),
        cp=comm(parallel.cp, at.cp),
        pp=comm(parallel.pp, at.pp),
        experts=_expert_options(config),
    )


def _expert_options(config: EngineConfig) -> ExpertOptions:
    if not config.expert_placement:
        return ExpertOptions.of(config.parallel)
    routing = MeasuredRouting.read(Path(config.expert_placement))
    return ExpertOptions.of(config.parallel, routing.counts)
