"""What all charts share: colours, fonts, axes, and how a figure becomes inline SVG."""

import re
from collections.abc import Sequence
from io import StringIO
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kllm.results.schema import LEFT_OUT, RunResult, Series
from kllm.results.store import frame

# Okabe and Ito 2008: told apart with every common colour blindness, on white and on black.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = (
    "#3b8bc9", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9",
)  # fmt: skip
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)
MARKERS = "osD^vP"  # shapes differ as well, for print
INK = "#010203"  # replaced by currentColor: text takes the page's colour
GREY = "#8a8f98"
FONT = "DejaVu Sans"  # wider than the fonts of browsers, so nothing grows on arrival
RC: dict[str, Any] = {
    "figure.dpi": 72,
    "svg.fonttype": "none",
    "font.family": FONT,
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 12,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "lines.linewidth": 2,
    "lines.markersize": 7,
}
WIDTH = 9.2  # inches at 72 dots: about the width of the page's column
LABEL = {
    "ttft": "time to first token", "tpot": "time per output token", "itl": "inter-token latency",
    "e2e": "request latency", "step": "step time", "floor": "floor",
}  # fmt: skip


def to_svg(figure: Figure, salt: str) -> str:
    """Inline SVG: no size of its own, page colours and fonts, ids that cannot clash."""
    buffer = StringIO()
    with mpl.rc_context({**RC, "svg.hashsalt": salt}):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None},
        )  # fmt: skip
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = text.replace(INK, "currentColor").replace(f"'{FONT}'", "system-ui, sans-serif")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", text)
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)[0]
    return re.sub(
        r"<svg [^>]*>",
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width} {height}" style="max-width:{width}pt;width:100%" role="img">',
        text,
        count=1,
    )


def axis_label(column: str, unit: str) -> str:
    """Words for a column with its unit: metric.ttft_p95_ms is "time to first token, P95 (ms)"."""
    words = column.removeprefix("metric.").removeprefix("param.")
    for suffix, meaning in (("_per_s", ""), ("_ms", "ms"), ("_pct", "%"), ("_s", "s")):
        if words.endswith(suffix) and (unit or meaning):
            words, unit = words.removesuffix(suffix), unit or meaning
            break
    first, *rest = words.split("_")
    rest = [p.upper() if re.fullmatch(r"p\d+", p) else p for p in rest]
    text = LABEL.get(first, first) + (", " if first in LABEL and rest else " ") + " ".join(rest)
    return f"{text.strip()} ({unit})" if unit else text.strip()


def short(value: float) -> str:
    """16384 is 16K, as sizes of prompts are written."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}K" if value < 2**20 else f"{value / 2**20:g}M"
    return f"{value:g}"


def about(value: float) -> str:
    """Two significant digits, for what was interpolated and not measured."""
    return f"{float(f'{value:.1e}'):,.10g}"


def units_of(series: Series) -> dict[str, str]:
    """Column name to unit."""
    return {c.name: c.unit for c in series.columns}


def table_of(result: RunResult, name: str, *needed: str) -> tuple[pd.DataFrame, dict[str, str]]:
    """A series as a table with its units; empty if it, or a needed column, is missing."""
    series = result.find_series(name)
    if series is None:
        return pd.DataFrame(), {}
    table = frame(series)
    if any(column not in table.columns for column in needed):
        return pd.DataFrame(), {}
    return table, units_of(series)


def numeric(table: pd.DataFrame, column: str) -> pd.Series:
    """A column as floats; what is no finite number is NaN and leaves a gap in a line."""
    numbers = pd.to_numeric(table[column], errors="coerce").astype(float)
    return numbers.replace([np.inf, -np.inf], np.nan)


def legend_above(axes: Axes) -> None:
    """Put the legend between title and data."""
    # Outside the data, so that it can never cover a point.
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        axes.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=min(len(labels), 4),
            borderaxespad=0.2, handletextpad=0.4, columnspacing=1.4,
        )  # fmt: skip


def spaced_ticks(axes: Axes, values: Sequence[float]) -> None:
    """The swept values themselves as ticks; a wide range is drawn on a log axis."""
    points = sorted(set(values))
    if points and points[0] > 0 and points[-1] / points[0] >= 8:
        axes.set_xscale("log", base=2)
        positions = np.log2(points)
    else:
        positions = np.asarray(points)
    gap = (positions[-1] - positions[0]) / 14 if len(points) > 1 else 0
    shown, last = [], -np.inf
    for value, position in zip(points, positions, strict=True):
        if position - last >= gap:
            shown.append(value)
            last = position
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    whole = all(float(value).is_integer() for value in shown)
    label = short if whole else "{:.2g}".format
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: label(v)))


def band(axes: Axes, table: pd.DataFrame, x: pd.Series, column: str, colour: str) -> None:
    """Shade the interval of a column, if the table has its ends."""
    ends = (f"{column}_lo", f"{column}_hi")
    if all(end in table.columns for end in ends):
        low, high = (numeric(table, end) for end in ends)
        axes.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)


def mark_missing(axes: Axes, table: pd.DataFrame, x: pd.Series) -> bool:
    """On the axis, a cross where a point could not run and a ring where it was left out.

    Returns:
        Whether there is one.
    """
    if "state" not in table.columns:
        return False
    state = table["state"].fillna("ok").astype(str)
    left_out = state.eq(LEFT_OUT)
    failed = state.ne("ok") & ~left_out
    for label, marked, marker, colour in (
        ("could not run", failed, "X", RED),
        (LEFT_OUT, left_out, "o", GREY),
    ):
        if marked.any():
            axes.plot(
                x[marked], np.full(marked.sum(), 0.03), marker, color=colour, ms=10, label=label,
                fillstyle="full" if marker == "X" else "none", clip_on=False,
                transform=axes.get_xaxis_transform(),
            )  # fmt: skip
    return bool(state.ne("ok").any())
