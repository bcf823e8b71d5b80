"""The sequential test keeps its error chances and stops early."""

import numpy as np
import pytest

from kllm.errors import ConfigError
from kllm.results.sequential import AttainmentTest


def decide(rate: float, target: float, seed: int) -> tuple[str, int]:
    rng = np.random.default_rng(seed)
    test = AttainmentTest(target)
    while test.decision == "undecided" and test.requests < 100_000:
        test.update(bool(rng.random() < rate))
    return test.decision, test.requests


def test_errors_stay_within_their_chances() -> None:
    wrong_miss = sum(decide(0.95, 0.95, s)[0] == "misses" for s in range(300))
    wrong_meet = sum(decide(0.90, 0.95, s)[0] == "meets" for s in range(300))
    assert wrong_miss <= 8  # 1 % of 300, plus three standard errors
    assert wrong_meet <= 27  # 5 %, the same


def test_hopeless_run_stops_after_a_few_requests() -> None:
    for seed in range(20):
        decision, requests = decide(0.2, 0.95, seed)
        assert decision == "misses"
        assert requests <= 30


def test_one_miss_decides_when_all_must_meet() -> None:
    test = AttainmentTest(1.0)
    assert test.update(True) == "undecided"
    assert test.update(False) == "misses"


def test_decision_stays() -> None:
    test = AttainmentTest(1.0)
    test.update(False)
    assert [test.update(True) for _ in range(500)][-1] == "misses"


@pytest.mark.parametrize("target", [0.0, 0.04, 1.2])
def test_impossible_target_is_refused(target: float) -> None:
    with pytest.raises(ConfigError, match="SLO attainment"):
        AttainmentTest(target)
