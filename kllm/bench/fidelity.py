"""`kllm bench fidelity`: how far a rank-slice is from all ranks, and the model from a rank-slice.

For each layout the same engine, model and requests run on all ranks (`real`) and as one rank over
the link that was measured on this machine (`rank-slice`), taking turns where the memory holds
both. Without a second device the slice is compared with the cost model (`modelled`).
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from kllm.bench.base import Context, warming_up
from kllm.bench.fidelity_findings import (
    MODEL_OF_SLICE,
    SLICE_OF_REAL,
    Pair,
    Values,
    add_errors,
    boundary,
    conditions,
    series_of,
    verdict,
)
from kllm.bench.fidelity_model import LayoutModel
from kllm.bench.fidelity_sides import UNITS, FidelityLoad, Ranks, Side
from kllm.bench.fidelity_transfer import add_transfers
from kllm.bench.record import Record
from kllm.bench.timing import interleave
from kllm.config import EngineConfig, ParallelConfig
from kllm.errors import CapacityError, ConfigError, KllmError, one_line
from kllm.hardware import Ceilings, ceilings, release_memory
from kllm.models.devices import free_bytes
from kllm.models.load import ResolvedModel, largest_scale, rank_bytes, resolve
from kllm.parallel import expert_deep_ep
from kllm.parallel.layout import short_name
from kllm.parallel.link import MEASURED, parse_link
from kllm.parallel.single import SingleComm
from kllm.results.schema import Fidelity

WORKING_BYTES = 6 << 30  # of KV, activations and libraries beside the weights of one side
SHARE_OF_BOTH = 0.9  # of a device, when both sides lie on it
# What a layout may fail with, here or on its ranks; the others go on.
FAILURES = (KllmError, RuntimeError, MemoryError, AssertionError)
LOAD = FidelityLoad(isl=8192, osl=32, requests=8)
EXPERT_BACKENDS = ("deep_ep", "all_to_all", "all_gather")


def layouts_of(world: int) -> tuple[ParallelConfig, ...]:
    """Each kind of parallelism over all ranks, with exchanges that a slice has too."""
    backend = "all_gather" if expert_deep_ep.installed() else "auto"  # DeepEP needs all ranks
    return (
        ParallelConfig(tp=world),
        ParallelConfig(dp=world, ep=world, ep_backend=backend),
        ParallelConfig(cp=world, cp_kind="ring"),
        ParallelConfig(cp=world, cp_kind="all_gather"),
        ParallelConfig(pp=world),
    )


def pairs_for(device: str, world: int) -> tuple[Pair, ...]:
    """What can be compared on this machine."""
    if not device.startswith("cuda"):
        return (SLICE_OF_REAL, MODEL_OF_SLICE)
    return (SLICE_OF_REAL,) if torch.cuda.device_count() >= world else (MODEL_OF_SLICE,)


def default_load(small: bool) -> tuple[FidelityLoad, int]:
    """Requests and the tokens of a step: seconds for a run, prompts of several chunks."""
    if small:
        return FidelityLoad(isl=64, osl=16, requests=4), 64
    return LOAD, 4096


def scale_for_both(config: EngineConfig) -> str:
    """The largest scale whose whole weights fit a device twice, for `auto` on a GPU."""
    resolved = resolve(config)
    device = torch.device(resolved.device)
    if config.scale != "auto" or resolved.weights is not None:
        return config.scale
    if device.type == "cpu":
        return "tiny"
    full = resolve(replace(config, scale="full"))
    budget = SHARE_OF_BOTH * free_bytes(device) / 2 - WORKING_BYTES
    return largest_scale(full.family, full.config, ParallelConfig(), full.dtype, budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityBench:
    """Layouts of `world` ranks, one after the other."""

    world: int = 2
    layouts: Sequence[ParallelConfig] = ()  # empty: one of each kind
    pairs: Sequence[Pair] = (SLICE_OF_REAL,)
    load: FidelityLoad = LOAD
    limit_s: float = 0.0  # begin nothing further after this; 0: no limit

    def __post_init__(self) -> None:
        if self.world < 2:
            raise ConfigError(f"fidelity compares layouts of 2 ranks or more, got {self.world}")
        if not self.pairs:
            raise ConfigError("fidelity needs a pair of fidelities to compare")
        if self.load.osl < 2 or self.load.isl < 1 or self.load.requests < 1:
            raise ConfigError(
                "fidelity needs requests of at least 1 prompt and 2 output tokens, got "
                f"{self.load.requests} of {self.load.isl}:{self.load.osl}"
            )

    @property
    def name(self) -> str:
        """As it is called on the command line."""
        return "fidelity"

    @property
    def fidelity(self) -> Fidelity:
        """The weakest of the fidelities in the result; metrics and rows name their own."""
        return "modelled" if MODEL_OF_SLICE in self.pairs else "rank-slice"

    def workload(self) -> Mapping[str, Any]:
        """Options that two comparable runs share."""
        return {
            "world": self.world,
            "isl": self.load.isl,
            "osl": self.load.osl,
            "requests": self.load.requests,
            "layouts": [short_name(layout) for layout in self._layouts],
            "pairs": [f"{estimate} of {truth}" for estimate, truth in self.pairs],
        }

    @property
    def _layouts(self) -> tuple[ParallelConfig, ...]:
        return tuple(self.layouts) or layouts_of(self.world)

    def measure(self, ctx: Context, record: Record) -> None:
        """Compare every layout, then what only two devices can show."""
        begin_s = time.monotonic()
        if SLICE_OF_REAL in self.pairs:
            ctx = replace(ctx, config=replace(ctx.config, link=MEASURED))
        resolved = resolve(ctx.config)
        self.load.check(resolved.config.max_position_embeddings)
        kind = torch.device(resolved.device).type
        ctx.progress("link", 0, len(self._layouts))
        # One GPU has no link to measure: its slices use the one that the config names.
        found = ceilings(resolved.device, links=SLICE_OF_REAL in self.pairs)
        record.notes += conditions(ctx.config.link, found, kind, self.pairs)
        if expert_deep_ep.installed() and not self.layouts:
            record.notes.append(
                "Both sides exchange experts' tokens by all_gather: DeepEP, which is installed, "
                "needs all ranks."
            )
        with Ranks(self.world) as ranks:
            for done, layout in enumerate(self._layouts):
                ctx.progress(short_name(layout), done, len(self._layouts))
                if self._late(begin_s):
                    self._failed(record, layout, f"not begun within {self.limit_s:.0f} s")
                    continue
                self._layout(ctx, record, layout, found, ranks)
            if SLICE_OF_REAL in self.pairs:
                self._expert_backends(ctx, record, ranks, begin_s)
        if SLICE_OF_REAL in self.pairs and not self._late(begin_s):
            ctx.progress("transfers", len(self._layouts), len(self._layouts))
            self._transfers(record, resolved, found, kind)
        ctx.progress("done", len(self._layouts), len(self._layouts))

    def _late(self, begin_s: float) -> bool:
        return bool(self.limit_s) and time.monotonic() - begin_s > self.limit_s

    def _failed(self, record: Record, layout: ParallelConfig, reason: str) -> None:
        for pair in self.pairs:
            row = {"layout": short_name(layout), "state": "failed", "reason": reason}
            record.row(series_of(pair), row)

    def _layout(
        self,
        ctx: Context,
        record: Record,
        layout: ParallelConfig,
        found: Ceilings,
        ranks: Ranks,
    ) -> None:
        """Run both sides of a layout and compare; a failure marks the layout."""
        try:
            values, pool_tokens = self._sides(ctx, layout, ranks)
            if MODEL_OF_SLICE in self.pairs:
                values["modelled"] = self._modelled(ctx, layout, found, pool_tokens)
        except FAILURES as error:
            self._failed(record, layout, one_line(error))
            return
        finally:
            release_memory()
        name = short_name(layout).replace(" ", "-")
        for fidelity, series in values.items():
            for what, repeats in series.items():
                higher = what == "output_tokens_per_s"
                for value in repeats:
                    record.add(
                        f"{what}.{name}.{fidelity}",
                        value,
                        unit=UNITS[what],
                        direction="higher" if higher else "lower",
                        sample="exact" if fidelity == "modelled" else "repeat",
                    )
        for pair in self.pairs:
            add_errors(record, layout, pair, values)

    def _sides(
        self, ctx: Context, layout: ParallelConfig, ranks: Ranks
    ) -> tuple[dict[Fidelity, Values], int]:
        """Repeats of each side that runs, and the tokens of the slice's KV pool."""
        wanted: list[Literal["real", "rank-slice"]] = ["rank-slice"]
        if SLICE_OF_REAL in self.pairs:
            wanted.insert(0, "real")
        if len(wanted) == 2 and holds_both(ctx.config, layout):
            with contextlib.suppress(CapacityError, torch.OutOfMemoryError):
                return self._run(ctx, layout, wanted, ranks)
            release_memory()  # they fit one after the other, perhaps
        values: dict[Fidelity, Values] = {}
        pool_tokens = 0
        for fidelity in wanted:
            found, pool_tokens = self._run(ctx, layout, [fidelity], ranks)
            values |= found
            release_memory()
        return values, pool_tokens

    def _run(
        self,
        ctx: Context,
        layout: ParallelConfig,
        wanted: Sequence[Literal["real", "rank-slice"]],
        ranks: Ranks,
        what: str = "",
    ) -> tuple[dict[Fidelity, Values], int]:
        """Sides that lie in memory at the same time, taking turns.

        Args:
            what: to tell of it once all layouts are done; empty: the layout.
        """
        count = len(self._layouts)
        at = (count if what else self._layouts.index(layout), count)
        what = what or short_name(layout)
        with _open(ctx.config, layout, wanted, self.load, ranks) as sides:
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

    def _modelled(
        self, ctx: Context, layout: ParallelConfig, found: Ceilings, pool_tokens: int
    ) -> Values:
        resolved = resolve(replace(ctx.config, parallel=layout))
        link = parse_link(ctx.config.link, torch.device(resolved.device).type)
        model = LayoutModel(resolved=resolved, layout=layout, ceilings=found, link=link)
        values = model.values(self.load, ctx.config.scheduler.token_budget, pool_tokens)
        return {what: [value] for what, value in values.items()}

    def _expert_backends(self, ctx: Context, record: Record, ranks: Ranks, begin_s: float) -> None:
        """Time DeepEP against the other exchanges where it loads; else note why it does not."""
        resolved = resolve(ctx.config)
        width: int = resolved.config.hidden_size
        why = None
        if not expert_deep_ep.installed() or not resolved.device.startswith("cuda"):
            device, dtype = torch.device(resolved.device), getattr(torch, resolved.dtype)
            why = expert_deep_ep.problem(SingleComm(), width, 1, device, dtype)
        if why is not None:
            record.notes.append(f"DeepEP was not measured: {why}.")
            return
        for backend in EXPERT_BACKENDS:
            if self._late(begin_s):
                return
            layout = ParallelConfig(dp=self.world, ep=self.world, ep_backend=backend)
            row: dict[str, Any] = {"backend": backend, "fidelity": "real"}
            try:
                values, _ = self._run(ctx, layout, ["real"], ranks, f"experts by {backend}")
            except FAILURES as error:
                record.row("expert exchange", row | {"state": "failed", "reason": one_line(error)})
                continue
            for what, repeats in values["real"].items():
                row[what] = statistics.median(repeats)
            record.row("expert exchange", row | {"state": "ok"}, UNITS)

    def _transfers(
        self, record: Record, resolved: ResolvedModel, found: Ceilings, kind: str
    ) -> None:
        """Move a request's KV and a rank's weights from one process to another."""
        spec = resolved.family.cache_spec(resolved.config)
        tokens = self.load.isl + self.load.osl
        entries = spec.bytes_per_token(resolved.kv_dtype) * tokens
        tensors = resolved.family.manifest(resolved.config)
        sizes = {
            "a request's KV": int(entries + spec.bytes_per_request(resolved.kv_dtype, 0)),
            "a rank's weights": rank_bytes(tensors, ParallelConfig(tp=self.world), resolved.dtype),
        }
        assert found.links is not None
        add_transfers(record, kind, sizes, found.links.bytes_per_s)

    def conclude(self, record: Record) -> None:
        """Name the layouts whose estimates are too far off."""
        record.verdict = " ".join(verdict(record, pair) for pair in self.pairs)
        record.boundary = boundary(record, self.pairs[0])


def holds_both(config: EngineConfig, layout: ParallelConfig) -> bool:
    """Whether a device has room for a rank and a slice of the same layout."""
    resolved = resolve(config)
    device = torch.device(resolved.device)
    if device.type == "cpu":
        return True
    tensors = resolved.family.manifest(resolved.config)
    side = rank_bytes(tensors, layout, resolved.dtype) + WORKING_BYTES
    return 2 * side <= SHARE_OF_BOTH * free_bytes(device)


@contextlib.contextmanager
def _open(
    config: EngineConfig,
    layout: ParallelConfig,
    wanted: Sequence[Literal["real", "rank-slice"]],
    load: FidelityLoad,
    ranks: Ranks,
) -> Iterator[dict[str, Side]]:
    sides: dict[str, Side] = {}
    try:
        for fidelity in wanted:
            sides[fidelity] = Side(config, layout, fidelity, load, ranks)
        yield sides
    finally:
        for side in sides.values():
            side.close()


def _runner(side: Side, seed: int) -> Callable[[], Mapping[str, float]]:
    seeds = iter(range(seed + 1, seed + 1_000_000))  # both sides have the same prompts in a round
    return lambda: side.run(next(seeds))
