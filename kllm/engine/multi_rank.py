"""Runs plans on the processes of a layout's ranks."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from kllm.config import EngineConfig
from kllm.core import Outcome, Plan, Request
from kllm.engine import torchrun
from kllm.engine.executor import Sharing, merge, rearranged, sharing_of
from kllm.engine.memory import KVBudget
from kllm.engine.rank import DeviceMemory
from kllm.engine.rank_pool import RankPool, check_host_memory, launch
from kllm.engine.rank_protocol import Allocate, Build, Join, Release, Settle, Step
from kllm.engine.step import sampled_on, steps_of
from kllm.errors import CapacityError
from kllm.models.load import ResolvedModel, rank_bytes
from kllm.parallel.distributed import host_store
from kllm.parallel.layout import Place, place, rank_of

JOIN_TIMEOUT_S = 120.0
BUILD_TIMEOUT_S = 1800.0  # weights may come from a slow disk
_layouts = itertools.count()


@dataclass(slots=True)
class _Mirror:
    """What a sampling rank knows of the requests it samples."""

    outputs: dict[str, int] = field(default_factory=dict)  # id: output tokens it has seen
    last: tuple[Request, ...] = ()


class MultiRankExecutor:
    """Every rank of `config.parallel` in a process of its own.

    Args:
        pool: processes to use; None: torchrun's, or else processes are started, and ended by
            `close`.

    Raises:
        ConfigError, CapacityError, WorkerError: when the ranks cannot be set up.
    """

    def __init__(
        self, config: EngineConfig, resolved: ResolvedModel, pool: RankPool | None = None
    ) -> None:
        self._layout = layout = config.parallel
        _check_devices(config, resolved)
        if pool is None and torchrun.launched():
            pool = torchrun.pool()
        self._owns_pool = pool is None
        self._pool = launch(layout.world) if pool is None else pool
        if self._pool.world < layout.world:
            raise CapacityError(
                f"the layout has {layout.world} ranks and {self._pool.world} processes run; "
                "start more, or choose a smaller layout"
            )
        # Told outright, or each rank would choose by the memory it finds when it looks.
        config = replace(config, scale=resolved.scale, dtype=resolved.dtype)
        self._store, port = host_store(self._pool.host)
        at = (self._pool.host, port)
        join = Join(config, at, f"layout-{next(_layouts)}")
        self._pool.call([join] * layout.world, JOIN_TIMEOUT_S)
        budgets = self._pool.call([Build()] * layout.world, BUILD_TIMEOUT_S)
        self.sharing: Sharing = sharing_of(config, smallest(budgets))
        allocate = Allocate(self.sharing.budget, self.sharing.stripes, self.sharing.cp_kind)
        self._pool.call([allocate] * layout.world, BUILD_TIMEOUT_S)
        self._places = [place(layout, rank) for rank in range(layout.world)]
        self._samplers = {
            (dp, cp): rank_of(layout, Place(layout.pp - 1, dp, cp, 0))
            for dp in range(layout.dp)
            for cp in range(layout.cp)
        }
        self._mirrors = {at: _Mirror() for at in self._samplers}

    def execute(self, plans: Sequence[Plan | None]) -> list[Outcome | None]:
        """Run one step of every group."""
        stripes = self.sharing.stripes
        steps = steps_of(plans, self._layout, stripes)
        sampled = [_sampled(plan) for plan in plans]
        messages: dict[tuple[int, int], Step] = {}
        for dp, cp in self._samplers:
            mine = tuple(sampled[dp][i] for i in sampled_on(steps[dp], cp, stripes))
            messages[dp, cp] = Step(steps[dp], self._news((dp, cp), mine))
        silent = [Step(micro, ()) for micro in steps]
        samplers = set(self._samplers.values())
        answers = self._pool.call(
            [
                messages[at.dp, at.cp] if rank in samplers else silent[at.dp]
                for rank, at in enumerate(self._places)
            ]
        )
        outcomes: list[Outcome | None] = []
        for dp, plan in enumerate(plans):
            parts = [answers[self._samplers[dp, cp]] for cp in range(self._layout.cp)]
            outcomes.append(None if plan is None else merge(parts, len(sampled[dp])))
        return outcomes

    def arrange(self, pages: Sequence[int], *, kind: str, tokens: int) -> None:
        """Replace the KV pools by ones of random entries, for measuring prompts.

        Args:
            pages: of each context-parallel rank.
            tokens: a request holds at most.

        Raises:
            torch.OutOfMemoryError: when a device cannot hold it.
        """
        pools = [rearranged(self.sharing, count, kind, tokens) for count in pages]
        self.sharing = pools[0]
        messages = [Allocate(pool.budget, pool.stripes, kind, fill=True) for pool in pools]
        self._pool.call([messages[at.cp] for at in self._places], BUILD_TIMEOUT_S)

    def settle(self) -> list[DeviceMemory]:
        """Wait for the devices of all ranks; their memory since the last call."""
        return self._pool.call([Settle()] * self._layout.world)

    def _news(
        self, at: tuple[int, int], requests: tuple[Request, ...]
    ) -> tuple[Request | str, ...] | None:
        """What a sampling rank must be told of the requests of a step."""
        mirror = self._mirrors[at]
        seen = mirror.outputs
        news = tuple(
            request.id if seen.get(request.id) == len(request.output_ids) else request
            for request in requests
        )
        # The rank adds the token that it samples, and forgets who is not in this step.
        mirror.outputs = {request.id: len(request.output_ids) + 1 for request in requests}
        same = requests == mirror.last and all(isinstance(item, str) for item in news)
        mirror.last = requests
        return None if same else news

    def close(self) -> None:
        """Free the ranks' memory; end their processes if they were started for this executor."""
        if self._owns_pool:
            self._pool.close()
        elif self._pool.alive:
            self._pool.call([Release()] * self._layout.world)


def smallest(budgets: Sequence[KVBudget]) -> KVBudget:
    """The pool that every rank can hold: all ranks use the same page numbers."""
    return min(budgets, key=lambda budget: budget.num_pages)


def _sampled(plan: Plan | None) -> tuple[Request, ...]:
    if plan is None:
        return ()
    return tuple(r for r, yes in zip(plan.requests, plan.samples.tolist(), strict=True) if yes)


def _check_devices(config: EngineConfig, resolved: ResolvedModel) -> None:
    if torchrun.launched():
        return
    world = config.parallel.world
    if torch.device(resolved.device).type != "cuda":
        manifest = resolved.family.manifest(resolved.config)
        check_host_memory(world, rank_bytes(manifest, config.parallel, resolved.dtype))
        return
    count = torch.cuda.device_count()
    if count < world:
        raise CapacityError(
            f"the layout has {world} ranks and this machine {count} GPUs; run one rank of it with "
            "--fidelity rank-slice, or start it on several machines with torchrun"
        )
