"""One rank of a larger layout, whose other ranks are not there."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kllm.config import EngineConfig
from kllm.core import Outcome, Plan, Request
from kllm.engine.executor import rearranged, sharing_of
from kllm.engine.rank import DeviceMemory, Rank
from kllm.engine.rank_answers import StepAnswers
from kllm.engine.rank_groups import sliced_groups
from kllm.engine.rank_protocol import Runner, Sampled, Step
from kllm.engine.rank_responder import Responder
from kllm.engine.rank_steps import RankSteps
from kllm.engine.step import MicroStep, RankOutcome
from kllm.models.base import CausalLM, Groups
from kllm.models.load import ResolvedModel
from kllm.parallel.layout import place, rank_of


class Loopback:
    """A rank of each request-DP group, told its steps as if it were in another process.

    One rank is here. In each step it runs for the group that has most to do, as the others wait
    for that one in every exchange of tokens; the tokens that they sample are 0. Another process is
    told of the step as all ranks would be, so that a step takes the host as long as one of theirs.

    Args:
        here: the rank.
        group: its own.
        groups: all of the layout.
        responder: has a line for each rank of the layout.
    """

    def __init__(self, here: Runner, group: int, groups: int, responder: Responder) -> None:
        self.present = group  # the group that the rank runs for
        self._members = [StepAnswers(_Member(self, here, group, i, groups)) for i in range(groups)]
        self._responder = responder
        self._ranks = responder.count // groups  # of a group

    def call(self, messages: Sequence[Step]) -> list[Sampled]:
        """The answers to each group's message.

        Raises:
            WorkerError: when the responder is gone.
        """
        sent = [_packed(message) for message in messages]
        self._responder.round_trip([data for data in sent for _ in range(self._ranks)])
        pairs = zip(self._members, map(pickle.loads, sent), strict=True)
        return [pickle.loads(_packed(member.answer(message))) for member, message in pairs]


@dataclass(frozen=True, slots=True)
class _Member:
    """The rank that is here, or one that is not, for one group."""

    loopback: Loopback
    here: Runner
    seat: int  # the group whose place `here` has
    group: int
    groups: int

    def run(self, micro: Sequence[MicroStep], requests: Sequence[Request]) -> RankOutcome:
        """See `Runner.run`."""
        if self.loopback.present != self.group:
            count = len(requests)
            return RankOutcome(np.arange(count), np.zeros(count, np.int64))
        return self.here.run([self._seated(step) for step in micro], requests)

    def _seated(self, step: MicroStep) -> MicroStep:
        """The step in which the rank's group and the one that it runs for change places."""
        if self.group == self.seat:
            return step
        tokens = list(step.peer_tokens)
        each = len(tokens) // self.groups
        ours, theirs = (slice(i * each, (i + 1) * each) for i in (self.seat, self.group))
        tokens[ours], tokens[theirs] = tokens[theirs], tokens[ours]
        return replace(step, peer_tokens=tuple(tokens))


def busiest(plans: Sequence[Plan | None], group: int) -> int:
    """The group with the most tokens to run, then the most to read; `group` among equals."""

    def load(i: int) -> tuple[int, int, bool]:
        plan = plans[i]
        if plan is None:
            return 0, 0, i == group
        return plan.num_tokens, int(plan.context_lens.sum()), i == group

    return group if len(plans) == 1 else max(range(len(plans)), key=load)


def _packed(message: Step | Sampled) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


class SlicedExecutor:
    """The rank `config.slice_rank` of a layout, in this process and with its true shapes.

    Transfers take the time of `config.link` and bring no foreign data; tokens that other ranks
    would sample are 0. Every request-DP group schedules its requests; see `Loopback`.

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
        self.sharing = sharing_of(config, self._rank.budget)
        self._responder = Responder(config.parallel.world)
        try:
            self._allocate(fill=False)
        except BaseException:
            self._responder.close()  # nobody else will: there is no executor to close
            raise

    def execute(self, plans: Sequence[Plan | None]) -> list[Outcome | None]:
        """Run one step of every group."""
        assert self._rank is not None, "executor used after close"
        self._loopback.present = busiest(plans, self._place.dp)
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
            self._responder.close()
            del self._steps, self._loopback
        self._rank = None

    @property
    def _here(self) -> Rank:
        assert self._rank is not None, "executor used after close"
        return self._rank

    def _allocate(self, *, fill: bool) -> None:
        sharing = self.sharing
        self._here.allocate(sharing.budget, sharing.stripes, sharing.cp_kind, fill=fill)
        groups, dp = range(self._layout.dp), self._place.dp
        self._loopback = Loopback(self._here, dp, len(groups), self._responder)
        numbers = [rank_of(self._layout, replace(self._place, dp=group)) for group in groups]
        self._steps = RankSteps(self._loopback, self._layout, sharing.stripes, numbers)
