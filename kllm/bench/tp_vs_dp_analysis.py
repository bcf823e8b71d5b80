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


def crossover_sentence(isl: int, metric: str, gains: Sequence[Mapping[str, float]]) -> str:
    """Where one metric changes sides at one context length, or that it does not in the range."""
    _, label, _ = COMPARED[metric]
    xs = [row["in_flight"] for row in gains]
    ys = [row[gain_column(metric)] for row in gains]
    found = crossings(xs, ys)
    if not found:
        better = "neither" if not any(ys) else ("request-DP" if sum(ys) > 0 else "TP")
        return (
            f"ISL {isl}: {label} has no crossover from {min(xs):g} to {max(xs):g} in flight, "
            f"{better} is better throughout"
        )
    first = "TP" if found[0].dp_above else "request-DP"
    other = "request-DP" if found[0].dp_above else "TP"
    text = (
        f"ISL {isl}: {label} is better with {first} below {found[0].at:.3g} in flight and with "
        f"{other} above"
    )
    if len(found) > 1:
        later = ", ".join(f"{crossing.at:.3g}" for crossing in found[1:])
        text += f", and changes sides again at {later}"
    return text


def full_from(pool_tokens: int, owners: int, page_size: int, tokens: int) -> int:
    """The fewest requests of `tokens` tokens that no longer fit, evenly placed.

    Args:
        pool_tokens: of each rank.
        owners: sets of ranks with requests of their own.
    """
    pages = math.ceil(tokens / page_size)
    return owners * (pool_tokens // page_size // pages) + 1


def full_sentence(isl: int, tp_from: int, dp_from: int, rows: Sequence[Mapping[str, Any]]) -> str:
    """Where requests queue for KV, and what that does to TTFT."""
    most = max(row["in_flight"] for row in rows)
    text = (
        f"ISL {isl}: TP's KV pool is full and requests queue from {tp_from} in flight, "
        f"request-DP's from {dp_from}"
    )
    if tp_from > most:
        return f"{text}; neither is reached in the range (to {most})"
    change = change_pct(rows[-1]["tp_ttft_ms"], rows[-1]["dp_ttft_ms"])
    return f"{text}; at {most} mean TTFT changes by {change:+.1f} % with request-DP"


def load_sentence(isl: int, row: Mapping[str, Any]) -> str:
    """What request-DP changes under one load."""
    changes = ", ".join(
        f"{label} {change_pct(row[f'tp_{column}'], row[f'dp_{column}']):+.1f} %"
        for column, label, _ in COMPARED.values()
    )
    return (
        f"Measured with {row['in_flight']} in flight at ISL {isl}, request-DP against TP: {changes}."
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


def skew_sentences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each skewed load costs against the even one."""
    return [
        f"{row['lengths']} lengths{' placed by ' + row['placed_by'] if row['placed_by'] else ''} "
        f"change {row['layout']}'s mean TTFT by {row['ttft_change_pct']:+.0f} % and its output by "
        f"{row['output_change_pct']:+.0f} %"
        for row in rows
        if row["lengths"] != "even"
    ]
