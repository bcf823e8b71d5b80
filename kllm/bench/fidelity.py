"""`kllm bench fidelity`: how far a rank-slice is from all ranks, and the model from a rank-slice.

For each layout the same engine, model and requests run on all ranks (`real`) and as one rank over
the link that was measured on this machine (`rank-slice`), taking turns where the memory holds
both. Without a second device the slice is compared with the cost model (`modelled`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kllm.bench.base import Context
from kllm.bench.fidelity_exchange import add_exchanges
from kllm.bench.fidelity_findings import (
    MODEL_OF_SLICE,
    SLICE_OF_REAL,
    Pair,
    add_errors,
    boundary,
    conditions,
    summary_of,
    verdict,
)
from kllm.bench.fidelity_model import LayoutModel
from kllm.bench.fidelity_rounds import (
    FAILURES,
    SHARE_OF_BOTH,
    WORKING_BYTES,
    Limit,
    Rounds,
    Run,
    Values,
)
from kllm.bench.fidelity_sides import UNITS, FidelityLoad, Ranks
from kllm.bench.fidelity_transfer import add_transfers, buffers_of
from kllm.bench.record import Record
from kllm.config import EngineConfig, ParallelConfig
from kllm.errors import ConfigError, one_line
from kllm.hardware import Ceilings, ceilings, release_memory
from kllm.models.devices import free_bytes
from kllm.models.load import largest_scale, resolve
from kllm.parallel import expert_deep_ep
from kllm.parallel.layout import short_name
from kllm.parallel.link import MEASURED, parse_link
from kllm.results.schema import Fidelity

LOAD = FidelityLoad(isl=8192, osl=32, requests=8)


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
        limit = Limit(self.limit_s)
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
            rounds = Rounds(ctx=ctx, load=self.load, ranks=ranks)
            for done, layout in enumerate(self._layouts):
                ctx.progress(short_name(layout), done, len(self._layouts))
                if limit.passed:
                    self._mark(record, layout, limit.cells)
                else:
                    self._layout(rounds, record, layout, found)
            if SLICE_OF_REAL in self.pairs:
                at = (len(self._layouts), len(self._layouts))
                add_exchanges(record, rounds, self.world, limit, at)
        if SLICE_OF_REAL in self.pairs:
            ctx.progress("transfers", len(self._layouts), len(self._layouts))
            buffers = buffers_of(resolved, self.load, self.world)
            if limit.passed:
                for what in buffers:
                    record.row("transfers", {"what": what, **limit.cells})
            else:
                assert found.links is not None
                add_transfers(record, kind, buffers, found.links.bytes_per_s)
        ctx.progress("done", len(self._layouts), len(self._layouts))

    def _mark(self, record: Record, layout: ParallelConfig, cells: Mapping[str, str]) -> None:
        """Rows of a layout that was not measured."""
        for pair in self.pairs:
            record.row(summary_of(pair), {"layout": short_name(layout), **cells})

    def _layout(
        self, rounds: Rounds, record: Record, layout: ParallelConfig, found: Ceilings
    ) -> None:
        """Run both sides of a layout and compare; a failure marks the layout."""
        wanted: list[Run] = ["real", "rank-slice"]
        if SLICE_OF_REAL not in self.pairs:
            wanted.remove("real")
        at = (self._layouts.index(layout), len(self._layouts))
        try:
            values, pool_tokens = rounds.compare(layout, wanted, short_name(layout), at)
            if MODEL_OF_SLICE in self.pairs:
                values["modelled"] = self._modelled(rounds.ctx, layout, found, pool_tokens)
        except FAILURES as error:
            self._mark(record, layout, {"state": "failed", "reason": one_line(error)})
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

    def _modelled(
        self, ctx: Context, layout: ParallelConfig, found: Ceilings, pool_tokens: int
    ) -> Values:
        resolved = resolve(replace(ctx.config, parallel=layout))
        link = parse_link(ctx.config.link, torch.device(resolved.device).type)
        model = LayoutModel(resolved=resolved, layout=layout, ceilings=found, link=link)
        values = model.values(self.load, ctx.config.scheduler.token_budget, pool_tokens)
        return {what: [value] for what, value in values.items()}

    def conclude(self, record: Record) -> None:
        """Name the layouts whose estimates are too far off."""
        record.verdict = " ".join(verdict(record, pair) for pair in self.pairs)
        record.boundary = boundary(record, self.pairs[0])
