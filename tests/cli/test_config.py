"""Defaults from a TOML file are checked key by key."""

from pathlib import Path
from typing import Annotated

import pytest
import typer

from kllm.cli.defaults import read_defaults
from kllm.errors import ConfigError, DataError

app = typer.Typer()
group = typer.Typer()
app.add_typer(group, name="bench")


@app.command()
def tune(trials: int = 3, slo: list[str] = [], graphs: bool = True) -> None:  # noqa: B006
    """A command with the option types that exist."""


@group.command()
def latency(batch: int = 1, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """A command in a group."""


def read(tmp_path: Path, text: str) -> dict[str, object]:
    path = tmp_path / "kllm.toml"
    path.write_text(text)
    return read_defaults(path, typer.main.get_command(app))


def test_tables_become_defaults_of_commands(tmp_path: Path) -> None:
    text = "[tune]\ntrials = 40\nslo = ['a', 'b']\ngraphs = false\n[bench.latency]\nbatch = 8\n"
    text += "json = true  # by the option's name, not the parameter's\n"
    assert read(tmp_path, text) == {
        "tune": {"trials": 40, "slo": ["a", "b"], "graphs": False},
        "bench": {"latency": {"batch": 8, "as_json": True}},
    }


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[tnue]\ntrials = 4", "'tnue'"),
        ("[tune]\ntrails = 4", "'tune.trails'"),
        ("[tune]\ntrials = 'many'", "'tune.trials'"),
        ("[tune]\ntrials = [1, 2]", "'tune.trials'"),
        ("[tune]\ntrials = true", "'tune.trials'"),
        ("[tune]\ngraphs = 1", "'tune.graphs'"),
        ("trials = 4", "'trials'"),
    ],
)
def test_wrong_key_or_value_is_named(tmp_path: Path, text: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        read(tmp_path, text)


def test_broken_toml_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path, "[tune\n")
