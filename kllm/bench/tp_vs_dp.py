"""`kllm bench tp-vs-dp-attention`: attention cut by heads, or by requests; experts spread in both.

Three parts: KV capacity, computed and proven by filling a rank's pool; a sweep of requests in
flight and prompt length with the same arrivals on both layouts; request-DP under loads that are
skewed. Where the device holds both layouts they take turns, else one follows the other.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kllm.bench import tp_vs_dp_analysis as analysis
from kllm.bench import tp_vs_dp_capacity as published
from kllm.bench.base import Context, is_small
from kllm.bench.record import Record
from kllm.bench.tp_vs_dp_fill import UNITS as FILL_UNITS
from kllm.bench.tp_vs_dp_fill import fill
from kllm.bench.tp_vs_dp_loads import Mix, mixed
from kllm.bench.tp_vs_dp_serve import (
    SIDES,
    UNITS,
    Found,
    Placement,
    Point,
    Runner,
    Side,
    layout_of,
)
from kllm.bench.workloads import Workload
from kllm.config import EngineConfig
from kllm.engine.memory import page_size
from kllm.errors import ConfigError
from kllm.models.base import CausalLM
from kllm.models.load import resolve
from kllm.models.shape import model_shape
from kllm.parallel.layout import check

SMALL_FILL_BYTES = 32 << 20  # on a CPU: a pool of hundreds of pages, written in a second
EVEN = "even_by_tokens"
SKEW_UNITS = UNITS | {"ttft_change_pct": "%", "output_change_pct": "%"}
SWEEP_UNITS = {f"{side}_{name}": unit for side in SIDES for name, unit in UNITS.items()}
# Mix of lengths, and what the engine places requests by.
SKEWS: tuple[tuple[Mix, Placement], ...] = (
    ("even", "tokens"),
    ("periodic", "tokens"),
    ("periodic", "count"),
    ("giant", "tokens"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TpVsDpBench:
    """Sweep of requests in flight and prompt length over `world` ranks."""

    world: int
    in_flight: Sequence[int]
    isls: Sequence[int]  # prompt tokens
    osl: int  # output tokens
    skewed: int  # requests of the skewed loads
    step_tokens: int  # of the deployment; under request-DP each rank has its part of them
    limit_s: float = 0.0  # for the sweep of one layout; 0: none

    def __post_init__(self) -> None:
        if self.world < 2:
            raise ConfigError(f"two layouts need at least 2 ranks, got world {self.world}")
        for name, values in (("in-flight", self.in_flight), ("isl", self.isls)):
            if not values or min(values) < 1:
                raise ConfigError(f"--{name} takes numbers of 1 or more, got {list(values)}")
        if self.osl < 2:
            raise ConfigError(f"time per token needs at least 2 output tokens, got {self.osl}")
        if self.skewed < 2 * self.world:
            raise ConfigError(
                f"a skewed load needs 2 requests a rank, {2 * self.world} in all, got {self.skewed}"
            )

    @property
    def name(self) -> str:
        """As it is called on the command line."""
        return published.NAME

    def workload(self) -> Mapping[str, Any]:
        """Options that two comparable runs share."""
        return {
            "world": self.world,
            "in_flight": list(self.in_flight),
            "isl": list(self.isls),
            "osl": self.osl,
            "skewed": self.skewed,
            "step_tokens": self.step_tokens,
        }

    def measure(self, ctx: Context, record: Record) -> None:
        """Fill both layouts' pools, then run every load on both.

        Raises:
            ConfigError: when the model does not allow the layouts, or holds no request so long.
            CapacityError: when a layout does not fit the device.
        """
        ctx = replace(ctx, config=self._prepared(ctx.config))
        published.record_published(record, published.QUOTED)
        together = is_small(ctx.config.scale, resolve(ctx.config).device)
        record.notes += _notes(ctx.config, self.world, together=together)
        runner = Runner(
            ctx=ctx,
            record=record,
            found=Found(),
            points=self._points(ctx.seed),
            world=self.world,
            step_tokens=self.step_tokens,
            limit_s=self.limit_s,
        )
        turns: list[tuple[Side, ...]] = [SIDES] if together else [(side,) for side in SIDES]
        try:
            for sides in turns:
                runner.run({side: self._fill(ctx, record, side) for side in sides})
        finally:
            self._rows(record, runner.found, runner.points)
        if "filled" in record.rows and self._answers_capacity(ctx.config):
            tp, dp = (row["tokens"] for row in record.rows["filled"])
            record.add("kv_capacity_ratio", dp / tp, unit="x", direction="higher", sample="exact")
        ctx.progress("done", len(runner.points), len(runner.points))

    def _answers_capacity(self, config: EngineConfig) -> bool:
        """Whether the filled pools are sized by a device's memory, on as many as are claimed."""
        given = config.cache.memory_bytes > 0
        return config.fidelity == "rank-slice" and self.world == published.WORLD and not given

    def _prepared(self, config: EngineConfig) -> EngineConfig:
        """With the scale and, on a small device, the KV memory that both layouts get."""
        # Request-DP keeps more weights on a rank: what fits there fits both.
        resolved = resolve(replace(config, parallel=layout_of("dp", self.world)))
        dims = model_shape(resolved.family, resolved.config).dims
        for side in SIDES:
            check(dims, layout_of(side, self.world))
        longest = max(point.load.max_tokens for point in self._points(0))
        if longest > resolved.config.max_position_embeddings:
            raise ConfigError(
                f"the longest request of the loads has {longest} tokens and the model holds "
                f"{resolved.config.max_position_embeddings}; lower --isl, --osl or --skewed"
            )
        config = replace(config, scale=resolved.scale)
        if not config.cache.memory_bytes and is_small(resolved.scale, resolved.device):
            cache = replace(config.cache, memory_bytes=self._small_memory(config))
            config = replace(config, cache=cache)
        return config

    def _small_memory(self, config: EngineConfig) -> int:
        """KV memory that TP fills with half of the heaviest load, to show where it queues."""
        resolved = resolve(config)
        spec = resolved.family.cache_spec(resolved.config)
        page, rows = page_size(config, spec), max(*self.in_flight, self.skewed) + 1
        longest = max(point.load.max_tokens for point in self._points(0))
        heavy = math.ceil((max(self.isls) + self.osl) / page) * math.ceil(max(self.in_flight) / 2)
        pages = 1 + max(heavy, math.ceil(longest / page))
        kv_dtype = resolved.kv_dtype
        return math.ceil(
            pages * page * spec.bytes_per_token(kv_dtype)
            + rows * spec.bytes_per_request(kv_dtype, config.cache.rewind_tokens)
        )

    def _points(self, seed: int) -> list[Point]:
        """The sweep from light to heavy, then the skewed loads."""
        points = []
        for count in sorted(set(self.in_flight)):
            for isl in sorted(set(self.isls)):
                load = self._load("even", count, isl, seed)
                points.append(Point(f"isl{isl}.c{count}", load, isl=isl, in_flight=count))
        for mix, placement in SKEWS:
            load = self._load(mix, self.skewed, min(self.isls), seed)
            sides: tuple[Side, ...] = SIDES if placement == "tokens" else ("dp",)
            points.append(Point(f"{mix}_by_{placement}", load, placement, sides))
        return points

    def _load(self, mix: Mix, count: int, isl: int, seed: int) -> Workload:
        return mixed(mix, requests=count, isl=isl, osl=self.osl, ranks=self.world, seed=seed)

    def _fill(self, ctx: Context, record: Record, side: Side) -> CausalLM | None:
        """Fill a rank's pool; its network if a slice of the layout is to be run as well."""
        ctx.progress(f"fill {side}", 0, 0)
        config = replace(ctx.config, parallel=layout_of(side, self.world))
        if is_small(config.scale, resolve(config).device):
            memory = max(SMALL_FILL_BYTES, config.cache.memory_bytes)
            config = replace(config, cache=replace(config.cache, memory_bytes=memory))
        filled, model = fill(config)
        record.row("filled", filled.row(), FILL_UNITS)
        return model if config.fidelity == "rank-slice" else None

    def _rows(self, record: Record, found: Found, points: Sequence[Point]) -> None:
        """Both sides of every load side by side, and what follows from them."""
        for isl in sorted(set(self.isls)):
            rows = [self._row(found, point) for point in points if point.isl == isl]
            for row in rows:
                record.row(f"sweep:ISL {isl}", row, SWEEP_UNITS)
            for metric in analysis.COMPARED:
                measured = [row for row in rows if row["state"] == "ok"]
                for row in analysis.gain_rows(measured, metric):
                    units = {analysis.gain_column(metric): "%"}
                    record.row(f"gain:{metric} at ISL {isl}", row, units)
            if len(found.budgets) == len(SIDES):
                full = {f"{side}_full_from": self._full_from(found, side, isl) for side in SIDES}
                record.row("kv", {"prompt_tokens": isl, "output_tokens": self.osl, **full})
        for row in _skew_rows(found, points):
            record.row("skew", row, SKEW_UNITS)
        for change in _ttft_changes(found, points):
            record.add("ttft_mean_change_pct", change, unit="%", direction="lower")

    def _row(self, found: Found, point: Point) -> dict[str, Any]:
        row: dict[str, Any] = {"in_flight": point.in_flight}
        medians = {side: found.medians(side, point.key) or {} for side in SIDES}
        for name in UNITS:
            row |= {f"{side}_{name}": medians[side].get(name) for side in SIDES}
        full = (s for s in found.budgets if point.in_flight >= self._full_from(found, s, point.isl))
        row["kv_full"] = "+".join(full)
        row["state"] = found.state(point.key)
        if row["state"] != "ok":
            row["reason"] = found.failed.get(point.key) or _unfinished(found, point)
        return row

    def _full_from(self, found: Found, side: Side, isl: int) -> int:
        budget = found.budgets[side]
        return analysis.full_from(
            budget.num_tokens, layout_of(side, self.world).dp, budget.page_size, isl + self.osl
        )

    def conclude(self, record: Record) -> None:
        """Hold the numbers against the claim; say where each layout is the better one."""
        header = record.header
        ratios = published.ratios_of(record)
        published.record_ratios(record, ratios)
        filled = record.rows.get("filled", [])
        here = f"{header.model} ({header.scale}, {header.dtype}), {self.world} ranks"
        if "kv_capacity_ratio" in record.values:
            record.claims.append(published.CAPACITY_CLAIM)
            ratio = record.values["kv_capacity_ratio"][0]
            where = f"{here}, pools of this device"
            published.record_claim(
                record, published.CAPACITY_CLAIM, ratio, "rank-slice", where, header.scale
            )
        sentences = [published.sentence(ratios)]
        if len(filled) == len(SIDES):
            sentences.append(analysis.filled_sentence(filled))
        sweeps = {isl: record.ok_rows(f"sweep:ISL {isl}") for isl in sorted(set(self.isls))}
        if "ttft_mean_change_pct" in record.values:
            record.claims.append(published.TTFT_CLAIM)
            isl, row = max(
                ((isl, row) for isl, rows in sweeps.items() for row in rows),
                key=lambda found: (found[1]["in_flight"], found[0]),
            )
            change = record.metric("ttft_mean_change_pct").median
            assert change is not None
            where = f"{here}, {row['in_flight']} in flight, ISL {isl}, OSL {self.osl}"
            published.record_claim(
                record, published.TTFT_CLAIM, change, header.fidelity, where, header.scale
            )
            sentences.append(analysis.load_sentence(isl, row, change))
        record.verdict = " ".join(sentences)
        full = {row["prompt_tokens"]: row for row in record.rows.get("kv", [])}
        bounds = [
            analysis.boundary_sentence(isl, rows, full.get(isl))
            for isl, rows in sweeps.items()
            if rows
        ]
        record.boundary = " ".join(bounds) or None
        if skew := analysis.skew_sentence(record.rows.get("skew", [])):
            record.notes.append(skew)


