"""The search on a replayed grid: close to the best in few trials, sooner than random search."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kllm.config import EngineConfig
from kllm.errors import ConfigError, DataError
from kllm.tuners import grid as grids
from kllm.tuners.grid import Grid, Header
from kllm.tuners.objective import Goal
from kllm.tuners.outcome import measure
from kllm.tuners.quality import evaluate
from kllm.tuners.record_grid import record_grid
from kllm.tuners.replay import Replay
from kllm.tuners.setup import Request
from tests.tuners import fake


def header() -> Header:
    return Header(
        identity={"model": "m"},
        site=fake.SITE,
        base=fake.BASE,
        candidates=fake.space().describe(),
        concurrency=fake.SITE.concurrency,
    )


@pytest.fixture(scope="module")
def grid() -> Grid:
    space = fake.space()
    outcomes = tuple(fake.run(space.settings(i)) for i in range(len(space.points)))
    return Grid(header(), space, outcomes)


def test_search_reaches_the_best_in_few_trials_and_before_random_search(grid: Grid) -> None:
    quality = evaluate(grid, fake.GOAL, seeds=range(3), trials=25, time_share=0.2)
    assert np.median(quality.reached()) >= 0.95
    tuned, random = quality.near_s(quality.tuned), quality.near_s(quality.random)
    assert np.median(tuned) < np.median(random)


def test_search_copes_with_an_slo_that_rules_out_most_points(grid: Grid) -> None:
    strict = Goal.of(["goodput"], "ttft=1s,tpot=9ms")
    fine = [strict.feasible(measure(o, strict.slo)) for o in grid.outcomes]
    assert 0 < sum(fine) < len(fine) / 2
    quality = evaluate(grid, strict, seeds=range(3), trials=25, time_share=0.2)
    assert np.median(quality.reached()) >= 0.95


def test_wrong_cost_model_does_not_keep_the_search_from_the_best(grid: Grid) -> None:
    values = np.array([measure(o, fake.GOAL.slo)["goodput_tokens_per_s"] for o in grid.outcomes])
    logs = -np.log(values + 1)
    wrong = replace(grid.header, predicted=logs.tolist(), predicted_slo=(-logs).tolist())
    quality = evaluate(Grid(wrong, grid.space, grid.outcomes), fake.GOAL, seeds=[0])
    assert np.median(quality.reached()) >= 0.9


def test_replay_of_a_stopped_run_costs_what_it_had_cost_by_then(grid: Grid) -> None:
    replay = Replay(grid)
    settings = grid.space.default
    whole = replay.run(settings)
    assert replay.spent_s == whole.total_s
    cut = replay.run(settings, lambda progress: "x" if progress.tick.elapsed_s > 0.5 else None)
    assert cut.state == "stopped"
    assert 0.5 < cut.run_s < whole.run_s
    assert cut.total_s == pytest.approx(cut.run_s + whole.start_s)
    assert all(row.finished_s <= cut.run_s for row in cut.requests)


def test_recording_goes_on_where_it_was_cut_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl"
    narrow = {name: values[:2] for name, values in header().candidates.items()}
    small = replace(header(), candidates=narrow)
    runs: list[int] = []

    def run(settings):
        runs.append(1)
        if len(runs) == 4:
            raise KeyboardInterrupt
        return fake.run(settings)

    with pytest.raises(KeyboardInterrupt):
        grids.record(path, small, run)
    path.write_bytes(path.read_bytes() + b'{"settings": {"tok')  # killed while it wrote
    with pytest.raises(DataError, match="lacks"):
        grids.load(path)
    grids.record(path, small, run)
    loaded = grids.load(path)
    assert len(runs) == len(loaded.space.points) + 1
    for i, outcome in enumerate(loaded.outcomes):
        expected = fake.run(loaded.space.settings(i))
        assert outcome.requests == expected.requests
        assert outcome.ticks == expected.ticks


def test_recording_over_another_grid_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl"
    narrow = replace(
        header(), candidates={name: values[:1] for name, values in header().candidates.items()}
    )
    grids.record(path, narrow, fake.run)
    with pytest.raises(DataError, match="something else"):
        grids.record(path, replace(narrow, identity={"model": "n"}), fake.run)


def test_damaged_grid_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl"
    path.write_text("{}\n")
    with pytest.raises(DataError, match="line 1"):
        grids.load(path)


def test_a_compressed_recording_is_refused(tmp_path: Path) -> None:
    request = Request(config=EngineConfig(model="deepseek-v4", scale="tiny"))
    with pytest.raises(ConfigError, match="compress it afterwards"):
        record_grid(tmp_path / "grid.jsonl.gz", request, progress=lambda *_: None)
