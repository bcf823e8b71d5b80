"""`kllm bench expert-balance`: experts placed by measured routing, and copies of the busiest.

The placement comes from the first half of a trace and is judged on the second: a prediction, as
in service, and not a fit. Beside the balance stands what copies cost: weights on every rank, and
the KV that no longer fits. A placement ages: it is judged once more on traffic in which some
experts have changed their popularity.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kllm.bench.base import Context
from kllm.bench.expert_balance_findings import boundary, verdict
from kllm.bench.expert_balance_load import Balance, Judged, drifts, judge
from kllm.bench.expert_balance_trace import Trace, Zipf, counted_engine
from kllm.bench.record import Record
from kllm.bench.workloads import Workload
from kllm.config import ParallelConfig
from kllm.errors import ConfigError
from kllm.models.load import resolve
from kllm.models.shape import model_shape
from kllm.parallel.expert_counts import ROUTING, routing_rows
from kllm.parallel.footprint import STORED, Capacity, ModelShape, capacity
from kllm.parallel.gpus import GPUS
from kllm.parallel.layout import check, short_name

MEMORY_FRACTION, KV_DTYPE = 0.9, "fp8"  # as `kllm models` has them
BALANCE = "x"  # times the mean load: max/mean
UNITS = {
    "in_order": BALANCE,
    "placed": BALANCE,
    "worst_layer": BALANCE,
    "in_order_by_step": BALANCE,
    "placed_by_step": BALANCE,
    "added_mib": "MiB of weights a rank",
    "kv_mtokens": "million tokens of KV",
}
Found = Mapping[int, Sequence[Judged]]  # by number of redundant experts, one a repeat
Columns = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBalanceBench:
    """Placements on `ep` ranks with each number of redundant experts.

    Args:
        trace: where the routing comes from: a workload that is run and counted, or Zipf's law.
        gpu: for which capacities are computed, a key of GPUS.
    """

    ep: int
    redundant: Sequence[int]
    trace: Workload | Zipf
    gpu: str = "h200"

    def __post_init__(self) -> None:
        if self.ep < 2:
            raise ConfigError(f"experts are spread over 2 ranks or more, got ep {self.ep}")
        if not self.redundant or list(self.redundant) != sorted(set(self.redundant)):
            raise ConfigError(
                f"--redundant takes rising numbers as in 0,8,16, got {list(self.redundant)}"
            )
        _ = GPUS[self.gpu]  # an unknown one is refused before anything runs

    @property
    def name(self) -> str:
        """As it is called on the command line."""
        return "expert-balance"

    @property
    def fidelity(self) -> str:
        """Of the loads, whatever the routing is: no rank of the layout runs."""
        return "modelled"

    def workload(self) -> Mapping[str, Any]:
        """Options that two comparable runs share."""
        trace = str(self.trace) if isinstance(self.trace, Zipf) else self.trace.to_dict()
        return {"ep": self.ep, "redundant": list(self.redundant), "trace": trace}

    def measure(self, ctx: Context, record: Record) -> None:
        """Make a trace `ctx.repeats` times; place by its first half, judge on its second.

        Raises:
            ConfigError: the model has no experts, they do not suit the ranks, or a trace is
                too short.
            CapacityError: the model does not fit the device.
        """
        resolved = resolve(ctx.config)
        shape = model_shape(resolved.family, resolved.config)
        for redundant in self.redundant:
            check(shape.dims, self._layout(redundant))
        traces: list[Trace] = []
        found: dict[int, list[Judged]] = {redundant: [] for redundant in self.redundant}
        for trace in self._traces(ctx, shape):
            traces.append(trace)
            for redundant, judged in found.items():
                judged.append(judge(trace, redundant, self.ep))
                for kind in ("in_order", "placed"):
                    value = getattr(judged[-1], kind).whole
                    metric = f"{kind}.redundant{redundant}"
                    record.add(metric, value, unit=BALANCE, direction="lower")
        self._trace(record, traces, shape.experts_per_token)
        self._sweep(record, found, shape)
        self._drift(record, found, shape.dims.experts)
        self._layers(record, found, traces[0].layers)
        if not isinstance(self.trace, Zipf):
            _add_counts(record, traces)
        record.notes += self._notes(record.rows["trace"][0], resolved.weights is None)

    def conclude(self, record: Record) -> None:
        """What is gained, from where on nothing more is, and how quickly it is lost again."""
        rows = record.rows.get("sweep", [])
        if not rows:
            record.verdict = "The run ended before there was a trace of every repeat."
            return
        record.verdict = verdict(rows, self.ep)
        record.boundary = boundary(rows, record.rows["sweep:drift"])

    def _layout(self, redundant: int) -> ParallelConfig:
        return ParallelConfig(dp=self.ep, ep=self.ep, redundant_experts=redundant)

    def _traces(self, ctx: Context, shape: ModelShape) -> Iterator[Trace]:
        """One a repeat."""
        source = self.trace
        if isinstance(source, Zipf):
            for seed in _seeds(ctx):
                yield source.draw(shape.dims.experts, shape.experts_per_token, seed)
            return
        with counted_engine(ctx, source) as counted:
            for seed in _seeds(ctx):
                yield counted.run(replace(source, seed=seed))

    def _sweep(self, record: Record, found: Found, shape: ModelShape) -> None:
        """Balance and cost by the number of redundant experts."""
        base = self._capacity(shape, self.redundant[0])
        for redundant, judged in found.items():
            held = self._capacity(shape, redundant)
            added = held.heaviest.weight_bytes - base.heaviest.weight_bytes
            row: dict[str, Any] = {"redundant": redundant}
            for kind in ("in_order", "placed"):
                metric = record.metric(f"{kind}.redundant{redundant}")
                row[kind] = metric.median
                if metric.ci95:
                    row |= {f"{kind}_lo": metric.ci95[0], f"{kind}_hi": metric.ci95[1]}
            if len(judged[0].placed.layers) > 1:
                row["worst_layer"] = statistics.median(max(j.placed.layers) for j in judged)
            row |= {
                "in_order_by_step": statistics.median(j.in_order.by_step for j in judged),
                "placed_by_step": statistics.median(j.placed.by_step for j in judged),
                "added_mib": added / 2**20,
                "kv_mtokens": held.tokens / 1e6,
                "fidelity": self.fidelity,
            }
            record.row("sweep", row, UNITS)

    def _capacity(self, shape: ModelShape, redundant: int) -> Capacity:
        return capacity(
            shape,
            self._layout(redundant),
            memory_bytes=GPUS[self.gpu].memory_bytes,
            fraction=MEMORY_FRACTION,
            dtype=STORED,
            kv_dtype=KV_DTYPE,
        )

    def _drift(self, record: Record, found: Found, experts: int) -> None:
        """Balance by the share of experts whose popularity has changed."""
        shares = [round(100 * moved / experts) for moved in drifts(experts)]
        columns: Columns = {
            "moved_pct": shares,
            **self._beside(found, lambda balance: balance.drift),
        }
        _add_rows(record, "sweep:drift", columns, {"moved_pct": "%"})

    def _layers(self, record: Record, found: Found, layers: Sequence[int]) -> None:
        """Balance of each layer, where there are several."""
        columns: Columns = {"layer": layers, **self._beside(found, lambda balance: balance.layers)}
        if len(layers) > 1:
            _add_rows(record, "sweep:layers", columns, {"layer": ""})

    def _beside(
        self, found: Found, values: Callable[[Balance], Sequence[float]]
    ) -> dict[str, list[float]]:
        """A column for each placement: in order with the fewest copies, and the placed ones."""
        columns = {"in_order": _medians(values(j.in_order) for j in found[self.redundant[0]])}
        for redundant, judged in found.items():
            columns[f"placed_{redundant}"] = _medians(values(j.placed) for j in judged)
        return columns

    def _trace(self, record: Record, traces: Sequence[Trace], top_k: int) -> None:
        """What was counted or drawn."""
        drawn = isinstance(self.trace, Zipf)
        busiest = (float(t.totals().max() / t.totals().mean()) for t in traces)
        row = {
            "trace": str(self.trace) if drawn else "real",
            "fidelity": "modelled" if drawn else "real",
            "repeats": len(traces),
            "steps": len(traces[0].counts),
            "choices": int(traces[0].counts.sum()),
            "layers": len(traces[0].layers),
            "experts": traces[0].num_experts,
            "experts_per_token": top_k,
            "busiest_over_mean": statistics.median(busiest),
        }
        record.row("trace", row)

    def _notes(self, trace: Mapping[str, Any], random: bool) -> list[str]:
        name = short_name(self._layout(0))
        notes = [
            "Loads are computed from the choices of the second half of a trace, shared evenly by "
            f"the copies of an expert; none of the {self.ep} ranks ran. A single step is less "
            "even, because its few tokens are a sample of the popularity.",
            f"Weights and KV capacity are computed for {name} on {self.gpu}: weights as released, "
            f"{KV_DTYPE} KV, {MEMORY_FRACTION:.0%} of memory.",
            "Drift: the popularity of random experts of each layer is passed round among them.",
        ]
        if isinstance(self.trace, Zipf):
            return [
                *notes,
                f"No model ran: a layer's experts are chosen by Zipf's law with exponent "
                f"{self.trace.exponent:g}, in steps of {self.trace.step_tokens} tokens.",
            ]
        notes.append(
            "Choices were counted in a run on one rank, with prompts of random token ids: "
            "those of real text favour other experts. `--expert-placement` of a layout takes "
            "this result and places experts by the choices of all repeats."
        )
        if random:
            notes.append(
                "The weights are random: no expert was trained to be popular, and the busiest is "
                f"chosen {trace['busiest_over_mean']:.2f} times as often as the mean by accident. "
                "It says nothing about the trained model."
            )
        return notes


def _seeds(ctx: Context) -> Iterator[int]:
    for repeat in range(ctx.repeats):
        ctx.progress(f"trace {repeat + 1}", repeat, ctx.repeats)
        yield ctx.seed + repeat
    ctx.progress("done", ctx.repeats, ctx.repeats)


def _add_counts(record: Record, traces: Sequence[Trace]) -> None:
    """The counts of all traces, which ranks can place experts by."""
    total = np.sum([trace.totals() for trace in traces], axis=0)
    counts = dict(zip(traces[0].layers, total.tolist(), strict=True))
    record.details(ROUTING, list(routing_rows(counts)))


def _add_rows(record: Record, series: str, columns: Columns, units: Mapping[str, str]) -> None:
    for cells in zip(*columns.values(), strict=True):
        row = dict(zip(columns, cells, strict=True))
        record.row(series, row, dict.fromkeys(columns, BALANCE) | dict(units))


def _medians(repeats: Iterator[Sequence[float]]) -> list[float]:
    return [statistics.median(values) for values in zip(*repeats, strict=True)]
