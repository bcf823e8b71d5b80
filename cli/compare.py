"""`kllm compare`: the regression gate of a CI pipeline."""

from pathlib import Path
from typing import Annotated

import typer

from kllm.cli.console import err, out, say
from kllm.cli.options import AsJson
from kllm.errors import ConfigError


def compare(
    base: Annotated[Path, typer.Argument(help="Result file or folder of the reference.")],
    new: Annotated[Path, typer.Argument(help="Result file or folder of the candidate.")],
    fail_on: Annotated[
        str, typer.Option(help="Exit with 1 when a metric is worse by more than this.")
    ] = "worse:5%",
    allow_different: Annotated[
        list[str] | None,
        typer.Option(help="Field that may differ, such as 'layout' or 'workload.isl'; repeatable."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one self-contained HTML page here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say for every metric whether the candidate is better, worse or the same, or can't be told.

    Exit code 1 when a metric is worse, 2 when the results cannot be read or compared.
    """
    from rich.markup import escape
    from rich.table import Table

    from kllm.results import compare as comparing
    from kllm.results.foreign import load_any
    from kllm.results.report import render_comparison_html
    from kllm.results.store import write_atomic

    if markdown and as_json:
        raise ConfigError("--markdown and --json exclude each other; choose one")
    found = comparing.compare(
        load_any(base),
        load_any(new),
        fail_on=comparing.FailOn.parse(fail_on),
        allow_different=allow_different or (),
    )
    if as_json:
        typer.echo(comparing.to_json(found))
    elif markdown:
        typer.echo(comparing.render_markdown(found), nl=False)
    else:
        table = Table(*comparing.TABLE_COLUMNS)
        for row in found.rows:
            table.add_row(*(escape(cell) for cell in comparing.table_cells(row)))
        say(out, f"{found.verdict} Fidelity: {found.fidelity}.")
        out.print(table)
        for note in (*(f"Allowed: {d}." for d in found.allowed), *found.notes):
            say(out, note)
    if html is not None:
        write_atomic(html, render_comparison_html(found).encode())
        say(err, f"report: {html}")
    if found.regressed:
        raise typer.Exit(1)
