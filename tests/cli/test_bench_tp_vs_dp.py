"""`kllm bench tp-vs-dp-attention`: what it prints, and how its sizes are chosen."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kllm.bench.base import BENCHES
from kllm.bench.tp_vs_dp_defaults import bench_for, setup_for
from kllm.cli.bench import bench_app
from kllm.config import EngineConfig
from kllm.errors import ConfigError

COMMAND = "tp-vs-dp-attention"
TINY = EngineConfig(model="glm-5.2", scale="tiny", device="cpu")


def run(*args: str) -> str:
    result = CliRunner().invoke(bench_app, [COMMAND, *args], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_capacity_only_prints_the_claim_and_what_h200_gives(tmp_path: Path) -> None:
    text = run("--capacity-only", "--output", str(tmp_path))
    for words in ("2.90M -> 21.24M", "0.60M -> 2.81M", "modelled", "kLLM"):
        assert words in text
    document = json.loads(run("--capacity-only", "--json", "--output", str(tmp_path)))
    assert document["fidelity"] == "modelled"
    assert document["metrics"]["kv_capacity_ratio"]["median"] == pytest.approx(7.32, abs=0.01)


def test_a_run_prints_tables_and_no_gain_twice(tmp_path: Path) -> None:
    sizes = ("--in-flight", "1,2", "--isl", "16", "--osl", "2", "--skewed", "4", "--repeats", "1")
    slices = ("--model", "glm-5.2", "--scale", "tiny", "--device", "cpu", "--fidelity")
    text = run(*sizes, *slices, "rank-slice", "--output", str(tmp_path))
    assert "fidelity: rank-slice" in text
    assert "ISL 16, 1 to 2 in flight" in text
    assert "gain pct" not in text


def test_sizes_follow_the_machine_unless_they_are_given() -> None:
    setup = setup_for(TINY, world=0, fidelity="auto", repeats=0)
    assert (setup.world, setup.fidelity, setup.scale, setup.small) == (2, "real", "tiny", True)
    bench = bench_for(BENCHES[COMMAND].load(), setup, isls=(8,), osl=3)
    assert bench.workload()["isl"] == [8]
    assert bench.workload()["osl"] == 3
    assert max(bench.workload()["in_flight"]) == 16
    four = setup_for(TINY, world=4, fidelity="rank-slice", repeats=7)
    assert (four.world, four.fidelity, four.repeats) == (4, "rank-slice", 7)


def test_an_unknown_fidelity_is_refused() -> None:
    with pytest.raises(ConfigError, match="known: auto, real, rank-slice"):
        setup_for(TINY, world=2, fidelity="modelled", repeats=1)
