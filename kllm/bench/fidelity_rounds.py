"""Runs of the sides of `kllm bench fidelity`, which take turns where memory holds them together."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from kllm.bench.base import Context, warming_up
from kllm.bench.fidelity_sides import FidelityLoad, Ranks, Side
from kllm.bench.timing import interleave
from kllm.config import EngineConfig, ParallelConfig
from kllm.errors import CapacityError, KllmError
from kllm.hardware import release_memory
from kllm.models.devices import free_bytes
from kllm.models.load import rank_bytes, resolve
from kllm.results.schema import LEFT_OUT, Fidelity

WORKING_BYTES = 6 << 30  # of KV, activations and libraries beside the weights of one side
SHARE_OF_BOTH = 0.9  # of a device, when both sides lie on it
# What a layout may fail with, here or on its ranks; the others go on.
FAILURES = (KllmError, RuntimeError, MemoryError, AssertionError)

Values = Mapping[str, Sequence[float]]  # repeats by the names of fidelity_sides.UNITS
Run = Literal["real", "rank-slice"]  # the fidelities that run


@dataclass(frozen=True, slots=True)
class Limit:
    """Seconds after which nothing further is begun."""

    seconds: float  # 0: no limit
    begin_s: float = field(default_factory=time.monotonic)

    @property
    def passed(self) -> bool:
        """Whether they are over."""
        return bool(self.seconds) and time.monotonic() - self.begin_s > self.seconds

    @property
    def cells(self) -> dict[str, str]:
        """What the row of a point says that was not begun."""
        reason = f"not begun within {self.seconds:g} s; raise --limit for it"
        return {"state": LEFT_OUT, "reason": reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What all layouts of a bench are run with."""

    ctx: Context
    load: FidelityLoad
    ranks: Ranks

    def compare(
        self, layout: ParallelConfig, wanted: Sequence[Run], what: str, at: tuple[int, int]
    ) -> tuple[dict[Fidelity, Values], int]:
        """Sides in turns where the memory holds all of them, else one after the other.

        Args:
            what: to tell of it.
            at: points that are done, and points in all.

        Returns:
            The repeats of each side, and the tokens of the KV pool of the last.

        Raises:
            FAILURES: when a side cannot be set up or run.
        """
        if len(wanted) > 1 and holds_both(self.ctx.config, layout):
            with contextlib.suppress(CapacityError, torch.OutOfMemoryError):
                return self.run(layout, wanted, what, at)
            release_memory()  # they fit one after the other, perhaps
        values: dict[Fidelity, Values] = {}
        pool_tokens = 0
        for fidelity in wanted:
            found, pool_tokens = self.run(layout, [fidelity], what, at)
            values |= found
            release_memory()
        return values, pool_tokens

    def run(
        self, layout: ParallelConfig, wanted: Sequence[Run], what: str, at: tuple[int, int]
    ) -> tuple[dict[Fidelity, Values], int]:
        """As `compare`, of sides that lie in memory at the same time.

        Raises:
            FAILURES: as `compare`; CapacityError also where their KV pools differ.
        """
        ctx = self.ctx
        with self._open(layout, wanted) as sides:
            ctx.progress(warming_up(what), *at)
            for side in sides.values():
                side.warm_up(ctx.seed)
            ctx.progress(what, *at)
            runs = interleave(
                {name: _runner(side, ctx.seed) for name, side in sides.items()},
                repeats=ctx.repeats,
                warmup=0,
            )
            tokens = {side.pool_tokens for side in sides.values()}
            if len(tokens) > 1:
                raise CapacityError(f"beside each other the sides have KV pools of {tokens} tokens")
        values: dict[Fidelity, Values] = {
            name: {what: [run[what] for run in runs[name]] for what in runs[name][0]}
            for name in wanted
        }
        return values, tokens.pop()

    @contextlib.contextmanager
    def _open(self, layout: ParallelConfig, wanted: Sequence[Run]) -> Iterator[dict[str, Side]]:
        sides: dict[str, Side] = {}
        try:
            for fidelity in wanted:
                sides[fidelity] = Side(self.ctx.config, layout, fidelity, self.load, self.ranks)
            yield sides
        finally:
            for side in sides.values():
                side.close()


def holds_both(config: EngineConfig, layout: ParallelConfig) -> bool:
    """Whether a device has room for a rank and a slice of the same layout."""
    resolved = resolve(config)
    device = torch.device(resolved.device)
    if device.type == "cpu":
        return True
    tensors = resolved.family.manifest(resolved.config)
    side = rank_bytes(tensors, layout, resolved.dtype) + WORKING_BYTES
    return 2 * side <= SHARE_OF_BOTH * free_bytes(device)


def _runner(side: Side, seed: int) -> Callable[[], Mapping[str, float]]:
    seeds = itertools.count(seed + 1)  # both sides have the same prompts in a round
    return lambda: side.run(next(seeds))
