"""A bench's result in a terminal: a table for each series, then what it says in sentences."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kllm.cli.console import out, say
from kllm.results.headings import LEGENDS, fidelity, heading, tiny_warning

if TYPE_CHECKING:
    from rich.table import Table

    from kllm.results.schema import RunResult, Series

DETAILS = ("requests", "pairs", "routing", "sweep:layers")  # series that are stored and not printed
# Ends of intervals, and what a table of a load is too narrow for; all are in the result file.
NOT_SHOWN = (
    *("_lo", "_hi", "_p90_ms", "_mean_ms", "e2e_p50_ms", "e2e_p99_ms"),
    *("isl", "osl", "concurrency", "rate_per_s", "total_tokens_per_s", "limit_percent"),
    # Gathering exposes all that it transfers: one of three columns says it.
    *("gather_transfer_s", "replicated_transfer_s"),
    *("gather_exposed_share", "replicated_exposed_share"),
)
# Columns that say what ran.
RAN = ("model", "attention", "cp", "chunk", "link", "state")
SWEPT = ("model", "attention", "cp", "chunk", "link", "prompt_tokens")  # no figures
FINE = "state ok"  # goes without saying
GAPS = (2, 1)  # between two columns: usual, and where a table is wide
NARROWEST = 6  # of a column whose words are cut

Row = dict[str, Any]  # a cell by the name of its column


def print_result(result: "RunResult") -> None:
    """Print the tables of a result, its verdict, its boundary and its notes."""
    about = f"{result.model} ({result.scale}, {result.dtype}), fidelity: {fidelity(result)}"
    say(out, f"{result.name}: {about}")
    for series in result.series:
        # A gain is what a sweep beside it shows already; reports draw it.
        if series.name not in DETAILS and not series.name.startswith("gain:"):
            title, table, footnotes = series_table(series, out.width)
            if legend := LEGENDS.get((result.name, series.name)):
                footnotes.append(legend)
            say(out, "")
            say(out, title, style="bold")
            if table:
                out.print(table)
            for footnote in footnotes:
                say(out, footnote)
    if warning := tiny_warning(result):
        say(out, "")
        say(out, warning, style="yellow")
    for title, text in (
        ("Verdict", result.verdict or ""),
        ("Boundary", result.boundary or ""),
        ("Notes", " ".join(result.notes)),
    ):
        if text:
            say(out, "")
            say(out, title, style="bold")
            for sentence in sentences(text):
                say(out, sentence, lead="- ")


def sentences(text: str) -> list[str]:
    """A paragraph as its sentences: each begins after a full stop and a space."""
    return re.split(r"(?<=\.) ", text)


def series_table(series: "Series", width: int) -> "tuple[str, Table | None, list[str]]":
    """A heading with what all rows share, a table of the rest, and its footnotes.

    Args:
        width: of the terminal, in characters.

    Returns:
        All three; no table where the heading has every figure.
    """
    titles = {column.name: heading(column.name, column.unit) for column in series.columns}
    rows = series.to_dicts()
    footnotes = take_reasons(rows)
    shown = [n for n in titles if n != "reason" and not n.endswith(NOT_SHOWN)]
    shown = [n for n in shown if any(row[n] is not None for row in rows)]
    constant = _alike(shown, rows)
    # All is alike in a single row: there the heading says what ran.
    alike = constant if len(rows) > 1 else {n: constant[n] for n in shown if n in RAN}
    columns = [n for n in shown if n not in alike]
    if set(columns) <= set(SWEPT):
        varied = [titles[n] for n in columns if n not in constant]
        at = f" at every {' and '.join(varied)}" if varied else ""
        return _title(series, titles, constant) + at, None, footnotes
    if len(columns) == 1:  # beside the only thing that differs stand the figures
        alike = {n: cell for n, cell in alike.items() if n in RAN}
        columns = [n for n in shown if n not in alike]
    table = _table({name: titles[name] for name in columns}, rows, width)
    return _title(series, titles, alike), table, footnotes


def _title(series: "Series", titles: Mapping[str, str], alike: Mapping[str, str]) -> str:
    head = heading(series.name)
    said = [f"{titles[n]} {cell}".removeprefix(f"{head} ") for n, cell in alike.items() if cell]
    return ", ".join([head, *(words for words in said if words != FINE)])


def take_reasons(rows: Sequence[Row]) -> list[str]:
    """Take the reasons, which are sentences, out of rows; a mark at the state stands for each.

    Returns:
        The reasons as footnotes.
    """
    marks: dict[str, str] = {}
    for row in rows:
        if reason := row.pop("reason", None):
            mark = marks.setdefault(reason, f"({len(marks) + 1})")
            row["state"] = f"{row['state']} {mark}"
    return [f"{mark} {reason}" for reason, mark in marks.items()]


def _table(titles: Mapping[str, str], rows: Sequence[Row], width: int) -> "Table":
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    cells = {name: [_cell(row[name]) for row in rows] for name in titles}
    texts = [n for n in titles if not all(isinstance(r[n], int | float | None) for r in rows)]
    gap, widths = fit({name: [titles[name], *cells[name]] for name in titles}, texts, width)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
    for name in titles:
        table.add_column(
            titles[name],
            justify="left" if name in texts else "right",
            overflow="fold",
            width=widths.get(name),
        )
    for row in zip(*cells.values(), strict=True):
        table.add_row(*map(escape, row))
    return table


def fit(
    cells: Mapping[str, Sequence[str]], texts: Sequence[str], width: int
) -> tuple[int, dict[str, int]]:
    """The gap between columns, and widths at which words stay whole.

    Args:
        cells: of each column, the heading among them.
        texts: columns whose longest words may be cut if there is no other way.
        width: of the terminal.

    Returns:
        Both; no widths where even that does not help.
    """
    whole = {name: max(map(len, column)) for name, column in cells.items()}
    least = {name: max(map(len, " ".join(column).split())) for name, column in cells.items()}
    gap = next((gap for gap in GAPS if _total(least, gap) <= width), GAPS[-1])
    while _total(least, gap) > width:
        widest = max(texts, key=least.__getitem__, default="")
        if least.get(widest, 0) <= NARROWEST:
            return gap, {}
        least[widest] -= 1
    widths = dict(least)
    for name in cells:
        widths[name] += min(whole[name] - least[name], max(0, width - _total(widths, gap)))
    return gap, widths


def _total(widths: Mapping[str, int], gap: int) -> int:
    return sum(widths.values()) + gap * (len(widths) - 1)


def _alike(names: Sequence[str], rows: Sequence[Row]) -> dict[str, str]:
    """The columns whose cells are the same in all rows, with what these say."""
    found = {name: {_cell(row[name]) for row in rows} for name in names}
    return {name: cells.pop() for name, cells in found.items() if len(cells) == 1}


def _cell(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float() if not 1e4 <= abs(value) < 1e9:
            return f"{value:.4g}"
        case float():
            return f"{value:,.0f}"
        case int() if abs(value) >= 1e4:
            return f"{value:,}"
    return str(value)
