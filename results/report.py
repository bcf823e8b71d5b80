"""Reports made from stored results alone: one HTML file that opens offline, or Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kllm.results.charts import charts_of, comparison_chart
from kllm.results.claims import ClaimRow, side_by_side
from kllm.results.compare import TABLE_COLUMNS, Comparison, number, table_cells
from kllm.results.headings import FIDELITY_MEANS, LEGENDS, fidelity, heading, tiny_warning
from kllm.results.schema import Cell, Column, Fingerprint, Metric, RunResult, Series

MAX_ROWS, MAX_MARKDOWN_ROWS = 60, 40  # of a series; the rest is in the result file


def render_html(results: Sequence[RunResult]) -> str:
    """One self-contained page: verdict, charts, tables, machine. No network, no scripts.

    Args:
        results: in the order they should appear.
    """
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            title=_title(results),
            runs=[_run(result) for result in results],
            claims=[_claim_cells(row) for row in side_by_side(results)],
        )
    )


def render_comparison_html(comparison: Comparison) -> str:
    """One self-contained page with the verdict, a forest plot and the table of a comparison."""
    chart = comparison_chart(comparison)
    return (
        _environment()
        .get_template("compare.html.j2")
        .render(
            title="kLLM comparison",
            comparison=comparison,
            chart=None if chart is None else Markup(chart),
            columns=TABLE_COLUMNS,
            rows=[table_cells(row) for row in comparison.rows],
        )
    )


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("kllm.results", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render_markdown(results: Sequence[RunResult]) -> str:
    """The same without charts, short enough for a comment of a CI system."""
    lines = [f"# {_title(results)}", ""]
    for result in results:
        lines += _markdown_run(result)
    if claims := side_by_side(results):
        lines += ["## Published figures", ""]
        header = ["claim", "published", "measured", "fidelity", "conditions", "status"]
        lines += [*_markdown_table(header, [_claim_cells(row) for row in claims]), ""]
    return "\n".join(lines)


def _title(results: Sequence[RunResult]) -> str:
    names = list(dict.fromkeys(f"{r.name}, {r.model}" for r in results))
    return f"kLLM report: {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "")


def _run(result: RunResult) -> dict[str, Any]:
    return {
        "result": result,
        "warning": tiny_warning(result),
        "verdict": result.verdict or "No verdict was recorded.",
        "fidelity": fidelity(result),
        "means": _means(result),
        "charts": [(title, Markup(svg)) for title, svg in charts_of(result)],
        "metrics": [[name, *_metric_cells(m)] for name, m in result.metrics.items()],
        "tables": [_series_table(result.name, series, MAX_ROWS) for series in result.series],
        "facts": _facts(result),
        "machine": machine_facts(result.fingerprint),
    }


def _means(result: RunResult) -> str:
    return f"{result.fidelity}: {FIDELITY_MEANS[result.fidelity]}"


def _metric_cells(metric: Metric) -> list[str]:
    interval = "–" if metric.ci95 is None else " to ".join(number(v) for v in metric.ci95)
    repeats = f"{len(metric.values)} ({metric.sample})"
    if metric.dropped:
        repeats += f", {metric.dropped} failed"
    better = {"higher": "higher", "lower": "lower", "none": "–"}[metric.direction]
    return [number(metric.median), metric.unit, interval, repeats, better]


def _series_table(bench: str, series: Series, most: int) -> dict[str, Any]:
    rows = series.rows or ()
    # The columns that no row fills would only push the others off the page.
    used = [i for i in range(len(series.columns)) if any(r[i] is not None for r in rows)]
    names = [series.columns[i] for i in used]
    return {
        "name": heading(series.name),
        "legend": LEGENDS.get((bench, series.name), ""),
        "columns": [_column_name(c) for c in names],
        "rows": [[_cell(row[i]) for i in used] for row in rows[:most]],
        "left_out": max(0, len(rows) - most),
    }


def _column_name(column: Column) -> str:
    name = column.name.removeprefix("param.").removeprefix("metric.")
    return heading(name, column.unit)


def _cell(value: Cell) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, int):
        return str(value)
    return number(value) if isinstance(value, float) else value


def _facts(result: RunResult) -> list[tuple[str, str]]:
    facts = [
        ("command", " ".join(result.command)),
        ("started", result.started_at),
        ("duration", f"{number(result.duration_s)} s" if result.duration_s else ""),
        ("kLLM", " ".join(x for x in (result.kllm_version, result.commit) if x)),
        ("model", f"{result.model}, scale {result.scale}, {result.dtype}"),
        ("layout", _pairs(result.layout)),
        ("workload", _pairs(result.workload)),
        ("settings", _pairs(result.settings)),
    ]
    return [(name, value) for name, value in facts if value]


def machine_facts(fingerprint: Fingerprint) -> list[tuple[str, str]]:
    """Name and value of everything known about the machine."""
    gpus: dict[str, int] = {}
    for gpu in fingerprint.gpus:
        words = [gpu.name]
        if gpu.memory_gib is not None:
            words.append(f"{gpu.memory_gib:.0f} GiB")
        if gpu.driver is not None:
            words.append(f"driver {gpu.driver}")
        if gpu.sm_clock_mhz is not None:
            low, high = gpu.sm_clock_mhz
            words.append(f"SM clock seen {low:.0f} to {high:.0f} MHz")
        gpus[", ".join(words)] = gpus.get(", ".join(words), 0) + 1
    memory = fingerprint.memory_gib
    facts = [
        ("GPUs", "; ".join(f"{n} x {text}" for text, n in gpus.items()) or "none"),
        ("link", fingerprint.link or ""),
        ("CPU", fingerprint.cpu or ""),
        ("cores", str(fingerprint.cores or "")),
        ("memory", f"{memory:.1f} GiB" if memory else ""),
        ("system", fingerprint.platform or ""),
        ("Python", fingerprint.python or ""),
        ("libraries", _pairs(fingerprint.libraries)),
    ]
    if fingerprint == Fingerprint():
        return [("machine", "not recorded")]
    return [(name, value) for name, value in facts if value]


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} ({_pairs(value)})" if isinstance(value, Mapping) else f"{key} {value}"
        for key, value in values.items()
        if value is not None and value != ""
    )


def _claim_cells(row: ClaimRow) -> list[str]:
    claim = row.claim
    published = (
        f"{claim.published:+g} {claim.unit}"
        if claim.unit == "%"
        else (f"{claim.published:g} {claim.unit}")
    )
    if row.measured is None:
        return [claim.statement, published, "–", "–", "–", row.status]
    interval = row.measured.ci95
    ends = f" [{number(interval[0])}, {number(interval[1])}]" if interval else ""
    measured = f"{number(row.measured.median)}{ends} {row.measured.unit}"
    status: str = row.status
    if status == "reproduced" and row.fidelity != "real":
        status = f"{status} ({row.fidelity})"
    return [claim.statement, published, measured, row.fidelity or "–", row.conditions, status]


def _markdown_run(result: RunResult) -> list[str]:
    lines = [f"## {result.name}: {result.model} ({result.scale}, {result.dtype})", ""]
    if warning := tiny_warning(result):
        lines += [warning, ""]
    lines += [f"**{result.verdict or 'No verdict was recorded.'}**", ""]
    if result.boundary:
        lines += [f"Boundary: {result.boundary}", ""]
    lines += [f"Fidelity: {fidelity(result)}. {_means(result)}.", ""]
    if result.metrics:
        header = ["metric", "median", "unit", "95 % interval", "repeats", "better"]
        rows = [[name, *_metric_cells(m)] for name, m in result.metrics.items()]
        lines += [*_markdown_table(header, rows), ""]
    for series in result.series:
        table = _series_table(result.name, series, MAX_MARKDOWN_ROWS)
        if table["rows"]:
            lines += [f"### {table['name']}", ""]
            lines += [*_markdown_table(table["columns"], table["rows"]), ""]
        if table["rows"] and table["legend"]:
            lines += [table["legend"], ""]
        if table["left_out"]:
            lines += [f"{table['left_out']} more rows are in the result file.", ""]
    lines += [f"- {note}" for note in result.notes]
    lines += [f"- {name}: {value}" for name, value in _facts(result)]
    lines += [f"- {name}: {value}" for name, value in machine_facts(result.fingerprint)]
    return [*lines, ""]


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return lines + [f"| {' | '.join(row)} |" for row in escaped]
