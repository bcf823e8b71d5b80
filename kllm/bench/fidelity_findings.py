"""What `kllm bench fidelity` says: errors of estimates, and the layouts that are beyond limits."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kllm.bench.fidelity_rounds import Values
from kllm.bench.fidelity_sides import MEMORY, UNITS
from kllm.bench.record import Record
from kllm.config import ParallelConfig
from kllm.hardware import Ceilings
from kllm.parallel.layout import short_name
from kllm.parallel.link import MEASURED
from kllm.results.schema import Fidelity

TIME_LIMIT, MEMORY_LIMIT = 10.0, 3.0  # percent that an estimate may be off

Pair = tuple[Fidelity, Fidelity]  # the estimate, and what it is held against
SLICE_OF_REAL: Pair = ("rank-slice", "real")
MODEL_OF_SLICE: Pair = ("modelled", "rank-slice")


def series_of(pair: Pair) -> str:
    """The series that holds a pair's values, one column for each fidelity, and errors."""
    return f"{pair[0]} of {pair[1]}"


def add_errors(
    record: Record, layout: ParallelConfig, pair: Pair, values: Mapping[Fidelity, Values]
) -> None:
    """Record a row for each quantity that both fidelities have: medians, and the error."""
    estimate, truth = pair
    for what in UNITS:
        if what not in values[estimate] or what not in values[truth]:
            continue
        one, other = (statistics.median(values[side][what]) for side in pair)
        row = {
            "layout": short_name(layout),
            "quantity": what.replace("tokens_per_s", "tokens/s").replace("_", " "),
            estimate: one,
            truth: other,
            "error_percent": (one / other - 1) * 100,
            "limit_percent": MEMORY_LIMIT if what == MEMORY else TIME_LIMIT,
            "state": "ok",
        }
        record.row(series_of(pair), row, {"error_percent": "%", "limit_percent": "%"})


def verdict(record: Record, pair: Pair) -> str:
    """Whether all layouts are within the limits, and which errors are not."""
    title = f"{pair[0]} against {pair[1]}"
    rows = record.ok_rows(series_of(pair))
    if not rows:
        return f"{title}: no layout could be compared."
    _, beyond = _split(rows)
    limits = f"{TIME_LIMIT:.0f} % in time and {MEMORY_LIMIT:.0f} % in memory"
    if not beyond:
        return f"{title}: all layouts within {limits}."
    named = "; ".join(f"{layout} ({', '.join(texts)})" for layout, texts in beyond.items())
    return f"{title}: beyond {limits}: {named}."


def boundary(record: Record, pair: Pair) -> str:
    """For which layouts the estimate holds, fails, or could not be compared."""
    good, beyond = _split(record.ok_rows(series_of(pair)))
    every = record.rows.get(series_of(pair), [])
    failed = list(dict.fromkeys(row["layout"] for row in every if row["state"] == "failed"))
    parts = [
        f"{' of '.join(pair)} is within the limits for {', '.join(good) or 'no layout'}",
        *([f"beyond them for {', '.join(beyond)}"] if beyond else []),
        *([f"not compared for {', '.join(failed)}"] if failed else []),
    ]
    return "; ".join(parts) + "."


def _split(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[str, list[str]]]:
    """Layouts that are within the limits, and what of the others is not."""
    beyond: dict[str, list[str]] = {}
    for row in rows:
        if abs(row["error_percent"]) > row["limit_percent"]:
            text = f"{row['quantity']} {row['error_percent']:+.1f} %"
            beyond.setdefault(row["layout"], []).append(text)
    names = dict.fromkeys(row["layout"] for row in rows)
    return [name for name in names if name not in beyond], beyond


def conditions(link: str, found: Ceilings, kind: str, pairs: Sequence[Pair]) -> list[str]:
    """What every number of a run rests on.

    Args:
        link: of slices, as the config names it.
        kind: of device, "cuda" or "cpu".
    """
    if link != MEASURED or found.links is None:
        notes = [f"Slices use the link {link}, which is not this machine's."]
    else:
        links = found.links
        notes = [
            f"Slices use the link measured among {links.ranks} ranks by {links.backend}: "
            f"{links.bytes_per_s / 1e9:.3g} GB/s a way, {links.latency_s * 1e6:.3g} us."
        ]
    if kind == "cuda":
        notes.append(
            "Peak memory is that of tensors on the rank that is sliced, in a pipeline one of the "
            "last stage; the libraries' own buffers are not in it."
        )
    elif SLICE_OF_REAL in pairs:
        notes.append(
            "On a CPU the real ranks share the cores that a slice has for itself, so that errors "
            "are large and say nothing about GPUs; memory is not counted."
        )
    if MODEL_OF_SLICE in pairs:
        notes.append(
            "Modelled times are floors: launches, sampling and scheduling are not in them, nor "
            "activations in modelled memory."
        )
    return notes
