"""Sentences of `kllm bench expert-balance`: what placement gains, where copies stop to pay."""

from collections.abc import Mapping, Sequence
from typing import Any

EVEN = 1.05  # max/mean from which on nothing is left to gain
GAIN = 0.01  # share of max/mean below which a gain is none
NOTED_DRIFT = 10  # % of the experts

Rows = Sequence[Mapping[str, Any]]


def enough(rows: Rows) -> Mapping[str, Any]:
    """The row with the fewest copies that is even, or that no later one improves on."""
    for index, row in enumerate(rows):
        later = min((r["placed"] for r in rows[index + 1 :]), default=row["placed"])
        if row["placed"] <= EVEN or later > row["placed"] * (1 - GAIN):
            return row
    raise AssertionError("the last row has none after it")


def gains(rows: Rows) -> bool:
    """Whether there is something to gain, and placement gains it."""
    usual = rows[0]["in_order"]
    return bool(usual > EVEN and enough(rows)["placed"] < usual * (1 - GAIN))


def verdict(rows: Rows, ranks: int) -> str:
    """What measured placement makes of the busiest rank."""
    first, chosen = rows[0], enough(rows)
    if not gains(rows):
        return (
            f"Nothing to gain: the busiest of {ranks} ranks has {first['in_order']:.3f} times the "
            f"mean load with experts in order, and {chosen['placed']:.3f} times placed by "
            "measured routing."
        )
    copies, without = _copies(chosen), ""
    if chosen is not first and first["redundant"] == 0:
        without = f", {first['placed']:.3f} placed without copies"
    gain = first["in_order"] / chosen["placed"]
    return (
        f"The busiest of {ranks} ranks has {first['in_order']:.3f} times the mean load in order "
        f"and {chosen['placed']:.3f} times placed by measured routing {copies}{without}: "
        f"{gain:.2f}x less to wait for, predicted for traffic that the placement has not seen."
    )


def _copies(row: Mapping[str, Any]) -> str:
    return f"with {row['redundant']} redundant experts" if row["redundant"] else "without copies"


def boundary(rows: Rows, drift: Rows) -> str:
    """From where copies gain nothing more, what they cost, and how a placement ages."""
    first, chosen, last = rows[0], enough(rows), rows[-1]
    parts = [_limit(chosen, last)]
    if last is not first:
        parts[0] += f"; {_cost(first, last if chosen is first else chosen)}"
    if drift and gains(rows):
        parts.append(_ageing(drift, f"placed_{chosen['redundant']}"))
    return " ".join(f"{part}." for part in parts)


def _limit(chosen: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    count, placed = chosen["redundant"], chosen["placed"]
    if placed <= EVEN:
        if not count:
            return f"No copies are needed: without them max/mean is {placed:.3f}"
        return f"From {count} redundant experts on max/mean is at most {EVEN}"
    if chosen is last:
        return (
            f"{count} redundant experts, the most that were tried, leave max/mean at {placed:.3f}"
        )
    return f"More than {count} redundant experts gain less than {GAIN:.0%}"


def _cost(base: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    mib, left, before = row["added_mib"], row["kv_mtokens"], base["kv_mtokens"]
    text = f"{row['redundant']} add {mib:,.{0 if mib >= 10 else 3}f} MiB of weights to each rank"
    if not before:
        return f"{text}, and the weights do not fit without them"
    return (
        f"{text} and leave {left:,.1f}M of {before:,.1f}M tokens of KV ({left / before - 1:+.1%})"
    )


def _ageing(drift: Rows, column: str) -> str:
    """How max/mean grows with the share of experts whose popularity is another one."""
    fresh, usual = drift[0][column], drift[0]["in_order"]
    some = next(row for row in drift if row["moved_pct"] >= NOTED_DRIFT)
    text = (
        f"Once {some['moved_pct']} % of the experts have changed their popularity it is "
        f"{some[column]:.3f}"
    )
    half = next((row for row in drift if row[column] >= (fresh + usual) / 2), None)
    if half is None:
        return f"{text}; even when all have, more than half of the gain is left"
    return (
        f"{text}, and at {half['moved_pct']} % at least half of the gain is gone: measure "
        "again before that"
    )
