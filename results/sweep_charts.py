"""Charts along a swept variable: step time against its floor, any sweep, gain and boundary."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from kllm.results.chart_style import (
    BLUE,
    CYCLE,
    GREY,
    MARKERS,
    ORANGE,
    RED,
    WIDTH,
    about,
    axis_label,
    band,
    legend_above,
    mark_missing,
    numeric,
    spaced_ticks,
    table_of,
    units_of,
)
from kllm.results.schema import RunResult, Series
from kllm.results.store import frame

STEP_COLUMNS = {"step_ms", "floor_ms", "ratio"}


def step_floor_chart(result: RunResult) -> Figure | None:
    """Measured step time over the time that the hardware needs at least."""
    table, units = table_of(result, "sweep", "step_ms", "floor_ms")
    if table.empty:
        return None
    x_name = str(table.columns[0])
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.subplots()
    x, step, floor = (numeric(table, c) for c in (x_name, "step_ms", "floor_ms"))
    if step.notna().sum() == 0:
        return None
    band(axes, table, x, "step_ms", BLUE)
    axes.plot(x, step, "-o", color=BLUE, label="measured step")
    axes.plot(x, floor, "--", color=ORANGE, label="floor of this machine")
    for px, measured, least in zip(x, step, floor, strict=True):
        if least > 0 and measured > 0:
            axes.annotate(
                f"{about(measured / least)}x", (px, measured), xytext=(4, 8), ha="right",
                textcoords="offset points", fontsize=11,
            )  # fmt: skip
    axes.margins(y=0.15)
    _scale_y(axes, np.concatenate([step.dropna(), floor.dropna()]), log_from=10)
    mark_missing(axes, table, x)
    spaced_ticks(axes, [float(v) for v in x.dropna()])
    axes.set_xlabel(axis_label(x_name, units[x_name]))
    axes.set_ylabel("step time (ms)")
    legend_above(axes)
    return figure


def sweep_chart(series: Series) -> Figure | None:
    """All numeric columns over the first, one panel for each unit."""
    table, units = frame(series), units_of(series)
    x_name = str(table.columns[0])
    drawn = [
        str(c)
        for c in table.columns[1:]
        if not str(c).endswith(("_lo", "_hi"))
        and str(c) not in STEP_COLUMNS | {"state"}
        and pd.api.types.is_numeric_dtype(table[c])
        and numeric(table, str(c)).notna().any()
    ]
    if not drawn or len(table) < 2 or not pd.api.types.is_numeric_dtype(table[x_name]):
        return None
    by_unit: dict[str, list[str]] = {}
    for column in drawn:
        by_unit.setdefault(units[column] or ("ms" if column.endswith("_ms") else ""), []).append(
            column
        )
    panels = [
        columns[i : i + len(CYCLE)]
        for columns in by_unit.values()
        for i in range(0, len(columns), len(CYCLE))
    ]
    figure = Figure(figsize=(WIDTH, 3.6 * len(panels)), layout="constrained")
    x = numeric(table, x_name)
    for axes, columns in zip(
        figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True
    ):
        _draw_panel(axes, table, x, columns, units)
        axes.set_xlabel(axis_label(x_name, units[x_name]))
    return figure


def _draw_panel(
    axes: Axes, table: pd.DataFrame, x: pd.Series, columns: list[str], units: dict[str, str]
) -> None:
    for column, colour, marker in zip(columns, CYCLE, MARKERS, strict=False):
        band(axes, table, x, column, colour)
        label = axis_label(column, units[column])
        axes.plot(x, numeric(table, column), marker=marker, color=colour, label=label)
    unit = units[columns[0]] or ("ms" if columns[0].endswith("_ms") else "")
    axes.set_ylabel(axis_label(columns[0], unit) if len(columns) == 1 else unit or "value")
    values = np.concatenate([numeric(table, c).dropna().to_numpy() for c in columns])
    _scale_y(axes, values, log_from=30)
    missing = mark_missing(axes, table, x)
    spaced_ticks(axes, [float(v) for v in x.dropna()])
    if len(columns) > 1 or missing:
        legend_above(axes)


def _scale_y(axes: Axes, values: NDArray[np.float64], *, log_from: float) -> None:
    """A log axis for a wide range (below a decade it would have no labels), else one from 0."""
    low, high = float(values.min()), float(values.max())
    if low > 0 and high / low > log_from:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))  # labels within a decade
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        bottom, top = min(0.0, 1.05 * low), axes.get_ylim()[1]
        axes.set_ylim(bottom, top + 0.05 * (top - bottom))  # room for the highest marker


def crossing(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Where y first changes sign, interpolated on the axis that is drawn; None if it never does."""
    scale = np.log if min(x) > 0 else np.asarray
    positions = scale(np.asarray(x, dtype=float))
    for i in range(len(x) - 1):
        if y[i] * y[i + 1] < 0:
            share = y[i] / (y[i] - y[i + 1])
            turn = positions[i] + share * (positions[i + 1] - positions[i])
            return float(np.exp(turn) if min(x) > 0 else turn)
    return None


def gain_chart(series: Series) -> Figure | None:
    """The change in percent along the deciding variable, with the boundary where it turns."""
    table, units = frame(series), units_of(series)
    if len(table.columns) < 2:
        return None
    x_name, y_name = str(table.columns[0]), str(table.columns[1])
    x, y = numeric(table, x_name), numeric(table, y_name)
    known = x.notna() & y.notna()
    if known.sum() < 2:
        return None
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color=GREY, lw=1.2)
    band(axes, table, x, y_name, BLUE)
    axes.plot(x, y, "-o", color=BLUE, label=axis_label(y_name, units[y_name] or "%"))
    turn = crossing(x[known].tolist(), y[known].tolist())
    if turn is not None:
        axes.axvline(turn, color=RED, ls="--", label=f"boundary near {about(turn)}")
    spaced_ticks(axes, x[known].tolist())
    axes.set_xlabel(axis_label(x_name, units[x_name]))
    axes.set_ylabel("change (%)")
    legend_above(axes)
    return figure
