"""`kllm tune`: what cannot be is refused in one sentence; stdout holds results only."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kllm.recipes import schema as recipes
from kllm.tuners.storage import open_storage

QUICK = ("--model", "deepseek-v4", "--scale", "tiny", "--device", "cpu", "--isl", "8", "--osl", "4")


# What every machine meets, and few points.
EASY = ("--slo", "ttft=100s,tpot=20s", "--fix", "kv_dtype=auto", "--fix", "page_size=0")


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "kllm", *args]


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"KLLM_HOME": str(home), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def kllm(*args: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args),
        capture_output=True,
        text=True,
        env=environment(home),
        cwd=home,
        timeout=240,
    )


def test_tune_prints_one_document_and_its_recipe_is_accepted(tmp_path: Path) -> None:
    done = kllm(
        "tune",
        *QUICK,
        *("--concurrency", "2", "--requests", "6", "--trials", "2", "--json", *EASY[:2]),
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


@pytest.mark.parametrize(
    ("fidelity", "trials"),
    [("rank-slice", 3), pytest.param("real", 2, marks=pytest.mark.slow)],
    ids=["slices", "processes"],
)
def test_layouts_are_tuned_and_the_report_compares_them(
    fidelity: str, trials: int, tmp_path: Path
) -> None:
    done = kllm(
        *("tune", *QUICK, *EASY, "--concurrency", "4", "--requests", "8", "--world", "4"),
        *("--fidelity", fidelity, "--trials", str(trials), "--json"),
        *("--output", str(tmp_path / "out")),
        home=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["fidelity"] == fidelity
    assert document["layout"]["dp"] * document["layout"]["tp"] >= 1
    assert f"4 ranks, fidelity {fidelity}" in done.stderr
    assert f"good ones per GPU ({fidelity})" in done.stderr
    series = {s["name"]: s for s in document["series"]}
    layouts = [row[0] for row in series["layouts"]["rows"]]
    assert len(set(layouts)) == len(layouts) > 1
    assert series["pareto"]["rows"]
    assert "layout" in document["boundary"]
    (recipe,) = (tmp_path / "out").glob("*.toml")
    config = recipes.load(str(recipe)).config()
    assert config.parallel.world == 4
    assert config.fidelity == "real"  # of the recipe's deployment; its figures say what was run
    assert recipes.load(str(recipe)).fidelity == fidelity


@pytest.mark.slow  # tests/tuners/test_search.py has two processes that share a study
def test_two_processes_share_a_study_and_a_killed_one_loses_nothing(tmp_path: Path) -> None:
    storage = f"journal:{tmp_path / 'study.journal'}"
    where = ("--storage", storage, "--study", "shared", "--trials", "8")
    begin = command(
        *("tune", *QUICK, *EASY, "--concurrency", "2", "--requests", "4", "--world", "2"),
        *(*where, "--output", str(tmp_path / "a")),
    )
    join = command("tune", "--resume", *where, "--output", str(tmp_path / "b"))
    options = {"env": environment(tmp_path), "cwd": tmp_path, "text": True}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    first = subprocess.Popen(begin, **pipes, **options)
    assert first.stderr is not None
    assert any(line.startswith("study shared") for line in first.stderr)
    second = subprocess.Popen(join, **pipes, **options)
    assert second.stderr is not None
    assert any(line.startswith("study shared") for line in second.stderr)
    first.kill()
    first.communicate()
    _, said = second.communicate(timeout=240)
    assert second.returncode == 0, said
    trials = open_storage(storage).get_all_trials(0)
    ran = [t for t in trials if "outcome" in t.user_attrs]
    assert len(ran) == 8
    assert len({repr(t.params) for t in ran}) == 8
    lost = [t for t in trials if t.state.name in ("RUNNING", "WAITING")]
    assert not lost
    for trial in trials:
        if trial.user_attrs.get("retry") and trial.params:
            assert any(trial.params == other.params for other in ran)
