"""Expert placements judged on routing that they have not seen: traces, loads, sentences, costs."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kllm.bench.base import Context
from kllm.bench.expert_balance import ExpertBalanceBench
from kllm.bench.expert_balance_findings import boundary, enough, verdict
from kllm.bench.expert_balance_load import drifts, judge, max_over_mean, rank_loads, rank_shares
from kllm.bench.expert_balance_trace import Trace, Zipf, counted_engine
from kllm.bench.run import run_bench
from kllm.bench.workloads import Lengths, Workload
from kllm.config import EngineConfig
from kllm.errors import ConfigError
from kllm.parallel.expert_counts import ROUTING, MeasuredRouting
from kllm.parallel.expert_placement import balanced, in_order
from tests.bench.rows import rows_of

TINY = EngineConfig(model="deepseek-v4", scale="tiny", device="cpu")
LOAD = Workload(isl=Lengths(5, 20), osl=Lengths(4), num_requests=6, concurrency=3)
MOE_LAYERS, TOP_K = 6, 2  # of the tiny model
ZIPF = Zipf(exponent=1.0, tokens=1 << 13, step_tokens=256)


def trace(*steps: Sequence[int]) -> Trace:
    """A trace of one layer."""
    return Trace((0,), np.array(steps)[:, None])


def test_halves_have_all_steps_and_about_as_many_choices() -> None:
    whole = trace([8, 2], [1, 1], [2, 2], [3, 4])
    first, second = whole.halves()
    assert first.totals().tolist() == [[9, 3]]
    assert second.totals().tolist() == [[5, 6]]
    with pytest.raises(ConfigError, match="one step has no second half"):
        trace([1, 2]).halves()


def test_zipf_choices_are_as_popular_as_the_law_says() -> None:
    """One choice a token: each expert's frequency is within 5 standard errors."""
    found = np.sort(ZIPF.draw(16, top_k=1, seed=0).totals()[0])[::-1]
    expected = 1 / np.arange(1, 17)
    expected /= expected.sum()
    error = np.sqrt(expected * (1 - expected) / ZIPF.tokens)
    assert (np.abs(found / ZIPF.tokens - expected) < 5 * error).all()


def test_zipf_tokens_choose_different_experts() -> None:
    counts = ZIPF.draw(8, top_k=5, seed=0).counts
    assert counts.shape == (32, 1, 8)
    assert (counts.sum(axis=2) == 5 * ZIPF.step_tokens).all()
    assert counts.max() <= ZIPF.step_tokens, "an expert at most once a token"


@pytest.mark.parametrize("text", ["zipf", "zipf:", "zipf:0", "zipf:nan", "uniform", "zipf:1.0.0"])
def test_other_traces_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"zipf|Zipf"):
        Zipf.parse(text)


def test_every_choice_of_a_run_is_counted_once() -> None:
    """Prompt tokens and all output tokens but the last, which no step reads."""
    with counted_engine(Context(config=TINY), LOAD) as counted:
        found = counted.run(LOAD)
        again = counted.run(LOAD)
    tokens = sum(row.isl + row.osl - 1 for row in LOAD.shapes())
    assert found.layers == tuple(range(MOE_LAYERS))
    assert found.totals().sum(axis=1).tolist() == [TOP_K * tokens] * MOE_LAYERS
    assert (found.totals() == again.totals()).all()


def test_loads_are_those_of_the_placement() -> None:
    counts = np.array([[40, 3, 8, 5, 1, 1, 20, 2], [1, 2, 3, 4, 5, 6, 7, 8]])
    placements = [balanced(counts[0].tolist(), 4, 4), in_order(8, 4, 4)]
    loads = rank_loads(counts, np.stack([rank_shares(p) for p in placements]))
    for got, placement, tokens in zip(loads, placements, counts, strict=True):
        assert got.tolist() == pytest.approx(placement.loads(tokens.tolist()))
    assert max_over_mean(loads) == pytest.approx(loads.max(axis=1).sum() / (loads.sum() / 4))


def test_placements_come_from_the_first_half_and_are_judged_on_the_second() -> None:
    busy, same, other = [9, 9, 1, 1], [18, 18, 2, 2], [9, 1, 9, 1]
    kept = judge(trace(busy, same), 0, 2)
    assert kept.in_order.whole == pytest.approx(1.8)
    assert kept.placed.whole == pytest.approx(1.0)
    # Experts 0 and 2, or 0 and 3, now lie together.
    changed = judge(trace(busy, other), 0, 2)
    assert changed.in_order.whole == pytest.approx(1.0)
    assert changed.placed.whole == pytest.approx(1.8)


def test_steps_are_less_even_than_their_sum() -> None:
    judged = judge(trace([2, 2], [3, 0], [0, 3]), 0, 2).in_order
    assert judged.whole == pytest.approx(1.0)
    assert judged.by_step == pytest.approx(2.0)


def test_drift_starts_from_what_was_measured_and_changes_nothing_that_is_even() -> None:
    assert drifts(8) == (0, 2, 4, 8)
    assert drifts(256) == (0, 13, 26, 51, 128, 256)
    judged = judge(ZIPF.draw(64, top_k=2, seed=0), 8, 8)
    assert judged.placed.drift[0] == judged.placed.whole
    assert judged.placed.drift[0] < judged.placed.drift[1] < judged.placed.drift[-1]
    assert judge(trace([4, 4], [4, 4]), 0, 2).placed.drift == (1.0, 1.0)


