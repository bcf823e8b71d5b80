"""The end of `kllm tune`: the recommendation, or where an interrupted study goes on."""

from typing import TYPE_CHECKING

import typer

from kllm.cli.console import INTERRUPTED, interrupted, out, say
from kllm.results.headings import heading

if TYPE_CHECKING:
    from rich.table import Table

    from kllm.results.schema import RunResult
    from kllm.tuners.tune import Tuned


def end(tuned: "Tuned", where: str, *, as_json: bool) -> None:
    """Print how a call ended, and end the command with the code for it.

    Args:
        where: options that --resume needs to find the study, as in " --output x".

    Raises:
        KllmError: nothing can be recommended.
        typer.Exit: it was interrupted.
    """
    from kllm.errors import KllmError
    from kllm.results.schema import encode

    if tuned.result is None:
        _print_best(tuned)
        how = f"--resume --study {tuned.study}{where}"
        raise interrupted(f"interrupted; everything is stored. Continue with {how}")
    if as_json:
        typer.echo(encode(tuned.result).decode(), nl=False)
    else:
        _print_result(tuned)
    if tuned.sentence:
        raise KllmError(tuned.sentence)
    if tuned.interrupted:
        raise typer.Exit(INTERRUPTED)


def _print_best(tuned: "Tuned") -> None:
    from kllm.tuners.setup import describe

    space, goal = tuned.setup.space, tuned.setup.goal
    if tuned.best is not None:
        first = goal.objectives[0]
        words = describe(tuned.best.settings, space.default, space.free)
        value = f"{tuned.best.metrics[first.metric]:.4g} {first.unit}"
        say(out, f"best so far: {words}: {first.name} {value} (trial {tuned.best.number})")
    else:
        say(out, "best so far: nothing that meets the SLO")


def _print_result(tuned: "Tuned") -> None:
    assert tuned.result is not None
    assert tuned.files is not None
    result = tuned.result
    if tuned.comparison is not None:
        out.print(_table(result, tuned))
        say(out, f"{result.model} ({result.scale}), fidelity {result.fidelity}: {result.verdict}")
        if result.boundary:
            say(out, f"boundary: {result.boundary}")
    importance = result.find_series("importance")
    if importance is not None and importance.rows:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in importance.rows)
        say(out, f"what mattered: {shares}")
    if tuned.files.recipe is not None:
        say(out, f"recipe: {tuned.files.recipe}")
    say(out, f"result: {tuned.files.result}")
    say(out, f"report: {tuned.files.report}")


def _table(result: "RunResult", tuned: "Tuned") -> "Table":
    """What was recommended, and the default beside it where that was measured as well."""
    from rich.table import Table

    rivalled = any(name.startswith("default.") for name in result.metrics)
    table = Table("", "recommended", "95 % interval", *(["default"] if rivalled else []))
    for name, metric in result.metrics.items():
        if "." in name or metric.median is None:
            continue
        value = f"{metric.median:.4g}"
        if name == "attainment" and tuned.misses_slo:
            value += f" (misses {tuned.setup.goal.slo.attainment:g})"
        ends = f"{metric.ci95[0]:.4g} to {metric.ci95[1]:.4g}" if metric.ci95 else ""
        cells = [heading(name, metric.unit), value, ends]
        if rivalled:
            default = result.metrics.get(f"default.{name}")
            other = default.median if default is not None else None
            cells.append("" if other is None else f"{other:.4g}")
        table.add_row(*cells)
    return table
