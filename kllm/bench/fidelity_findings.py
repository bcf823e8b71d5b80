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
from kllm.results.schema import LEFT_OUT, Fidelity
from kllm.results.stats import paired_ratio

TIME_LIMIT, MEMORY_LIMIT = 10.0, 3.0  # percent that an estimate may be off
LIMITS = f"{TIME_LIMIT:.0f} % in time and {MEMORY_LIMIT:.0f} % in memory"
QUANTITIES = {
    "prefill_step_ms": "prefill step",
    "decode_step_ms": "decode step",
    "decode_rank_ms": "decode on ranks",
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "output_tokens_per_s": "output",
    MEMORY: "peak memory",
}

Row = Mapping[str, Any]
Pair = tuple[Fidelity, Fidelity]  # the estimate, and what it is held against
SLICE_OF_REAL: Pair = ("rank-slice", "real")
MODEL_OF_SLICE: Pair = ("modelled", "rank-slice")


def series_of(pair: Pair) -> str:
    """The series that holds a pair's values, one column for each fidelity, and errors."""
    return f"{pair[0]} of {pair[1]}"


def summary_of(pair: Pair) -> str:
    """The series with a row for each layout: its largest errors, or why it has none."""
    return f"{series_of(pair)}, largest errors, limits {LIMITS}"


def add_errors(
    record: Record, layout: ParallelConfig, pair: Pair, values: Mapping[Fidelity, Values]
) -> None:
    """Record a layout's row, and one for each quantity that both fidelities have.

    Sides that took turns are compared within each round, as what changes between rounds (clocks,
    other load on the cores) is no error of the estimate.
    """
    estimate, truth = pair
    name = short_name(layout)
    rows: dict[str, dict[str, Any]] = {}
    for what in UNITS:
        if what not in values[estimate] or what not in values[truth]:
            continue
        one, other = (values[side][what] for side in pair)
        error = (_ratio(one, other) - 1) * 100
        rows[what] = {
            "layout": name,
            "quantity": f"{QUANTITIES[what]} ({UNITS[what]})",
            estimate: statistics.median(one),
            truth: statistics.median(other),
            "error_percent": error,
            "within": abs(error) <= (MEMORY_LIMIT if what == MEMORY else TIME_LIMIT),
        }
    times = [what for what in rows if what != MEMORY]
    worst = max(times, key=lambda what: abs(rows[what]["error_percent"]))
    row = {
        "layout": name,
        "within": all(row["within"] for row in rows.values()),
        "time_percent": rows[worst]["error_percent"],
        "largest_in": QUANTITIES[worst],
        "memory_percent": rows[MEMORY]["error_percent"] if MEMORY in rows else None,
        "state": "ok",
    }
    units = {"time_percent": "%", "memory_percent": "%"}
    record.row(summary_of(pair), row, units)
    for row in rows.values():
        record.row(series_of(pair), row, {"error_percent": "%"})


def _ratio(estimates: Sequence[float], truths: Sequence[float]) -> float:
    if len(estimates) == len(truths):
        return paired_ratio(truths, estimates)[0]
    return statistics.median(estimates) / statistics.median(truths)  # a model gives one value


def verdict(record: Record, pair: Pair) -> str:
    """How many layouts are within the limits, and the error that is furthest off."""
    title = f"{pair[0]} against {pair[1]}"
    rows = record.ok_rows(summary_of(pair))
    if not rows:
        return f"{title}: no layout could be compared."
    groups = _groups(record, pair)
    counts = [f"{len(groups.pop('within'))} within {LIMITS}"]
    counts += [f"{len(names)} {group}" for group, names in groups.items() if names]
    total = len(record.rows[summary_of(pair)])
    furthest = max(rows, key=lambda row: max(share for share, _ in _errors(row)))
    return (
        f"{title}, {total} layout{'s' * (total > 1)}: {', '.join(counts)}; furthest off is "
        f"{furthest['layout']} ({_largest(furthest)})."
    )


def boundary(record: Record, pair: Pair) -> str:
    """For which layouts the estimate holds, fails, or could not be compared."""
    groups = _groups(record, pair)
    groups["within"] = groups["within"] or ["no layout"]
    title = {"within": f"{series_of(pair)} is within the limits for", "beyond": "beyond them for"}
    parts = [
        f"{title.get(group, f'{group}:')} {', '.join(names)}"
        for group, names in groups.items()
        if names
    ]
    return "; ".join(parts) + "."


def _groups(record: Record, pair: Pair) -> dict[str, list[str]]:
    """Layouts by what became of them; those beyond the limits with their largest error."""
    groups: dict[str, list[str]] = {"within": [], "beyond": [], "failed": [], LEFT_OUT: []}
    for row in record.rows.get(summary_of(pair), []):
        if row["state"] != "ok":
            groups[row["state"]].append(row["layout"])
        elif row["within"]:
            groups["within"].append(row["layout"])
        else:
            groups["beyond"].append(f"{row['layout']} ({_largest(row)})")
    return groups


def _errors(row: Row) -> list[tuple[float, str]]:
    """The largest errors of a layout, in time and memory: as shares of their limits, in words."""
    found = [(row["largest_in"], row["time_percent"], TIME_LIMIT)]
    if row["memory_percent"] is not None:
        found.append((QUANTITIES[MEMORY], row["memory_percent"], MEMORY_LIMIT))
    return [(abs(error) / limit, f"{what} {error:+.1f} %") for what, error, limit in found]


def _largest(row: Row) -> str:
    """The errors that are beyond their limits; where none is, the one that comes closest."""
    errors = _errors(row)
    return ", ".join(text for share, text in errors if share > 1) or max(errors)[1]


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