def _unfinished(found: Found, point: Point) -> str:
    """What to say of a load that was to come, or that one layout only had run."""
    left = [side for side in SIDES if (side, point.key) not in found.served]
    which = "it" if len(left) == len(SIDES) else f"{left[0]} had run it"
    return f"the run ended before {which}"


def _skew_rows(found: Found, points: Sequence[Point]) -> Iterator[dict[str, Any]]:
    for side in SIDES:
        even = found.medians(side, EVEN)
        for point in points:
            values = found.medians(side, point.key)
            if point.in_flight or even is None or values is None:
                continue
            mix, _, placement = point.key.partition("_by_")
            yield {
                "layout": side,
                "lengths": mix,
                "placed_by": placement if side == "dp" else "",
                **values,
                "ttft_change_pct": analysis.change_pct(even["ttft_ms"], values["ttft_ms"]),
                "output_change_pct": analysis.change_pct(
                    even["output_tokens_per_s"], values["output_tokens_per_s"]
                ),
            }


def _ttft_changes(found: Found, points: Sequence[Point]) -> list[float]:
    """Of the heaviest load that ran on both layouts, one for each repeat."""
    both = [point for point in points if point.in_flight and found.both(point.key)]
    if not both:
        return []
    key = max(both, key=lambda point: (point.in_flight, point.isl)).key
    pairs = zip(found.served["tp", key], found.served["dp", key], strict=False)
    return [analysis.change_pct(tp.ttft_s, dp.ttft_s) for tp, dp in pairs]


def _notes(config: EngineConfig, world: int, *, together: bool) -> list[str]:
    notes = [
        published.OWN,
        "All requests of a load arrive at once on both layouts. Under request-DP every rank "
        f"prefills its own requests beside the others: {world} prompts at a time, each on one "
        "rank, where TP cuts each prompt's attention over all ranks, one prompt after the other. "
        "A step has the same number of tokens over the deployment in both.",
    ]
    if config.fidelity == "rank-slice":
        notes.append(
            f"rank-slice over {config.link}: one rank runs. Under request-DP every group schedules "
            "its own requests, and each step runs that of the group with the most tokens, for "
            "which the others wait in every exchange of tokens."
        )
    order = "took turns" if together else "ran one after the other, as memory holds one of them"
    notes.append(f"The layouts {order}.")
    if config.cache.memory_bytes:
        notes.append(
            f"KV memory was set to {config.cache.memory_bytes / 2**20:,.1f} MiB a rank for the "
            "loads, so the weights do not count in how many tokens fit."
        )
    return notes