def test_zipf_routing_is_balanced_with_redundant_experts(tmp_path: Path) -> None:
    """The target: max/mean of at most 1.2 on Zipf(1.0), predicted."""
    bench = ExpertBalanceBench(ep=8, redundant=(0, 8, 16), trace=ZIPF)
    config = replace(TINY, scale="full")
    result, _ = run_bench(bench, Context(config=config, repeats=3), tmp_path)
    assert result.fidelity == "modelled"
    rows = rows_of(result, "sweep")
    assert [row["redundant"] for row in rows] == [0, 8, 16]
    assert all(row["placed"] <= 1.2 < row["in_order"] for row in rows[1:])
    assert rows[0]["added_mib"] == 0 < rows[1]["added_mib"]
    assert rows[2]["added_mib"] == pytest.approx(2 * rows[1]["added_mib"])
    assert rows[0]["kv_mtokens"] > rows[1]["kv_mtokens"] > rows[2]["kv_mtokens"]
    assert result.find_series(ROUTING) is None, "nobody should place a model's experts by these"
    assert len(result.metrics["placed.redundant8"].values) == 3
    assert any("No model ran" in note for note in result.notes)


def test_a_run_stores_the_counts_that_ranks_can_use(tmp_path: Path) -> None:
    bench = ExpertBalanceBench(ep=4, redundant=(0, 4), trace=LOAD)
    result, path = run_bench(bench, Context(config=TINY, repeats=2), tmp_path)
    routing = MeasuredRouting.read(path)
    routing.check(result.model, "tiny")
    ran = [
        TOP_K * sum(row.isl + row.osl - 1 for row in replace(LOAD, seed=seed).shapes())
        for seed in (0, 1)
    ]
    assert {layer: sum(counts) for layer, counts in routing.counts.items()} == dict.fromkeys(
        range(MOE_LAYERS), sum(ran)
    )
    (about,) = rows_of(result, "trace")
    assert (about["trace"], about["fidelity"], about["choices"]) == ("real", "real", ran[0] * 6)
    assert {row["fidelity"] for row in rows_of(result, "sweep")} == {"modelled"}
    assert [row["layer"] for row in rows_of(result, "sweep:layers")] == list(range(MOE_LAYERS))
    assert any("weights are random" in note for note in result.notes)


@pytest.mark.parametrize(
    ("model", "redundant", "words"),
    [
        ("llama-3-8b", (0,), "the model has no experts"),
        ("deepseek-v4", (0, 3), "redundant_experts=4"),
        ("deepseek-v4", (0, 999), "use at most 24"),
    ],
)
def test_what_does_not_fit_the_ranks_is_refused_before_anything_runs(
    tmp_path: Path, model: str, redundant: tuple[int, ...], words: str
) -> None:
    bench = ExpertBalanceBench(ep=4, redundant=redundant, trace=LOAD)
    with pytest.raises(ConfigError, match=words):
        run_bench(bench, Context(config=replace(TINY, model=model)), tmp_path)
    assert not list(tmp_path.iterdir())


def sweep(*placed: float, in_order: float = 2.0) -> list[dict[str, Any]]:
    return [
        {
            "redundant": 8 * i,
            "in_order": in_order,
            "placed": value,
            "added_mib": 100.0 * i,
            "kv_mtokens": 10.0 - i,
        }
        for i, value in enumerate(placed)
    ]


def ageing(*placed: float) -> list[dict[str, Any]]:
    shares = (0, 5, 10, 50)
    return [
        {"moved_pct": share, "in_order": 2.0, "placed_0": value, "placed_8": value}
        for share, value in zip(shares, placed, strict=True)
    ]


@pytest.mark.parametrize(
    ("placed", "redundant", "words"),
    [
        ((1.3, 1.04, 1.01), 8, "From 8 redundant experts on max/mean is at most 1.05; 8 add 100 "),
        ((1.3, 1.1, 1.099), 8, "More than 8 redundant experts gain less than 1%; 8 add 100 MiB "),
        ((1.3, 1.2, 1.1), 16, "16 redundant experts, the most that were tried, leave max/mean at"),
        ((1.02, 1.01, 1.0), 0, "No copies are needed: .* 1.020; 16 add 200 MiB .* 8.0M of 10.0M"),
        ((1.02,), 0, r"No copies are needed: without them max/mean is 1.020\.$"),
    ],
)
def test_the_boundary_is_where_copies_gain_nothing_more(
    placed: tuple[float, ...], redundant: int, words: str
) -> None:
    rows = sweep(*placed)
    assert enough(rows)["redundant"] == redundant
    copies = f"with {redundant} redundant experts" if redundant else "without copies"
    assert f"placed by measured routing {copies}" in verdict(rows, 8)
    assert re.match(words, boundary(rows, []))


def test_the_boundary_says_how_a_placement_ages() -> None:
    text = boundary(sweep(1.3, 1.0), ageing(1.0, 1.2, 1.4, 1.8))
    assert "Once 10 % of the experts have changed their popularity it is 1.400" in text
    assert "at 50 % at least half of the gain is gone" in text
    text = boundary(sweep(1.3, 1.0), ageing(1.0, 1.1, 1.2, 1.3))
    assert "even when all have, more than half of the gain is left" in text


@pytest.mark.parametrize(("in_order", "placed"), [(1.02, 1.01), (1.3, 1.3)])
def test_routing_that_is_even_or_cannot_be_evened_out_gains_nothing(
    in_order: float, placed: float
) -> None:
    rows = sweep(placed, placed, in_order=in_order)
    assert verdict(rows, 8).startswith("Nothing to gain")
    assert "popularity" not in boundary(rows, ageing(1.0, 1.2, 1.4, 1.8))
