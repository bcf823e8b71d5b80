"""Published figures stand beside what was measured, and nothing is dressed up."""

from dataclasses import replace

import pytest

from kllm.results.claims import CLAIMS, side_by_side
from kllm.results.schema import Metric, RunResult
from tests.results import samples

RING = "ring-vs-allgather/throughput_change_pct"


def ring(change: float, fidelity: str = "real") -> RunResult:
    metric = Metric.of([change - 1, change, change + 1], unit="%", direction="higher")
    return samples.bench(
        name="ring-vs-allgather",
        claims=(RING,),
        fidelity=fidelity,
        scale="full",
        metrics={"throughput_change_pct": metric},
    )


def test_ids_are_unique() -> None:
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)


@pytest.mark.parametrize(("change", "status"), [(17.0, "reproduced"), (16.5, "not reproduced")])
def test_median_decides_and_a_wide_interval_does_not_help(change: float, status: str) -> None:
    (row,) = side_by_side([ring(change)])
    assert row.status == status
    assert row.fidelity == "real"


@pytest.mark.parametrize(("change", "status"), [(-30.0, "reproduced"), (-20.0, "not reproduced")])
def test_reduction_is_reproduced_by_a_larger_reduction(change: float, status: str) -> None:
    metric = Metric.of([change] * 3, unit="%", direction="lower")
    result = samples.bench(
        name="tp-vs-dp-attention",
        scale="full",
        claims=("tp-vs-dp-attention/ttft_mean_change_pct",),
        metrics={"ttft_mean_change_pct": metric},
    )
    rows = {row.claim.metric: row.status for row in side_by_side([result])}
    assert rows == {"kv_capacity_ratio": "not measured", "ttft_mean_change_pct": status}


def test_run_that_does_not_answer_to_a_claim_is_not_taken_for_it() -> None:
    (row,) = side_by_side([samples.bench(name="ring-vs-allgather")])
    assert row.status == "not measured"


def test_all_measurements_are_shown_and_real_ones_first() -> None:
    results = [ring(40.0, "modelled"), ring(-3.0), ring(30.0, "rank-slice"), ring(20.0)]
    assert [(row.fidelity, row.status) for row in side_by_side(results)] == [
        ("real", "not reproduced"),
        ("real", "reproduced"),
        ("rank-slice", "reproduced"),
        ("modelled", "reproduced"),
    ]


def test_a_tiny_model_proves_nothing() -> None:
    (row,) = side_by_side([replace(ring(40.0), scale="tiny")])
    assert row.status == "not comparable"


def test_bench_without_published_figures_has_no_rows() -> None:
    assert side_by_side([samples.bench()]) == []
