"""One rank of a larger layout, whose other ranks are not there."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kllm.config import EngineConfig
from kllm.core import Outcome, Plan
from kllm.engine.executor import rearranged, sharing_of
from kllm.engine.rank import DeviceMemory, Rank
from kllm.engine.rank_answers import StepAnswers
from kllm.engine.rank_groups import sliced_groups
from kllm.engine.rank_protocol import Runner, Sampled, Step
from kllm.engine.rank_steps import RankSteps
from kllm.models.base import CausalLM, Groups
from kllm.models.load import ResolvedModel
from kllm.parallel.layout import place, rank_of


class Loopback:
    """A rank in this process that is told its steps as if it were in another one.

    So a step takes the host as long as one of all ranks, except that no process has to be woken:
    some tens of microseconds a step.
    """

    def __init__(self, rank: Runner) -> None:
        self._answers = StepAnswers(rank)

    def call(self, messages: Sequence[Step]) -> list[Sampled]:
        """The rank's answer to its message."""
        return [_sent(self._answers.answer(_sent(message))) for message in messages]


def _sent(message: Any) -> Any:
    """What arrives in another process."""
    return pickle.loads(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


class SlicedExecutor:
    """The rank `config.slice_rank` of a layout, in this process and with its true shapes.

    Transfers take the time of `config.link` and bring no foreign data; tokens that other ranks
    would sample are 0. It has the requests of its own group only: the others are like it.

    Args:
        model: the rank's network if it is already loaded; it outlives the executor.

    Raises:
        CapacityError: when the weights or the KV pool do not fit the device.
    """

    def __init__(
        self, config: EngineConfig, resolved: ResolvedModel, model: CausalLM | None = None
    ) -> None:
        device = torch.device(resolved.device)
        self._layout = config.parallel
        self._place = place(config.parallel, config.slice_rank)
        self._rank: Rank | None = Rank(
            config,
            resolved,
            sliced_groups(config, device),
            number=config.slice_rank,
            device=device,
            model=model,
        )
        sharing = sharing_of(config, self._rank.budget)
        self.sharing = replace(sharing, groups=1)
        self._allocate(fill=False)

    def execute(self, plans: Sequence[Plan | None]) -> list[Outcome | None]:
        """Run one step of the rank."""
        assert self._rank is not None, "executor used after close"
        return self._steps.execute(plans)

    @property
    def run_s(self) -> float:
        """See `RankSteps.run_s`."""
        return self._steps.run_s

    def arrange(self, pages: Sequence[int], *, kind: str, tokens: int) -> None:
        """See `DeviceExecutor.arrange`."""
        self.sharing = rearranged(self.sharing, pages[self._place.cp], kind, tokens)
        self._allocate(fill=True)

    def stand_for(self, cp: int) -> None:
        """Be another context-parallel rank of the group, which has the same weights.

        The KV pool has to be replaced (`arrange`) before the next step.
        """
        self._place = replace(self._place, cp=cp)
        self._here.stand_for(cp)

    def settle(self) -> list[DeviceMemory]:
        """See `DeviceExecutor.settle`."""
        return [self._here.settle()]

    @property
    def groups(self) -> Groups:
        """The rank's communicators."""
        return self._here.groups

    def close(self) -> None:
        """Drop the KV pool; what the caller does not hold of the network goes too."""
        if self._rank is not None:
            self._rank.close()
            del self._steps
        self._rank = None

    @property
    def _here(self) -> Rank:
        assert self._rank is not None, "executor used after close"
        return self._rank

    def _allocate(self, *, fill: bool) -> None:
        sharing = self.sharing
        self._here.allocate(sharing.budget, sharing.stripes, sharing.cp_kind, fill=fill)
        number = rank_of(self._layout, self._place)
        self._steps = RankSteps(Loopback(self._here), self._layout, sharing.stripes, [number])
