"""Loads, placement, arithmetic and computed figures of the bench, without running a model."""

from pathlib import Path

import pytest

from kllm.bench.tp_vs_dp_analysis import (
    boundary_sentence,
    change_pct,
    crossings,
    crossover_clause,
    full_from,
    gain_rows,
)
from kllm.bench.tp_vs_dp_capacity import CAPACITY_CLAIM, CapacityBench
from kllm.bench.tp_vs_dp_loads import LONG, mixed
from kllm.bench.tp_vs_dp_serve import PLACEMENTS, Placement
from kllm.config import SchedulerConfig
from kllm.core import Request, SamplingParams
from kllm.results.claims import side_by_side
from kllm.results.schema import RunResult
from kllm.scheduler.scheduler import Scheduler
from tests.bench.rows import rows_of


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    result, path = CapacityBench().run(tmp_path_factory.mktemp("capacity"))
    assert path.exists()
    return result


def test_every_published_capacity_is_reproduced(computed: RunResult) -> None:
    rows = [r for r in rows_of(computed, "published") if r["published_mtokens"] is not None]
    assert len(rows) == 2 + 4 * 5  # the claim's two, and the table of eight H200
    for row in rows:
        # Published with two decimals.
        assert row["computed_mtokens"] == pytest.approx(row["published_mtokens"], abs=0.0051)
        assert row["fidelity"] == "modelled"


def test_the_claim_is_reproduced_at_its_conditions_and_not_on_h200(computed: RunResult) -> None:
    found = {row["conditions"]: row for row in rows_of(computed, "claims")}
    claimed, h200 = found.values()
    assert (claimed["status"], h200["status"]) == ("reproduced", "not reproduced")
    assert "288 GB" in str(claimed["conditions"])
    assert claimed["measured"] == pytest.approx(7.32, abs=0.005)
    assert h200["measured"] == pytest.approx(4.7, abs=0.05)
    assert computed.verdict is not None
    assert "2.90M -> 21.24M" in computed.verdict
    assert "0.60M -> 2.81M" in computed.verdict
    assert computed.claims == (CAPACITY_CLAIM,)
    row = next(row for row in side_by_side([computed]) if row.claim.id == CAPACITY_CLAIM)
    assert (row.status, row.fidelity) == ("reproduced", "modelled")
    assert "288" in row.conditions


def test_kllms_own_layout_stands_beside_the_published_one(computed: RunResult) -> None:
    own = [r for r in rows_of(computed, "published") if r["spread"] == "nothing (kLLM)"]
    assert [row["weights_gb"] for row in own] == [pytest.approx(111.25, abs=0.005)] * 5
    assert own[0]["computed_mtokens"] == pytest.approx(8 * (251.136 - 111.254) / 53.940, rel=1e-3)
    assert any("kLLM" in note for note in computed.notes)


@pytest.mark.parametrize(
    ("xs", "ys", "want"),
    [
        ((8, 32), (-10, 10), [(16, True)]),  # the middle of a logarithmic axis
        ((8, 32), (10, -10), [(16, False)]),
        ((1, 16), (-30, 10), [(8, True)]),
        ((8, 32, 128), (-5, -1, -4), []),
        ((2, 4, 8), (-5, 0, 5), [(4, True)]),
        ((2, 4, 8), (5, 0, 5), []),
        ((1, 4, 16), (-3, 3, -3), [(2, True), (8, False)]),
        ((4,), (-1,), []),
    ],
)
def test_crossings_lie_where_the_gain_changes_sign(
    xs: tuple[float, ...], ys: tuple[float, ...], want: list[tuple[float, bool]]
) -> None:
    found = [(c.at, c.dp_above) for c in crossings(xs, ys)]
    assert found == [(pytest.approx(at), above) for at, above in want]


def sweep(tpot: tuple[tuple[float, float], ...]) -> list[dict[str, float]]:
    return [
        {
            "in_flight": 8 * 4**i,
            "tp_tpot_ms": tp,
            "dp_tpot_ms": dp,
            "tp_ttft_ms": 100.0,
            "dp_ttft_ms": 60.0,
            "tp_output_tokens_per_s": 10.0,
            "dp_output_tokens_per_s": 8.0,
        }
        for i, (tp, dp) in enumerate(tpot)
    ]


def test_less_time_is_a_gain_and_less_output_is_none() -> None:
    rows = sweep(((10, 11), (10, 9)))
    gains = {m: [r[f"{m}_gain_pct"] for r in gain_rows(rows, m)] for m in ("tpot", "output")}
    assert gains["tpot"] == [pytest.approx(-10), pytest.approx(10)]
    assert gains["output"] == [pytest.approx(-20)] * 2
    clause = crossover_clause("tpot", gain_rows(rows, "tpot"))
    assert "with TP below 16 and with request-DP above" in clause


def test_the_boundary_names_the_range_when_nothing_crosses() -> None:
    text = boundary_sentence(512, sweep(((10, 11), (10, 12))), None)
    assert text.startswith("ISL 512, 8 to 32 in flight")
    assert "TPOT is better with TP throughout" in text
    assert "mean TTFT is better with request-DP throughout" in text


def test_the_boundary_says_where_requests_queue_for_kv() -> None:
    full = {"tp_full_from": 20, "dp_full_from": 160}
    text = boundary_sentence(512, sweep(((10, 11), (10, 12))), full)
    assert "full from 20 with TP and from 160 with request-DP" in text
    assert f"{change_pct(100, 60):+.1f} %" in text
    beyond = boundary_sentence(512, sweep(((10, 11), (10, 12))), {**full, "tp_full_from": 33})
    assert "beyond the range" in beyond


def test_a_pool_is_full_with_the_first_request_that_has_no_pages() -> None:
    # Ten pages hold three requests of three pages each.
    assert full_from(160, 1, 16, 40) == 4
    assert full_from(160, 2, 16, 40) == 7
    assert full_from(160, 1, 16, 161) == 1


def test_mixes_have_the_same_number_of_tokens() -> None:
    for mix in ("even", "periodic", "giant"):
        load = mixed(mix, requests=64, isl=512, osl=16, ranks=8)  # type: ignore[arg-type]
        assert load.num_requests == load.concurrency == 64
        total = sum(row.isl for row in load.shapes())
        assert total == pytest.approx(64 * 512, rel=0.01)


@pytest.mark.parametrize(("placement", "least", "most"), [("count", 4, 8), ("tokens", 1, 1.3)])
def test_periodic_lengths_pile_up_by_count_and_not_by_tokens(
    placement: Placement, least: float, most: float
) -> None:
    lengths = [r.isl for r in mixed("periodic", requests=64, isl=64, osl=4, ranks=8).shapes()]
    assert max(lengths) == LONG * min(lengths)
    groups = [
        Scheduler(SchedulerConfig(max_batch=4), num_pages=64, page_size=16, max_model_len=512)
        for _ in range(8)
    ]
    loads = [0] * 8
    for i, length in enumerate(lengths):
        group = PLACEMENTS[placement](groups)
        groups[group].add(Request(f"r{i}", [1] * length, SamplingParams(), 0.0))
        loads[group] += length
    assert least <= max(loads) / (sum(loads) / 8) < most


def test_capacity_is_stored_where_it_is_asked_for(tmp_path: Path) -> None:
    _, path = CapacityBench().run(tmp_path / "c.json", ("kllm",))
    assert path == tmp_path / "c.json"
    assert list(tmp_path.iterdir()) == [path]
