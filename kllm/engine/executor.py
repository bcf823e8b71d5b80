"""Who runs the plans: the seam between one engine and one or many ranks.

An executor owns networks, KV memory and devices. The engine above it knows only plans and
outcomes, so ranks in this process, in others, torchrun's, or a slice of a layout take the same
place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kllm.config import EngineConfig
from kllm.core import Outcome, Plan
from kllm.engine.memory import KVBudget
from kllm.engine.rank import DeviceMemory, Rank
from kllm.engine.step import merge, steps_of
from kllm.models.base import CausalLM, Groups
from kllm.models.load import ResolvedModel
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
    """One rank in this process, which is the whole layout.

    Args:
        model: the network if it is already loaded; it outlives the executor.

    Raises:
        CapacityError: when the weights or the KV pool do not fit the device.
    """

    def __init__(
        self, config: EngineConfig, resolved: ResolvedModel, model: CausalLM | None = None
    ) -> None:
        device = torch.device(resolved.device)
        self._layout = config.parallel
        self._rank: Rank | None = Rank(
            config, resolved, Groups.single(), device=device, model=model
        )
        self.sharing = sharing_of(config, self._rank.budget)
        self._rank.allocate(self.sharing.budget, None, self.sharing.cp_kind)
        self.run_s = 0.0

    def execute(self, plans: Sequence[Plan | None]) -> list[Outcome | None]:
        """Run one step in this process."""
        assert self._rank is not None, "executor used after close"
        (plan,) = plans
        if plan is None:
            return [None]
        (micro,) = steps_of(plans, self._layout, None)
        requests = plan.sampled
        found = self._rank.run(micro, requests)
        self.run_s = found.run_s
        return [merge([found], len(requests))]

    def close(self) -> None:
        """Drop the KV pool; what the caller does not hold of the network goes too."""
        if self._rank is not None:
            self._rank.close()
        self._rank = None
