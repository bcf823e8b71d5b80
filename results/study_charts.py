"""Charts of a tuning study: trade-off, history, importance."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kllm.results.chart_style import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    WIDTH,
    axis_label,
    legend_above,
    numeric,
    table_of,
)
from kllm.results.schema import RunResult
from kllm.results.store import frame

STATE_STYLE = {
    "complete": (BLUE, "o", "complete"),
    "pruned": (GREY, "x", "pruned"),
    "failed": (RED, "X", "failed"),
}


def pareto_front(x: Sequence[float], y: Sequence[float]) -> list[int]:
    """Indices of the points that no other beats with less x and more y, by rising x."""
    front: list[int] = []
    best = -np.inf
    for index in sorted(range(len(x)), key=lambda i: (x[i], -y[i])):
        if y[index] > best:
            front.append(index)
            best = y[index]
    return front


def _pareto_axes(result: RunResult, table: pd.DataFrame, units: dict[str, str]) -> list[str]:
    front = result.find_series("pareto")
    if front is not None and len(front.columns) >= 3:
        named = [c.name for c in front.columns if c.name != "number"][:2]
        return [n for n in named if n in table.columns]
    metrics = [c for c in table.columns if c.startswith("metric.")]
    latency = [c for c in metrics if units[c] in ("ms", "s")]
    rate = [c for c in metrics if "/s" in units[c]]
    return [latency[0], rate[0]] if latency and rate else []


def pareto_chart(result: RunResult) -> Figure | None:
    """Every complete trial by latency and throughput; the front is joined and numbered."""
    table, units = table_of(result, "trials", "number", "state")
    axes_names = _pareto_axes(result, table, units) if len(table) else []
    if len(axes_names) != 2:
        return None
    x_name, y_name = axes_names
    # Trials that were stopped early saw only their beginning: their metrics are no match.
    table = table[table["state"] == "complete"]
    points = pd.DataFrame(
        {"number": table["number"], "x": numeric(table, x_name), "y": numeric(table, y_name)}
    ).dropna()
    if points.empty:
        return None
    front_series = result.find_series("pareto")
    if front_series is not None:
        on_front = points[points["number"].isin(frame(front_series)["number"])].sort_values("x")
    else:
        on_front = points.iloc[pareto_front(points["x"].tolist(), points["y"].tolist())]
    figure = Figure(figsize=(WIDTH, 4.8), layout="constrained")
    axes = figure.subplots()
    rest = points.drop(on_front.index)
    axes.scatter(rest["x"], rest["y"], color=GREY, alpha=0.7, s=45, label="trial")
    axes.plot(on_front["x"], on_front["y"], "-o", color=BLUE, ms=9, label="Pareto front")
    axes.set_xlabel(axis_label(x_name, units[x_name]))
    axes.set_ylabel(axis_label(y_name, units[y_name]))
    axes.margins(0.08)
    legend_above(axes)
    _number_front(figure, axes, on_front)
    return figure


def _number_front(figure: Figure, axes: Axes, front: pd.DataFrame) -> None:
    """Write trial numbers above the front, leaving out those that would touch a neighbour."""
    figure.draw_without_rendering()  # only now are the limits of the axes final
    taken: list[tuple[float, float]] = []
    for number, x, y in front[["number", "x", "y"]].itertuples(index=False):
        px, py = axes.transData.transform((x, y))
        if all(abs(px - ox) > 34 or abs(py - oy) > 18 for ox, oy in taken):
            axes.annotate(
                f"#{number:.0f}", (x, y), xytext=(-4, 8), textcoords="offset points",
                fontsize=11, ha="right",
            )  # fmt: skip
            taken.append((px, py))


def history_chart(result: RunResult) -> Figure | None:
    """The objective of each trial and the best so far; pruned and failed ones at the bottom."""
    table, units = table_of(result, "trials", "number", "state", "objective")
    if table.empty:
        return None
    values = numeric(table, "objective")
    done = table["state"].eq("complete") & values.notna()
    if not done.any():
        return None
    minimise = result.extra.get("direction") == "minimize"
    best = values[done].cummin() if minimise else values[done].cummax()
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.step(table["number"][done], best, where="post", color=ORANGE, label="best so far")
    span = float(np.ptp(values[done])) or abs(float(values[done].iloc[0])) or 1.0
    floor = float(values[done].min()) - 0.12 * span
    for state, (colour, marker, words) in STATE_STYLE.items():
        picked = done if state == "complete" else table["state"].eq(state)
        if picked.any():
            # A trial that did not finish has no comparable objective: it is only marked.
            height = values[picked] if state == "complete" else np.full(picked.sum(), floor)
            axes.scatter(
                table["number"][picked], height, color=colour, marker=marker, s=50, label=words
            )
    axes.set_xlabel("trial")
    axes.set_ylabel(axis_label("objective", units["objective"]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_above(axes)
    return figure


def importance_chart(result: RunResult) -> Figure | None:
    """Share of the objective's variation that each parameter explains, largest on top."""
    table, _ = table_of(result, "importance", "parameter", "importance")
    if table.empty:
        return None
    table = table.assign(importance=numeric(table, "importance")).dropna()
    table = table.nlargest(12, "importance").iloc[::-1]
    figure = Figure(figsize=(WIDTH, 1.1 + 0.42 * len(table)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(
        table["parameter"].astype(str), 100 * table["importance"], color=BLUE, height=0.65
    )
    axes.bar_label(bars, fmt="%.0f %%", padding=4)
    axes.set_xlabel("share of the explained variation (%)")
    axes.set_xlim(0, max(10.0, 112 * float(table["importance"].max())))
    axes.grid(axis="y", visible=False)
    return figure
