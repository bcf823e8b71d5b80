"""The statistics, against noise like that of a shared machine."""

import math

import numpy as np
import pytest

from kllm.results.stats import (
    Array,
    Judgement,
    holm,
    judge,
    judge_exact,
    median_ci,
    median_ratio,
    paired_ratio,
    rank_correlation,
)


def noise(
    rng: np.random.Generator, n: int, sigma: float, correlation: float, process: float
) -> Array:
    """Log-normal AR(1) repeats with one process offset and 5 % of late outliers."""
    logs = np.empty(n)
    logs[0] = rng.normal(0, sigma)
    for i in range(1, n):
        kick = rng.normal(0, sigma * math.sqrt(1 - correlation**2))
        logs[i] = correlation * logs[i - 1] + kick
    outliers = (rng.random(n) < 0.05) * rng.exponential(0.5, n)
    return np.exp(logs + outliers + rng.normal(0, process))


MACHINES = [(0.01, 0.0, 0.005), (0.02, 0.5, 0.01), (0.03, 0.3, 0.01), (0.05, 0.3, 0.015)]


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("n", [10, 20])
def test_equal_runs_raise_at_most_two_false_alarms_in_a_hundred(
    n: int, machine: tuple[float, float, float]
) -> None:
    rng = np.random.default_rng(5)
    alarms = 0
    for _ in range(250):
        base, new = noise(rng, n, *machine), noise(rng, n, *machine)
        alarms += judge(base, new, higher_is_better=False).verdict in ("worse", "better")
    assert alarms <= 5


@pytest.mark.parametrize("n", [12, 20])
@pytest.mark.parametrize("sigma", [0.01, 0.02])
def test_ten_percent_slowdown_is_always_found_on_a_usable_machine(n: int, sigma: float) -> None:
    rng = np.random.default_rng(6)
    for _ in range(100):
        base = noise(rng, n, sigma, 0.0, 0.005)
        new = 1.1 * noise(rng, n, sigma, 0.0, 0.005)
        assert judge(base, new, higher_is_better=False).verdict == "worse"


def test_alternating_pairs_find_ten_percent_under_shared_drift() -> None:
    """Drift of 30 % hits both sides alike: pairs cancel it, two separate lists cannot."""
    rng = np.random.default_rng(7)
    paired = separate = 0
    for _ in range(100):
        drift = np.exp(np.cumsum(rng.normal(0, 0.08, 15)))
        base = drift * noise(rng, 15, 0.02, 0.0, 0.0)
        new = 1.1 * drift * noise(rng, 15, 0.02, 0.0, 0.0)
        found = judge(base, new, higher_is_better=False, paired=True)
        paired += found.verdict == "worse"
        separate += judge(base, new, higher_is_better=False).verdict == "worse"
        equal = drift * noise(rng, 15, 0.02, 0.0, 0.0)
        assert judge(base, equal, higher_is_better=False, paired=True).verdict != "worse"
    assert paired >= 99
    assert separate <= 50


def test_many_metrics_of_equal_runs_stay_quiet() -> None:
    rng = np.random.default_rng(8)
    alarmed = 0
    for _ in range(60):
        single = {
            str(k): judge(
                noise(rng, 12, 0.05, 0.0, 0.01),
                noise(rng, 12, 0.05, 0.0, 0.01),
                higher_is_better=False,
            )
            for k in range(12)
        }
        alarmed += any(j.verdict in ("worse", "better") for j in holm(single).values())
    assert alarmed <= 1


def test_holm_withdraws_the_weaker_of_two_findings() -> None:
    strong = Judgement(verdict="worse", ratio=1.2, p_value=0.001)
    weak = Judgement(verdict="worse", ratio=1.1, p_value=0.008)
    null = Judgement(verdict="same", ratio=1.0, p_value=0.9)
    result = holm({"strong": strong, "weak": weak, "null": null})
    assert [result[k].verdict for k in ("strong", "weak", "null")] == [
        "worse",
        "can't tell",
        "same",
    ]
    assert result["weak"].p_value == pytest.approx(0.016)


