"""The published figures that benches answer to, and how a measured number stands to them.

A claim is reproduced when the median of the measurement reaches the published figure; the
interval stands beside it, and a wide one does not make a claim easier to reach. What the
publication measured on is part of the claim: a number from another machine, model or fidelity is
shown beside it, never as a replacement for it. One of a tiny model is not compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kllm.results.headings import FIDELITY_MEANS
from kllm.results.schema import Fidelity, Metric, RunResult

Status = Literal["reproduced", "not reproduced", "not comparable", "not measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One published figure.

    `metric` is the name under which the bench stores its own measurement of the same quantity,
    in the same unit.
    """

    id: str
    bench: str
    statement: str
    metric: str
    published: float
    unit: str
    higher_is_stronger: bool = True  # False: a reduction or a time, where less is the claim
    conditions: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRow:
    """A claim beside what was measured; `measured` is None when nothing was."""

    claim: Claim
    status: Status
    measured: Metric | None = None
    fidelity: Fidelity | None = None
    conditions: str = ""


def _claim(bench: str, statement: str, metric: str, published: float, unit: str) -> Claim:
    return Claim(
        id=f"{bench}/{metric}",
        bench=bench,
        statement=statement,
        metric=metric,
        published=published,
        unit=unit,
        higher_is_stronger=published >= 0 and unit != "s",
    )


# Changes are signed: a TTFT change of -25 % is a quarter less.
CLAIMS: tuple[Claim, ...] = (
    _claim("ring-vs-allgather", "Ring attention, throughput at ISL 512K",
           "throughput_change_pct", 16.9, "%"),
    _claim("tp-vs-dp-attention", "Request-DP, KV capacity on 8 GPUs (2.9M to 21.2M tokens)",
           "kv_capacity_ratio", 7.3, "x"),
    _claim("tp-vs-dp-attention", "Request-DP, mean TTFT", "ttft_mean_change_pct", -25.0, "%"),
    _claim("speculative", "DSpark, mean TPOT at ISL 3K-6K and OSL 0.5K",
           "tpot_mean_change_pct", -15.0, "%"),
    _claim("prefix-tree", "Incremental matching, GPU bubble 400 to 30 ms",
           "bubble_change_pct", -92.5, "%"),
    _claim("prefix-tree", "Incremental matching, long-request prefill speed",
           "prefill_speed_change_pct", 40.0, "%"),
    _claim("kv-tiers", "Tiered KV, hit rate", "hit_rate_gain_points", 20.0, "points"),
    _claim("kv-tiers", "Tiered KV, throughput under SLO",
           "slo_throughput_change_pct", 30.0, "%"),
    _claim("kv-tiers", "Tiered KV, total hit rate in the published window (77.5 + 9.6 + 0.6)",
           "hit_rate_pct", 87.6, "%"),
    _claim("fair-prefill", "Fair chunk quotas, mean TTFT", "ttft_mean_change_pct", -17.8, "%"),
    _claim("fair-prefill", "Fair chunk quotas, P50 TTFT", "ttft_p50_change_pct", -26.0, "%"),
    _claim("fair-prefill", "Fair chunk quotas, P90 TTFT", "ttft_p90_change_pct", -14.0, "%"),
    _claim("fair-prefill", "Fair chunk quotas, P95 TTFT", "ttft_p95_change_pct", -12.1, "%"),
    Claim(id="fair-prefill/ttft_p99_change_pct", bench="fair-prefill",
          statement="Fair chunk quotas, P99 TTFT (the price: no more than this)",
          metric="ttft_p99_change_pct", published=2.65, unit="%", higher_is_stronger=False),
    _claim("pd-elastic", "Elastic P/D pools, time until capacity is effective",
           "capacity_effective_s", 10.0, "s"),
    _claim("pd-elastic", "Elastic P/D pools, against 10 minutes for fixed groups",
           "capacity_speedup", 60.0, "x"),
    _claim("startup", "Warm start, from 10 minutes to", "warm_start_s", 10.0, "s"),
)  # fmt: skip


def claim_of(claim_id: str) -> Claim:
    """The claim of that id, which must exist."""
    return next(claim for claim in CLAIMS if claim.id == claim_id)


def status_of(claim: Claim, measured: float, scale: str) -> Status:
    """Whether a measured value reaches the published one.

    A tiny model has neither the sizes nor the bottlenecks that a publication speaks of.
    """
    if scale == "tiny":
        return "not comparable"
    stronger = 1 if claim.higher_is_stronger else -1
    reached = stronger * (measured - claim.published) >= 0
    return "reproduced" if reached else "not reproduced"


def side_by_side(results: Sequence[RunResult]) -> list[ClaimRow]:
    """Every claim of the benches among `results`, with a row for each result that measured it.

    A result answers to a claim when its `claims` lists the id. Real ones come before rank-slices
    and these before modelled ones; none is chosen, as the best of several would favour the claim.
    """
    order = list(FIDELITY_MEANS)
    wanted = {r.name for r in results} | {c for r in results for c in r.claims}
    rows: list[ClaimRow] = []
    for claim in CLAIMS:
        if claim.bench not in wanted and claim.id not in wanted:
            continue
        found = [row for r in results if claim.id in r.claims and (row := _row(claim, r))]
        found.sort(key=lambda row: order.index(row.fidelity or ""))
        rows += found or [ClaimRow(claim=claim, status="not measured")]
    return rows


def _row(claim: Claim, result: RunResult) -> ClaimRow | None:
    """What a result measured of a claim; None: nothing."""
    metric = result.metrics.get(claim.metric)
    if metric is None or metric.median is None:
        return None
    workload = ", ".join(f"{key} {_listed(value)}" for key, value in result.workload.items())
    gpus = ", ".join(g.name for g in result.fingerprint.gpus) or result.fingerprint.cpu or ""
    if result.fidelity == "modelled":
        gpus = ""  # it was computed for the devices that the workload names
    conditions = "; ".join(x for x in (f"{result.model} ({result.scale})", workload, gpus) if x)
    return ClaimRow(
        claim=claim,
        status=status_of(claim, metric.median, result.scale),
        measured=metric,
        fidelity=result.fidelity,
        conditions=conditions,
    )


def _listed(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
