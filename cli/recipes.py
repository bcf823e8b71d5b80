"""`kllm recipes`: list, show, check and export recipes."""

from typing import Annotated

import typer

from kllm.cli.console import err, out, say
from kllm.cli.options import AsJson

recipes_app = typer.Typer(no_args_is_help=True, help="List, show, check and export recipes.")

RecipeName = Annotated[str, typer.Argument(help="A recipe's name, or a TOML file.")]


@recipes_app.command("list")
def list_recipes(
    as_json: AsJson = False,
) -> None:
    """List the recipes that come with kLLM."""
    import json

    from rich.table import Table

    from kllm.recipes.schema import loads, packaged_texts

    recipes = [(name, loads(text, name)) for name, text in sorted(packaged_texts())]
    if as_json:
        rows = [
            {"name": n, "model": r.model, "scale": r.scale, "hardware": r.hardware.name}
            for n, r in recipes
        ]
        typer.echo(json.dumps(rows, indent=1))
        return
    if not recipes:
        say(err, "no recipes are packaged; `kllm tune` makes one for this machine")
        return
    table = Table("name", "model", "scale", "measured on", "fidelity")
    for name, recipe in recipes:
        table.add_row(name, recipe.model, recipe.scale, recipe.hardware.name, recipe.fidelity)
    out.print(table)


@recipes_app.command("show")
def show(
    name: RecipeName,
    as_json: AsJson = False,
) -> None:
    """Print a recipe."""
    import msgspec

    from kllm.recipes.schema import dumps, load

    recipe = load(name)
    text = msgspec.json.encode(recipe).decode() if as_json else dumps(recipe).rstrip()
    typer.echo(text)


@recipes_app.command("check")
def check(
    name: RecipeName,
    as_json: AsJson = False,
) -> None:
    """Check a recipe: readable, settings the engine takes, its SLO met, fit for this machine.

    Exit code 1 when its own figures miss its SLO, 3 when it needs more GPUs than are here.
    """
    import json

    from kllm.errors import CapacityError, KllmError
    from kllm.hardware import detect
    from kllm.recipes.schema import load

    recipe = load(name)
    machine = detect()
    here = ("cuda", machine.gpus[0].name) if machine.gpus else ("cpu", machine.cpu)
    misfits = recipe.misfits(*here)
    shortage = recipe.shortage(len(machine.gpus))
    if as_json:
        document = {
            "name": recipe.name,
            "valid": True,
            "meets_slo": not recipe.missed_slo,
            "fits": not shortage,
            "misfits": misfits,
        }
        typer.echo(json.dumps(document, indent=1))
    if recipe.missed_slo:
        raise KllmError(f"recipe {name} cannot be recommended: {recipe.missed_slo}")
    if shortage:
        raise CapacityError(
            f"recipe {name} does not fit this machine: {shortage}; `kllm tune` finds one that does"
        )
    if as_json:
        return
    say(out, f"{name}: good")
    for reason in misfits:
        say(err, f"note: {reason}; its numbers may differ here")


@recipes_app.command("export")
def export(
    name: RecipeName,
    to: Annotated[str, typer.Option(help="Engine whose command line is printed: vllm or sglang.")],
    as_json: AsJson = False,
) -> None:
    """Print on stderr what vLLM or SGLang cannot keep, then the nearest command line."""
    import json

    from kllm.recipes import export as exports
    from kllm.recipes.schema import load

    made = exports.export(load(name), to)
    if as_json:
        typer.echo(json.dumps(made.document(), indent=1))
        return
    for lead, notes in (("no equivalent", made.missing), ("approximate", made.approximate)):
        for setting, why in notes.items():
            say(err, why, lead=f"{lead}: {setting}: ", style="yellow")
    say(err, f"the flags are those of {made.target}; other releases may differ", lead="note: ")
    typer.echo(made.command)
