"""The published KV capacities of attention TP and request-DP, recomputed. Fidelity: modelled.

The figures are those of GLM-5.2 with FP8 weights and FP8 KV on eight devices, without its MTP
layer. What matters is which weights request-DP makes every rank keep whole: each of them costs KV
on every device.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from kllm.bench.record import Record, Subject
from kllm.config import ParallelConfig
from kllm.models.load import read_family_config
from kllm.models.shape import model_shape
from kllm.parallel.footprint import STORED, ModelShape, capacity
from kllm.parallel.gpus import GPUS
from kllm.results.claims import claim_of, status_of
from kllm.results.schema import RunResult

NAME = "tp-vs-dp-attention"
CAPACITY_CLAIM = f"{NAME}/kv_capacity_ratio"
TTFT_CLAIM = f"{NAME}/ttft_mean_change_pct"
MODEL = "glm-5.2"
WORLD = 8
TP = ParallelConfig(tp=WORLD, ep=WORLD)
DP = ParallelConfig(dp=WORLD, ep=WORLD)
UNITS = {
    "memory_gb": "GB",
    "weights_gb": "GB",
    "pool_gb": "GB",
    "computed_mtokens": "million tokens",
    "published_mtokens": "million tokens",
}
OWN = (
    "kLLM under request-DP keeps everything but the routed experts whole on each rank, where the "
    "published figures spread the vocabulary tables over the stage: its own layout is the rows "
    "that spread nothing."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One published capacity and its conditions."""

    device: str
    memory_bytes: float
    fraction: float  # of memory for weights and KV
    layout: ParallelConfig
    kv_dtype: str
    spread: tuple[str, ...]  # parts of a request-DP rank that are cut over the whole stage
    mtokens: float | None  # millions of tokens; None: not published

    def computed(self, shape: ModelShape) -> dict[str, Any]:
        """The row of the table."""
        found = capacity(
            shape,
            self.layout,
            memory_bytes=self.memory_bytes,
            fraction=self.fraction,
            dtype=STORED,
            kv_dtype=self.kv_dtype,
            stage_wide=frozenset(self.spread),
        )
        weights = found.heaviest.weight_bytes
        return {
            "device": self.device,
            "fraction": self.fraction,
            "kv_dtype": self.kv_dtype,
            "attention": "tp" if self.layout.tp > 1 else "dp",
            "spread": "+".join(self.spread) or ("" if self.layout.tp > 1 else "nothing (kLLM)"),
            "weights_gb": weights / 1e9,
            "pool_gb": (found.budget_bytes - weights) / 1e9,
            "computed_mtokens": found.tokens / 1e6,
            "published_mtokens": self.mtokens,
            "fidelity": "modelled",
        }


# GLM-5.2 on 8 x 288 GB, 251.1 GB of each for weights and KV: the conditions that give the claim.
CLAIMED = Published(
    device="288 GB",
    memory_bytes=288e9,
    fraction=0.872,
    layout=TP,
    kv_dtype="fp8",
    spread=(),
    mtokens=2.90,
)
# Share of memory; TP with FP8 and bfloat16 KV; request-DP with FP8 KV by what is spread.
_H200 = (
    (0.85, 0.47, 0.26, 2.23, 1.77, 1.28),
    (0.90, 0.60, 0.34, 3.27, 2.81, 2.32),
    (0.95, 0.73, 0.41, 4.32, 3.86, 3.37),
    (1.00, 0.86, 0.49, 5.36, 4.91, 4.41),
)
_H200_COLUMNS: tuple[tuple[ParallelConfig, str, tuple[str, ...]], ...] = (
    (TP, "fp8", ()),
    (TP, "bfloat16", ()),
    (DP, "fp8", ("ffn", "vocab")),
    (DP, "fp8", ("vocab",)),
    (DP, "fp8", ()),
)
H200_FRACTION, H200_SPREAD = 0.90, ("vocab",)  # the row to quote for one H200 node
QUOTED = (CLAIMED.fraction, H200_FRACTION)


