"""`kllm config`: what the config file and the KLLM_* variables say."""

from pathlib import Path
from typing import Annotated

import typer

from kllm.cli.console import out, say
from kllm.errors import ConfigError

config_app = typer.Typer(no_args_is_help=True, help="Check the config file; list the variables.")


@config_app.command("check")
def check(
    ctx: typer.Context,
    path: Annotated[
        Path | None, typer.Argument(help="TOML file; default: the one in force.")
    ] = None,
) -> None:
    """Check every key and value of a config file."""
    from kllm.cli.defaults import config_path, read_defaults

    path = path or config_path()
    if path is None:
        raise ConfigError("no config file: set KLLM_CONFIG, or put a kllm.toml into this folder")
    defaults = read_defaults(path, ctx.find_root().command)
    count = _leaves(defaults)
    say(out, f"{path}: good, {count} default{'' if count == 1 else 's'}")


@config_app.command("env")
def show_env() -> None:
    """List the KLLM_* variables that are not options."""
    from rich.table import Table

    from kllm import env

    table = Table("variable", "default", "meaning")
    for variable in env.VARIABLES:
        table.add_row(variable.name, variable.default or "-", variable.meaning)
    out.print(table)
    say(out, "Every option has one as well: KLLM_TUNE_TRIALS is `kllm tune --trials`.")


def _leaves(tree: dict[str, object]) -> int:
    return sum(_leaves(v) if isinstance(v, dict) else 1 for v in tree.values())
