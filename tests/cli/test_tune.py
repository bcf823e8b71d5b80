"""`kllm tune`: what cannot be is refused in one sentence; stdout holds results only."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kllm.recipes import schema as recipes

QUICK = ("--model", "deepseek-v4", "--scale", "tiny", "--device", "cpu", "--isl", "8", "--osl", "4")


def kllm(*args: str, home: Path) -> subprocess.CompletedProcess[str]:
    code = "from kllm.cli.app import main; main()"
    env = os.environ | {"KLLM_HOME": str(home), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        env=env,
        cwd=home,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--workload", "chat", "--isl", "64"], "both say what the load is"),
        (["--slo", "ttft=2"], "not a positive time with its unit"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    args: list[str], says: str, tmp_path: Path
) -> None:
    done = kllm("tune", "--model", "deepseek-v4", *args, home=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_without_a_model_there_is_nothing_to_tune(tmp_path: Path) -> None:
    done = kllm("tune", home=tmp_path)
    assert done.returncode == 2
    assert "--model" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_tune_prints_one_document_and_its_recipe_is_accepted(tmp_path: Path) -> None:
    done = kllm(
        "tune",
        *QUICK,
        *("--concurrency", "2", "--requests", "6", "--trials", "2", "--json"),
        *("--output", str(tmp_path / "out")),
        home=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["kind"] == "tune"
    assert document["fidelity"] == "real"
    assert "#0 the default settings: complete" in done.stderr
    (recipe,) = (tmp_path / "out").glob("*.toml")
    assert recipes.load(str(recipe)).workload["isl"] == "8"
    again = kllm(
        "tune", "--resume", "--concurrency", "3", "--output", str(tmp_path / "out"), home=tmp_path
    )
    assert again.returncode == 2
    assert "--concurrency 2 and cannot go on with --concurrency 3" in again.stderr
