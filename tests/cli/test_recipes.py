"""`kllm recipes`: a recipe that misses its own SLO does not pass; export keeps stdout clean."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner

from kllm import hardware
from kllm.cli.recipes import recipes_app
from kllm.errors import CapacityError, KllmError
from kllm.hardware import Gpu
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


@pytest.mark.parametrize(
    ("device", "count", "here", "says"),
    [
        ("cuda", 2, 0, "it needs 2 GPUs and this machine has none"),
        ("cuda", 2, 1, "it needs 2 GPUs and this machine has 1"),
        ("cuda", 1, 0, "it needs 1 GPU and this machine has none"),
        ("cuda", 2, 2, ""),
        ("cuda", 1, 8, ""),
        ("cpu", 1, 0, ""),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_recipe_that_needs_more_gpus_than_are_here_does_not_fit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: Literal["cpu", "cuda"],
    count: int,
    here: int,
    says: str,
    flags: list[str],
) -> None:
    gpu = Gpu(
        name="a GPU", memory_bytes=1 << 36, driver=None, max_sm_clock_mhz=None, capability=(9, 0)
    )
    machine = replace(hardware.detect(), gpus=(gpu,) * here)
    monkeypatch.setattr(hardware, "detect", lambda: machine)
    measured_on = schema.Hardware(device=device, name="another", count=count)
    schema.save(replace(recipe(), hardware=measured_on), tmp_path / "r.toml")
    done = RUNNER.invoke(recipes_app, ["check", str(tmp_path / "r.toml"), *flags])
    if says:
        assert isinstance(done.exception, CapacityError)
        assert f"does not fit this machine: {says};" in str(done.exception)
        assert "good" not in done.stdout
    else:
        assert done.exit_code == 0
    if flags:
        assert json.loads(done.stdout)["fits"] is not bool(says)


def test_export_prints_the_command_and_says_the_rest_on_stderr(tmp_path: Path) -> None:
    done = RUNNER.invoke(recipes_app, ["export", write(tmp_path, 1.0), "--to", "vllm"])
    assert done.exit_code == 0
    assert done.stdout.startswith("vllm serve deepseek-ai/DeepSeek-V4-Flash \\\n    --dtype ")
    first, *_, last = done.stderr.splitlines()
    assert first.startswith("no equivalent: scale: the recipe is of a tiny model")
    assert last.startswith("note: the flags are those of vLLM")
    assert done.output.index(last) < done.output.index("vllm serve")  # before what is copied
    assert "approximate: dtype: " in done.stderr


def test_export_json_is_one_document(tmp_path: Path) -> None:
    done = RUNNER.invoke(recipes_app, ["export", write(tmp_path, 1.0), "--to", "sglang", "--json"])
    document = json.loads(done.stdout)
    assert done.stderr == ""
    assert document["target"].startswith("SGLang")
    assert document["arguments"][:3] == ["python", "-m", "sglang.launch_server"]
    assert "scale" in document["missing"]
    assert "prefix caching" in document["approximate"]