def published() -> Iterator[Published]:
    """Every published capacity, and kLLM's own layout beside the claim's."""
    yield CLAIMED
    yield replace(CLAIMED, layout=DP, spread=("vocab",), mtokens=21.24)
    yield replace(CLAIMED, layout=DP, mtokens=None)
    for fraction, *row in _H200:
        for (layout, kv_dtype, spread), mtokens in zip(_H200_COLUMNS, row, strict=True):
            yield Published(
                device="H200",
                memory_bytes=GPUS["h200"].memory_bytes,
                fraction=fraction,
                layout=layout,
                kv_dtype=kv_dtype,
                spread=spread,
                mtokens=mtokens,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Tokens under TP and under request-DP in the same conditions."""

    conditions: str
    tp_mtokens: float
    dp_mtokens: float

    @property
    def value(self) -> float:
        """How many times more tokens request-DP holds."""
        return self.dp_mtokens / self.tp_mtokens


def record_published(record: Record, fractions: Collection[float] = ()) -> None:
    """Add the series "published": all of it, or what has one of these shares of memory."""
    for figure in published():
        if not fractions or figure.fraction in fractions:
            record.row("published", figure.computed(_shape()), UNITS)


@cache
def _shape() -> ModelShape:
    _, family, config = read_family_config(MODEL)
    return model_shape(family, config)


def ratios_of(record: Record) -> list[Ratio]:
    """The ratio that answers to the claim, and that of an H200 node."""
    rows = record.rows["published"]
    return [
        _ratio(rows, "288 GB", CLAIMED.fraction),
        _ratio(rows, "H200", H200_FRACTION),
    ]


def _ratio(rows: list[dict[str, Any]], device: str, fraction: float) -> Ratio:
    tp, dp = (
        next(
            row["computed_mtokens"]
            for row in rows
            if (row["device"], row["fraction"], row["kv_dtype"]) == (device, fraction, "fp8")
            and row["attention"] == attention
            and row["spread"] == spread
        )
        for attention, spread in (("tp", ""), ("dp", "+".join(H200_SPREAD)))
    )
    return Ratio(
        conditions=f"{MODEL}, {WORLD} x {device}, {fraction:.3g} of memory, FP8 weights and KV",
        tp_mtokens=tp,
        dp_mtokens=dp,
    )


def record_claim(
    record: Record,
    claim_id: str,
    measured: float,
    fidelity: str,
    conditions: str,
    scale: str,
) -> None:
    """Add a row to the series "claims".

    Args:
        conditions: what was measured or computed, in words.
        scale: of the model.
    """
    about = claim_of(claim_id)
    record.row(
        "claims",
        {
            "claim": about.statement,
            "published": about.published,
            "measured": measured,
            "unit": about.unit,
            "fidelity": fidelity,
            "conditions": conditions,
            "status": status_of(about, measured, scale),
        },
    )


def record_ratios(record: Record, ratios: list[Ratio]) -> None:
    """Hold the computed ratios against the claim."""
    for ratio in ratios:
        record_claim(record, CAPACITY_CLAIM, ratio.value, "modelled", ratio.conditions, "full")


def sentence(ratios: list[Ratio]) -> str:
    """Where the claim holds and what an H200 node gives instead."""
    claimed, h200 = ratios
    return (
        f"Computed: {_both(claimed)} at {claimed.conditions}, which is the claim; one H200 node "
        f"gives {_both(h200)} at {h200.conditions}, and cannot give the claimed figures."
    )


def _both(ratio: Ratio) -> str:
    return f"{ratio.tp_mtokens:.2f}M -> {ratio.dp_mtokens:.2f}M tokens, {ratio.value:.2f}x"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityBench:
    """The computed part alone; needs no device and no memory."""

    @property
    def name(self) -> str:
        """As it is called on the command line."""
        return NAME

    def workload(self) -> Mapping[str, Any]:
        """The conditions of the claim."""
        return {
            "devices": WORLD,
            "memory_gb": CLAIMED.memory_bytes / 1e9,
            "memory_fraction": CLAIMED.fraction,
            "weights": "fp8",
            "kv": CLAIMED.kv_dtype,
        }

    def run(self, target: Path, command: tuple[str, ...] = ()) -> tuple[RunResult, Path]:
        """Compute and store the result.

        Raises:
            DataError: the place cannot be written.
        """
        subject = Subject(
            name=self.name,
            model=MODEL,
            scale="full",
            dtype=STORED,
            fidelity="modelled",
            command=command,
            layout={"tp": TP.tp, "dp": DP.dp, "ep": DP.ep},
            workload=self.workload(),
        )
        with Record(subject, target) as record:
            record_published(record)
            ratios = ratios_of(record)
            record_ratios(record, ratios)
            record.add(
                "kv_capacity_ratio",
                ratios[0].value,
                unit="x",
                direction="higher",
                sample="exact",
            )
            record.claims.append(CAPACITY_CLAIM)
            record.notes.append(OWN)
            record.verdict = sentence(ratios)
            record.boundary = (
                "The ratio tends to the number of ranks as memory grows, and falls quickly where "
                "the weights fill the memory."
            )
            return record.finish()
