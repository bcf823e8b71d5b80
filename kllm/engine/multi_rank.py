"""Runs plans on the processes of a layout's ranks."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from kllm.config import EngineConfig
from kllm.core import Outcome, Plan
from kllm.engine import torchrun
from kllm.engine.executor import Sharing, rearranged, sharing_of
from kllm.engine.memory import KVBudget
from kllm.engine.rank import DeviceMemory
from kllm.engine.rank_pool import RankPool, TimeLimit, launch
from kllm.engine.rank_protocol import Allocate, Build, Join, Release, Settle
from kllm.engine.rank_start import check_host_memory
from kllm.engine.rank_steps import RankSteps
from kllm.errors import CapacityError, ConfigError
from kllm.hardware import release_memory
from kllm.models.load import ResolvedModel, rank_bytes
from kllm.parallel.distributed import host_store
from kllm.parallel.layout import place

_NOT_SET_UP = ("were not set up", "check the link between them and the disk with the weights")
JOIN_LIMIT = TimeLimit(120.0, *_NOT_SET_UP)
BUILD_LIMIT = TimeLimit(1800.0, *_NOT_SET_UP)  # weights may come from a slow disk
RELEASE_LIMIT = TimeLimit(
    60.0,
    "did not leave their layout",
    "check the link between them; if ep_backend is deep_ep, try another",
)
_layouts = itertools.count()


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
        release_memory()  # the ranks' processes need what this one has left on their devices
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
        if self._pool.taken:
            raise ConfigError(
                "these ranks run another engine; close it, or start ranks for this one"
            )
        self._pool.taken = True
        try:
            self._set_up(config, resolved)
        except BaseException:
            self.close()
            raise

    def _set_up(self, config: EngineConfig, resolved: ResolvedModel) -> None:
        layout = config.parallel
        # Told outright, or each rank would choose by the memory it finds when it looks.
        config = replace(config, scale=resolved.scale, dtype=resolved.dtype)
        self._store, port = host_store(self._pool.host)
        at = (self._pool.host, port)
        join = Join(config, at, f"layout-{next(_layouts)}")
        self._pool.call([join] * layout.world, JOIN_LIMIT)
        budgets = self._pool.call([Build()] * layout.world, BUILD_LIMIT)
        self.sharing: Sharing = sharing_of(config, smallest(budgets))
        allocate = Allocate(self.sharing.budget, self.sharing.stripes, self.sharing.cp_kind)
        self._pool.call([allocate] * layout.world, BUILD_LIMIT)
        self._steps = RankSteps(self._pool, layout, self.sharing.stripes)

    def execute(self, plans: Sequence[Plan | None]) -> list[Outcome | None]:
        """Run one step of every group."""
        return self._steps.execute(plans)

    @property
    def run_s(self) -> float:
        """See `RankSteps.run_s`."""
        return self._steps.run_s

    def arrange(self, pages: Sequence[int], *, kind: str, tokens: int) -> None:
        """See `DeviceExecutor.arrange`."""
        pools = [rearranged(self.sharing, count, kind, tokens) for count in pages]
        self.sharing = pools[0]
        messages = [Allocate(pool.budget, pool.stripes, kind, fill=True) for pool in pools]
        places = [place(self._layout, rank) for rank in range(self._layout.world)]
        self._pool.call([messages[at.cp] for at in places], BUILD_LIMIT)
        self._steps = RankSteps(self._pool, self._layout, self.sharing.stripes)

    def settle(self) -> list[DeviceMemory]:
        """See `DeviceExecutor.settle`."""
        return self._pool.call([Settle()] * self._layout.world)

    def close(self) -> None:
        """Free the ranks' memory; end their processes if they were started for this executor."""
        if self._owns_pool:
            self._pool.close()
        elif self._pool.alive:
            self._pool.call([Release()] * self._layout.world, RELEASE_LIMIT)
        self._pool.taken = False


def smallest(budgets: Sequence[KVBudget]) -> KVBudget:
    """The pool that every rank can hold: all ranks use the same page numbers."""
    return min(budgets, key=lambda budget: budget.num_pages)


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
