"""`kllm report`: results, of kLLM and of other load generators, as HTML or Markdown."""

from pathlib import Path
from typing import Annotated

import typer

from kllm.cli.console import err, say


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Result files of kLLM, vLLM, SGLang or aiperf, or folders of them."),
    ],
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one self-contained HTML page here.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown (the default without --html).")
    ] = False,
) -> None:
    """Make a report of stored results."""
    from kllm.results.foreign import load_any
    from kllm.results.report import render_html, render_markdown
    from kllm.results.store import write_atomic

    results = [result for path in paths for result in load_any(path)]
    if html is not None:
        write_atomic(html, render_html(results).encode())
        say(err, f"report: {html}")
    if markdown or html is None:
        typer.echo(render_markdown(results), nl=False)
