"""`kllm bench expert-balance` and `--expert-placement`: what is printed, and what is refused."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kllm.cli.bench import bench_app
from kllm.errors import KllmError


def run(*args: str) -> str:
    result = CliRunner().invoke(bench_app, args, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_a_drawn_trace_is_that_of_the_whole_model(tmp_path: Path) -> None:
    args = ("--trace", "zipf:1.0", "--redundant", "0,8", "--repeats", "1", "--json")
    document = json.loads(run("expert-balance", *args, "--output", str(tmp_path)))
    assert (document["scale"], document["fidelity"]) == ("full", "modelled")
    assert document["workload"]["trace"] == "zipf:1"
    assert document["metrics"]["placed.redundant8"]["median"] <= 1.2


def test_a_run_is_counted_and_its_counts_are_not_printed(tmp_path: Path) -> None:
    sizes = ("--ep", "2", "--redundant", "0,2", "--workload", "8:4:2", "--repeats", "1")
    model = ("--model", "glm-5.2", "--scale", "tiny", "--device", "cpu")
    text = run("expert-balance", *sizes, *model, "--output", str(tmp_path))
    assert "weights are random" in text
    assert "sweep:drift" in text
    assert "routing\n" not in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["expert-balance", "--trace", "uniform"], "unknown trace 'uniform'; write real, or zipf"),
        (["expert-balance", "--trace", "zipf:1", "--workload", "chat"], "--workload is what a"),
        (["expert-balance", "--redundant", "8,0"], "--redundant takes rising numbers"),
        (["expert-balance", "--redundant", "few"], "--redundant takes whole numbers"),
        (["expert-balance", "--gpu", "tpu"], "unknown GPU 'tpu'"),
        (["expert-balance", "--model", "llama-3-8b"], "the model has no experts"),
        (["latency", "--expert-placement", "r.json"], "has no ranks to place experts on"),
        (
            ["throughput", "--layout", "dp=2,ep=2", "--expert-placement", "none.json"],
            "cannot read none.json",
        ),
    ],
)
def test_wrong_options_are_one_sentence(args: list[str], words: str, tmp_path: Path) -> None:
    model = [] if "--model" in args else ["--model", "deepseek-v4"]
    where = ["--scale", "tiny", "--device", "cpu", "--output", str(tmp_path)]
    with pytest.raises(KllmError, match=words) as caught:
        CliRunner().invoke(bench_app, [*args, *model, *where], catch_exceptions=False)
    assert "\n" not in str(caught.value)
