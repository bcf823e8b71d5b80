"""What a sweep of two layouts says: crossovers, where a pool is full, the sentences of a report."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Metric: (column after the side's name, what it is called, whether less of it is better)
COMPARED = {
    "tpot": ("tpot_ms", "TPOT", True),
    "ttft": ("ttft_ms", "mean TTFT", True),
    "output": ("output_tokens_per_s", "output", False),
}


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where request-DP and TP change places."""

    at: float  # requests in flight
    dp_above: bool  # whether request-DP is the better one above it


def change_pct(tp: float, dp: float) -> float:
    """Request-DP against TP in percent."""
    return 100 * (dp / tp - 1)


def gain_pct(tp: float, dp: float, *, lower_is_better: bool) -> float:
    """How much better request-DP is, in percent of TP; negative where it is worse."""
    return (-1 if lower_is_better else 1) * change_pct(tp, dp)


def crossings(in_flight: Sequence[float], gain: Sequence[float]) -> list[Crossing]:
    """Every change of sign of the gain, interpolated between points on a logarithmic axis.

    A point without a difference belongs to the side it came from; two neighbours without one are
    no crossing.
    """
    found = []
    known = [(x, y) for x, y in zip(in_flight, gain, strict=True) if y]
    for (x0, y0), (x1, y1) in itertools.pairwise(known):
        if y0 * y1 < 0:
            share = y0 / (y0 - y1)
            found.append(Crossing(x0 * (x1 / x0) ** share, y1 > 0))
    return found


def gain_column(metric: str) -> str:
    """The name of a gain's column."""
    return f"{metric}_gain_pct"


def gain_rows(rows: Sequence[Mapping[str, Any]], metric: str) -> list[dict[str, float]]:
    """The gain of request-DP along a sweep."""
    column, _, lower = COMPARED[metric]
    return [
        {
            "in_flight": row["in_flight"],
            gain_column(metric): gain_pct(
                row[f"tp_{column}"], row[f"dp_{column}"], lower_is_better=lower
            ),
        }
        for row in rows
    ]


def crossover_clause(metric: str, gains: Sequence[Mapping[str, float]]) -> str:
    """Where one metric changes sides along a sweep, or that it does not in the range."""
    _, label, _ = COMPARED[metric]
    xs = [row["in_flight"] for row in gains]
    ys = [row[gain_column(metric)] for row in gains]
    found = crossings(xs, ys)
    if not found:
        better = "neither" if not any(ys) else ("request-DP" if sum(ys) > 0 else "TP")
        return f"{label} is better with {better} throughout, no crossover"
    first, other = ("TP", "request-DP") if found[0].dp_above else ("request-DP", "TP")
    text = f"{label} is better with {first} below {found[0].at:.3g} and with {other} above"
    later = ", ".join(f"{crossing.at:.3g}" for crossing in found[1:])
    return f"{text}, changing sides again at {later}" if later else text


def full_from(pool_tokens: int, owners: int, page_size: int, tokens: int) -> int:
    """The fewest requests of `tokens` tokens that no longer fit, evenly placed.

    Args:
        pool_tokens: of each rank.
        owners: sets of ranks with requests of their own.
    """
    pages = math.ceil(tokens / page_size)
    return owners * (pool_tokens // page_size // pages) + 1


def full_clause(tp_from: int, dp_from: int, rows: Sequence[Mapping[str, Any]]) -> str:
    """Where requests queue for KV, and what request-DP does for TTFT there."""
    text = f"the KV pool is full from {tp_from} with TP and from {dp_from} with request-DP"
    full = [row for row in rows if row["in_flight"] >= tp_from]
    if not full:
        return f"{text}, beyond the range"
    change = change_pct(full[-1]["tp_ttft_ms"], full[-1]["dp_ttft_ms"])
    at = full[-1]["in_flight"]
    return f"{text} (mean TTFT {change:+.1f} % with request-DP at {at})"


def boundary_sentence(
    isl: int, rows: Sequence[Mapping[str, Any]], full: Mapping[str, Any] | None
) -> str:
    """Everything along the requests in flight at one prompt length."""
    counts = [row["in_flight"] for row in rows]
    clauses = [crossover_clause(m, gain_rows(rows, m)) for m in COMPARED] if len(rows) > 1 else []
    if full:
        clauses.append(full_clause(full["tp_full_from"], full["dp_full_from"], rows))
    swept = f"{min(counts)} to {max(counts)} in flight"
    return f"ISL {isl}, {swept}: " + "; ".join(clauses) + "."


def load_sentence(isl: int, row: Mapping[str, Any], ttft_change_pct: float) -> str:
    """What request-DP changes under one load."""
    tpot, output = (
        change_pct(row[f"tp_{column}"], row[f"dp_{column}"])
        for column in ("tpot_ms", "output_tokens_per_s")
    )
    return (
        f"Measured with {row['in_flight']} in flight at ISL {isl}, request-DP against TP: mean "
        f"TTFT {ttft_change_pct:+.1f} %, TPOT {tpot:+.1f} %, output {output:+.1f} %."
    )


def filled_sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the filled pools hold, and how far from computed that is."""
    tp, dp = rows
    furthest = max(abs(row["difference_pct"]) for row in rows)
    return (
        f"Filled on this device ({tp['scale']}, {tp['kv_dtype']} KV): {tp['layout']} "
        f"{tp['tokens']:,} tokens, {dp['layout']} {dp['tokens']:,}, "
        f"{dp['tokens'] / tp['tokens']:.2f}x, within {furthest:.2g} % of computed."
    )


def skew_sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """What each skewed load costs against the even one; empty if none was measured."""
    costs = [
        f"{row['layout']} {row['lengths']}"
        + (f" placed by {row['placed_by']}" if row["placed_by"] else "")
        + f" {round(row['ttft_change_pct']):+d} % and {round(row['output_change_pct']):+d} %"
        for row in rows
        if row["lengths"] != "even"
    ]
    if not costs:
        return ""
    return "Skew, change of mean TTFT and of output against even lengths: " + "; ".join(costs) + "."
