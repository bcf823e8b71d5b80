"""Charts of a report, as inline SVG that follows the page's light or dark colours.

Which series of a result are drawn, and the columns each must have (others are ignored, missing
ones leave the chart out):

    "trials"      number, state ("complete", "pruned", "failed"), reason, objective,
                  param.<name>..., metric.<name>...      one row a trial, in order of start
    "importance"  parameter, importance (shares that add up to 1)
    "pareto"      number, of the trials on the front; its other two columns, if any, name the
                  axes as they are called in "trials" (x, then y). Without this series the front
                  is computed from the first latency (unit ms or s) and the first rate (unit with
                  "/s") among the metrics of "trials"
    "sweep"       first column: the swept variable (batch); step_ms and floor_ms give the chart
                  of step time against its floor; every other numeric column is drawn in one
                  panel per unit; state "left out" marks a point that was not begun, any other
                  but "ok" one that could not run
    "sweep:NAME"  the same for any sweep: first column x, numeric columns y
    "gain:NAME"   a comparison along its deciding variable: first column x, second the change in
                  percent; a crossing of zero is marked as the boundary

For a column y of a sweep or gain, y_lo and y_hi are the ends of its interval, drawn as a band.
The history of a study is drawn from "trials". Units come from the series' columns.
"""

from collections.abc import Callable

import matplotlib as mpl
from matplotlib.figure import Figure

from kllm.results.chart_style import BLUE, GREEN, GREY, ORANGE, RC, RED, WIDTH, legend_above, to_svg
from kllm.results.compare import Comparison
from kllm.results.schema import RunResult
from kllm.results.study_charts import history_chart, importance_chart, pareto_chart
from kllm.results.sweep_charts import gain_chart, step_floor_chart, sweep_chart


def charts_of(result: RunResult) -> list[tuple[str, str]]:
    """Every chart that the result's series allow, as (title, SVG)."""
    makers: list[tuple[str, Callable[[RunResult], Figure | None]]] = [
        ("Trade-off of latency and throughput", pareto_chart),
        ("Objective by trial", history_chart),
        ("Parameters that mattered", importance_chart),
        ("Step time against its floor", step_floor_chart),
    ]
    charts = []
    with mpl.rc_context(RC):
        for title, make in makers:
            figure = make(result)
            if figure is not None:
                charts.append((title, to_svg(figure, f"{result.run_id}-{title}")))
        for series in result.series:
            kind, _, name = series.name.partition(":")
            if kind not in ("sweep", "gain"):
                continue
            figure = gain_chart(series) if kind == "gain" else sweep_chart(series)
            if figure is not None:
                title = ("Gain and boundary" if kind == "gain" else "Sweep") + (
                    f": {name}" if name else ""
                )
                charts.append((title, to_svg(figure, f"{result.run_id}-{series.name}")))
    return charts


def comparison_chart(comparison: Comparison) -> str | None:
    """A forest plot of a comparison, or None without any ratio."""
    with mpl.rc_context(RC):
        figure = forest_chart(comparison)
        return None if figure is None else to_svg(figure, f"{comparison.base}-{comparison.new}")


def forest_chart(comparison: Comparison) -> Figure | None:
    """Change and interval of every judged metric, against the margin."""
    rows = [r for r in comparison.rows if r.judgement.ratio is not None][::-1]
    if not rows:
        return None
    colours = {"worse": RED, "better": GREEN, "same": BLUE}
    figure = Figure(figsize=(WIDTH, 1.3 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    margin = 100 * comparison.margin
    axes.axvspan(-margin, margin, color=GREY, alpha=0.15, lw=0, label=f"within {margin:g} %")
    axes.axvline(0, color=GREY, lw=1)
    for height, row in enumerate(rows):
        ratio, ends = row.judgement.ratio, row.judgement.interval
        colour = colours.get(row.judgement.verdict, ORANGE)
        if ratio is None:
            continue
        if ends is not None:
            axes.plot([100 * (e - 1) for e in ends], [height] * 2, color=colour)
        axes.plot(100 * (ratio - 1), height, "s", color=colour)
    axes.set_yticks(range(len(rows)), [f"{r.metric}: {r.judgement.verdict}" for r in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("change from base to new (%)")
    axes.grid(axis="y", visible=False)
    legend_above(axes)
    return figure
