"""SLOs are read strictly; meeting the SLO comes before being fast."""

import math

import pytest

from kllm.errors import ConfigError
from kllm.tuners.objective import Goal, Slo
from kllm.tuners.outcome import Outcome, Served, Tick, measure

GOAL = Goal.of(["goodput"], "ttft=1s,tpot=50ms")


@pytest.mark.parametrize(
    ("text", "ttft", "tpot", "share"),
    [
        ("ttft=2s,tpot=50ms", 2.0, 0.05, 0.9),
        ("tpot=500us", math.inf, 0.0005, 0.9),
        ("ttft = 1.5s , attainment=99%", 1.5, math.inf, 0.99),
        ("ttft=.5s,attainment=1", 0.5, math.inf, 1.0),
    ],
)
def test_slo_is_read_with_units(text: str, ttft: float, tpot: float, share: float) -> None:
    slo = Slo.parse(text)
    assert (slo.ttft_s, slo.tpot_s, slo.attainment) == pytest.approx((ttft, tpot, share))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ttft=2", "with its unit"),
        ("ttft=-1s", "positive time"),
        ("ttft=0ms", "positive time"),
        ("itl=5ms", "'itl' is unknown"),
        ("ttft=1s,ttft=2s", "given twice"),
        ("attainment=0.9", "no limit"),
        ("ttft=1s,attainment=2", "0.1 to 1"),
        ("", "unknown"),
    ],
)
def test_slo_that_cannot_be_read_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Slo.parse(text)


def test_goodput_has_a_default_slo_and_throughput_has_none() -> None:
    assert Goal.of([], None).slo.tpot_s == pytest.approx(0.05)
    assert not Goal.of(["throughput"], None).slo.limited


@pytest.mark.parametrize(
    ("names", "says"), [(["speed"], "known: goodput"), (["latency"] * 2, "twice")]
)
def test_objectives_that_cannot_be_are_refused(names: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Goal.of(names, None)


def run_of(ttfts: list[float], state: str = "complete") -> Outcome:
    rows = tuple(Served(t, t, 0.01, t, 10, 20, True) for t in ttfts)
    return Outcome(
        state=state,  # type: ignore[arg-type]
        run_s=10.0,
        num_requests=len(rows),
        requests=rows,
        ticks=(Tick(10.0, 40, 0, 0),),
    )


def test_goodput_counts_tokens_of_requests_that_met_the_slo() -> None:
    metrics = measure(run_of([0.5, 0.5, 2.0, 0.5]), GOAL.slo)
    assert metrics["output_tokens_per_s"] == 8.0
    assert metrics["goodput_tokens_per_s"] == 6.0
    assert metrics["attainment"] == 0.75
    assert metrics["ttft_p50_ms"] == 500.0
    assert not GOAL.feasible(metrics)


def test_stopped_run_counts_the_tokens_made_so_far() -> None:
    metrics = measure(run_of([0.5, 2.0], state="stopped"), GOAL.slo)
    assert metrics["output_tokens_per_s"] == 4.0
    assert metrics["goodput_tokens_per_s"] == 2.0


def test_failed_run_has_no_metrics() -> None:
    assert measure(Outcome(state="failed", reason="x"), GOAL.slo) == {}


def metrics(goodput: float, attainment: float, e2e: float = 1.0) -> dict[str, float]:
    return {"goodput_tokens_per_s": goodput, "attainment": attainment, "e2e_p50_ms": e2e}


def test_meeting_the_slo_beats_any_goodput() -> None:
    assert GOAL.better(metrics(10, 0.95), metrics(99, 0.5))
    assert not GOAL.better(metrics(99, 0.5), metrics(10, 0.95))
    assert GOAL.better(metrics(11, 0.9), metrics(10, 1.0))


def test_among_those_that_miss_the_higher_attainment_is_better() -> None:
    assert GOAL.better(metrics(1, 0.6), metrics(50, 0.5))


def test_pareto_front_keeps_what_nothing_dominates() -> None:
    goal = Goal.of(["goodput", "latency"], "ttft=1s")
    runs = [metrics(10, 1, 5), metrics(20, 1, 9), metrics(9, 1, 6), metrics(30, 0.1, 1)]
    assert goal.front(runs) == [0, 1]
