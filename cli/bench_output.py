"""A bench's result in a terminal: a table for each series, then what it says in sentences."""

from typing import TYPE_CHECKING, Any

from kllm.cli.console import out

if TYPE_CHECKING:
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

TEXTS = (  # columns of words
    *("state", "reason", "load", "layout", "quantity", "estimate", "against", "what", "way"),
    *("backend", "fidelity", "model", "attention", "link", "kind", "entries", "auto", "claim"),
    "status",
)
NAMES = ("link", "auto")  # columns of single words
RAN = ("model", "attention", "cp", "chunk", "link", "state")  # columns that say what ran


def print_result(result: "RunResult") -> None:
    """Print the tables of a result, its verdict, its boundary and its notes."""
    from rich.markup import escape

    about = f"{result.model} ({result.scale}, {result.dtype}), fidelity: {result.fidelity}"
    out.print(escape(f"{result.name}: {about}"), highlight=False, soft_wrap=True)
    for series in result.series:
        # A gain is what a sweep beside it shows already; reports draw it.
        if series.name not in DETAILS and not series.name.startswith("gain:"):
            heading, table = series_table(series)
            out.print(escape(heading), style="bold", highlight=False, soft_wrap=True)
            out.print(table)
    for sentence in (result.verdict, result.boundary, *result.notes):
        if sentence:
            out.print(escape(sentence), highlight=False, soft_wrap=True)


def series_table(series: "Series") -> tuple[str, Any]:
    """A heading with what all rows share, and a table of the rest."""
    from rich.markup import escape
    from rich.table import Table

    rows = series.rows or ()
    shown = [c for c in series.columns if not c.name.endswith(NOT_SHOWN)]
    # All is alike in a single row: there the heading says what ran.
    alike = {n: cell for n, cell in _alike(series).items() if len(rows) > 1 or n in RAN}
    columns = [c for c in shown if c.name not in alike] or shown
    kept = [series.columns.index(column) for column in columns]
    said = [f"{_heading(c.name)} {alike[c.name]}" for c in shown if alike.get(c.name)]
    table = Table()
    for column in columns:
        numeric = column.name not in TEXTS
        table.add_column(
            _heading(column.name),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=column.name in NAMES,
        )
    for row in rows:
        table.add_row(*(escape(_cell(row[index])) for index in kept))
    return ", ".join([_heading(series.name), *said]), table


def _alike(series: "Series") -> dict[str, str]:
    """The columns whose cells are the same in all rows, with what these say."""
    found = {}
    for index, column in enumerate(series.columns):
        cells = {_cell(row[index]) for row in series.rows or ()}
        if len(cells) == 1:
            found[column.name] = cells.pop()
    return found


def _heading(name: str) -> str:
    name = name.replace("tokens_per_s", "tok/s").replace("_per_s", "/s")
    return name.replace("prompt_tokens", "ISL").replace("_", " ")


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