@pytest.mark.parametrize(
    ("factor", "higher_is_better", "verdict"),
    [(1.2, False, "worse"), (1.2, True, "better"), (0.8, False, "better"), (0.8, True, "worse"),
     (1.0, True, "same"), (1.002, False, "same")],
)  # fmt: skip
def test_direction_decides_what_worse_means(
    factor: float, higher_is_better: bool, verdict: str
) -> None:
    rng = np.random.default_rng(9)
    base = np.exp(rng.normal(0, 0.005, 20))
    new = factor * np.exp(rng.normal(0, 0.005, 20))
    assert judge(base, new, higher_is_better=higher_is_better).verdict == verdict


def test_certain_change_below_the_margin_is_not_worse() -> None:
    rng = np.random.default_rng(10)
    base = np.exp(rng.normal(0, 0.002, 30))
    found = judge(base, 1.04 * base, higher_is_better=False, paired=True)
    assert found.interval is not None
    assert found.interval[0] > 1.0
    assert found.verdict == "same"


@pytest.mark.parametrize("n", [1, 2, 4])
def test_few_repeats_never_decide(n: int) -> None:
    found = judge([1.0] * n, [9.0] * n, higher_is_better=False)
    assert found.verdict == "can't tell"
    assert found.ratio == pytest.approx(9.0)
    assert "at least 5" in found.reason


def test_identical_quantised_values_do_not_claim_certainty_below_run_to_run_noise() -> None:
    found = judge([100.0] * 10, [102.0] * 10, higher_is_better=False, margin=0.01)
    assert found.verdict == "can't tell"


def test_zeros_are_compared_without_a_ratio() -> None:
    assert judge([0.0] * 6, [0.0] * 6, higher_is_better=True).verdict == "same"
    assert judge([0.0] * 6, [1.0] * 6, higher_is_better=True).verdict == "can't tell"


@pytest.mark.parametrize(("new", "verdict"), [(100, "same"), (96, "same"), (90, "worse")])
def test_exact_counts_need_no_repeats(new: float, verdict: str) -> None:
    assert judge_exact([100], [new], higher_is_better=True, margin=0.05).verdict == verdict


def test_rank_correlation_sees_drift_and_not_white_noise() -> None:
    rng = np.random.default_rng(11)
    white = [rank_correlation(rng.normal(size=20)) for _ in range(200)]
    assert np.median(white) < 0.1
    assert rank_correlation(np.arange(20.0)) == pytest.approx(0.9)


def test_bootstrap_interval_covers_the_true_median() -> None:
    rng = np.random.default_rng(12)
    covered = 0
    for seed in range(200):
        _, interval = median_ci([float(x) for x in rng.normal(5, 1, 25)], seed=seed)
        assert interval is not None
        covered += interval[0] <= 5 <= interval[1]
    assert 180 <= covered <= 200


def test_bootstrap_is_repeatable() -> None:
    values = [1.0, 2.0, 4.0, 8.0, 9.0]
    assert median_ci(values, seed=3) == median_ci(values, seed=3)


def test_the_ratio_of_medians_is_that_of_the_numbers_beside_it() -> None:
    base, new = [1.0, 2.0, 9.0], [3.0, 1.0, 3.0]
    ratio, interval = median_ratio(base, new)
    assert ratio == 3.0 / 2.0  # the median of the pairs' ratios would be 1 / 2
    assert interval is not None
    assert interval[0] <= ratio <= interval[1]
    assert interval == pytest.approx((1 / 3, 3.0))  # of rounds drawn anew: all of one, or another
    assert median_ratio(base[:2], new[:2]) == (2.0 / 1.5, None)
    assert median_ratio(base, [1.5 * b for b in base])[1] == pytest.approx((1.5, 1.5))


def test_paired_ratio_cancels_what_both_share() -> None:
    base = [1.0, 2.0, 4.0, 8.0, 16.0]
    ratio, interval = paired_ratio(base, [1.5 * b for b in base])
    assert ratio == pytest.approx(1.5)
    assert interval == pytest.approx((1.5, 1.5))
