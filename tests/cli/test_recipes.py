"""`kllm recipes check`: a recipe that misses its own SLO does not pass."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kllm.cli.recipes import recipes_app
from kllm.errors import KllmError
from kllm.recipes import schema
from tests.recipes.test_schema import recipe

RUNNER = CliRunner()


def write(folder: Path, attained: float) -> str:
    measured = {"attainment": schema.Measured(unit="", median=attained)}
    made = replace(recipe(), measured=measured, slo=schema.SloLimits(ttft_s=1.0, attainment=0.9))
    schema.save(made, folder / "r.toml")
    return str(folder / "r.toml")


def test_recipe_that_meets_its_slo_passes(tmp_path: Path) -> None:
    done = RUNNER.invoke(recipes_app, ["check", write(tmp_path, 0.95)])
    assert done.exit_code == 0
    assert "good" in done.stdout


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_recipe_that_misses_its_slo_fails(tmp_path: Path, flags: list[str]) -> None:
    done = RUNNER.invoke(recipes_app, ["check", write(tmp_path, 0.62), *flags])
    assert isinstance(done.exception, KllmError)
    assert "62% of requests met the limits and 90% must" in str(done.exception)
    assert "good" not in done.stdout
    if flags:
        assert json.loads(done.stdout)["meets_slo"] is False
