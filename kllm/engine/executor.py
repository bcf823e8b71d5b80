"""Who runs the plans: the seam between one engine and one or many ranks.

An executor owns networks, KV memory and devices. The engine above it knows only plans and
outcomes, so ranks in this process, in others, torchrun's, or a slice of a layout take the same
place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from kllm.config import EngineConfig
from kllm.core import Outcome, Plan, TokenLogprobs
from kllm.engine.memory import KVBudget
from kllm.engine.rank import DeviceMemory, Rank
from kllm.engine.rank_groups import sliced_groups
from kllm.engine.step import RankOutcome, sampled_on, steps_of
from kllm.models.base import CausalLM, Groups
from kllm.models.load import ResolvedModel
from kllm.parallel.layout import place
from kllm.parallel.stripes import Stripes, stripe_tokens


@dataclass(frozen=True, slots=True)
class Sharing:
    """What the engine must know of an executor's ranks to schedule for them."""

    budget: KVBudget  # of each rank
    groups: int  # how many groups of ranks have requests of their own
    stripes: Stripes | None  # how a group's prompts are dealt to its ranks
    cp_kind: str  # how they see each other's KV


class Executor(Protocol):
    """Runs plans one after the other."""

    sharing: Sharing

    @property
    def run_s(self) -> float:
        """Host seconds that the slowest rank took for its share of the last step."""

    def execute(self, plans: Sequence[Plan | None]) -> list[Outcome | None]:
        """Run one step of every group and return its sampled tokens.

        Raises:
            torch.OutOfMemoryError: when a device runs out of memory.
            WorkerError: when a rank died or hung.
        """

    def close(self) -> None:
        """Give memory and processes back."""


class DeviceExecutor(Executor, Protocol):
    """An executor whose ranks have devices, with what measurements need of these."""

    def arrange(self, pages: Sequence[int], *, kind: str, tokens: int) -> None:
        """Replace the KV pools by ones of random entries, for measuring prompts.

        Args:
            pages: of each context-parallel rank.
            kind: of context parallelism.
            tokens: a request holds at most.

        Raises:
            torch.OutOfMemoryError: when a device cannot hold it.
        """

    def settle(self) -> list[DeviceMemory]:
        """Wait for the device of each rank here; its memory since the last call."""


def sharing_of(config: EngineConfig, budget: KVBudget) -> Sharing:
    """How a layout's ranks share requests and prompts."""
    layout, stripes = config.parallel, None
    if layout.cp > 1:
        tokens = stripe_tokens(layout.cp, config.scheduler.token_budget, budget.page_size)
        stripes = Stripes(layout.cp, tokens)
    return Sharing(budget, layout.dp, stripes, layout.cp_kind)


def rearranged(sharing: Sharing, pages: int, kind: str, tokens: int) -> Sharing:
    """The same ranks with pools of other sizes."""
    budget = replace(sharing.budget, num_pages=pages, max_model_len=tokens)
    return replace(sharing, budget=budget, cp_kind=kind)


class InProcessExecutor:
    """One rank in this process: the whole of a layout of one rank, or a slice of a larger one.

    A slice runs the rank `config.slice_rank` with its true shapes. Transfers take the time of
    `config.link` and bring no foreign data; tokens that other ranks would sample are 0.

    Args:
        model: the network if it is already loaded; it outlives the executor.

    Raises:
        CapacityError: when the weights or the KV pool do not fit the device.
    """

    def __init__(
        self, config: EngineConfig, resolved: ResolvedModel, model: CausalLM | None = None
    ) -> None:
        self._layout = config.parallel
        device = torch.device(resolved.device)
        sliced = config.parallel.world > 1
        groups = sliced_groups(config, device) if sliced else Groups.single()
        number = config.slice_rank if sliced else 0
        self._rank: Rank | None = Rank(
            config, resolved, groups, number=number, device=device, model=model
        )
        # A slice has the requests of its own group only: the others are like it.
        sharing = sharing_of(config, self._rank.budget)
        self.sharing = Sharing(sharing.budget, 1, sharing.stripes, sharing.cp_kind)
        self._rank.allocate(sharing.budget, sharing.stripes, sharing.cp_kind)
        self._cp = place(config.parallel, number).cp
        self.run_s = 0.0

    def execute(self, plans: Sequence[Plan | None]) -> list[Outcome | None]:
        """Run one step in this process."""
        assert self._rank is not None, "executor used after close"
        (plan,) = plans
        if plan is None:
            return [None]
        (micro,) = steps_of(plans, self._layout, self.sharing.stripes)
        requests = plan.sampled
        count = len(requests)
        if self._layout.world > 1:
            here = sampled_on(micro, self._cp, self.sharing.stripes)
            requests = tuple(requests[i] for i in here)
        found = self._rank.run(micro, requests)
        self.run_s = found.run_s
        return [merge([found], count)]

    def arrange(self, pages: Sequence[int], *, kind: str, tokens: int) -> None:
        """See `DeviceExecutor.arrange`."""
        assert self._rank is not None
        self.sharing = rearranged(self.sharing, pages[self._cp], kind, tokens)
        self._rank.allocate(self.sharing.budget, self.sharing.stripes, kind, fill=True)

    def stand_for(self, cp: int) -> None:
        """Be another context-parallel rank of the slice's group, which has the same weights.

        The KV pool has to be replaced (`arrange`) before the next step.
        """
        assert self._rank is not None
        self._cp = cp
        self._rank.stand_for(cp)

    def settle(self) -> list[DeviceMemory]:
        """See `DeviceExecutor.settle`."""
        assert self._rank is not None
        return [self._rank.settle()]

    @property
    def groups(self) -> Groups:
        """The rank's communicators."""
        assert self._rank is not None
        return self._rank.groups

    def close(self) -> None:
        """Drop the KV pool; what the caller does not hold of the network goes too."""
        if self._rank is not None:
            self._rank.close()
        self._rank = None


def merge(parts: Sequence[RankOutcome], count: int) -> Outcome:
    """The tokens of `count` sampled requests from the ranks that sampled them; 0 where none did."""
    if len(parts) == 1 and len(parts[0].sampled) == count:
        part = parts[0]
        if (part.sampled[:-1] < part.sampled[1:]).all():  # in order, as without micro-batches
            return Outcome(part.token_ids, part.logprobs)
    tokens = np.zeros(count, np.int64)
    logprobs: list[TokenLogprobs | None] = [None] * count
    any_logprobs = False
    for part in parts:
        tokens[part.sampled] = part.token_ids
        if part.logprobs is not None:
            any_logprobs = True
            for index, value in zip(part.sampled.tolist(), part.logprobs, strict=True):
                logprobs[index] = value
    return Outcome(tokens, logprobs if any_logprobs else None)
