"""Runs are stopped on evidence, and runs that could win are not."""

import numpy as np
import pytest

from kllm.tuners.objective import Goal, Slo
from kllm.tuners.outcome import Outcome, Progress, Served, Tick, measure
from kllm.tuners.stopping import (
    CannotWin,
    GrowingQueue,
    MissesSlo,
    Rule,
    replayed,
    rules_for,
    trend_z,
)
from tests.tuners import fake

SLO = Slo(ttft_s=1.0, attainment=0.9)


def served(ttft: float) -> Served:
    return Served(ttft, ttft, 0.01, ttft, 10, 10, True)


def feed(rule: Rule, ttfts: list[float], num_requests: int) -> tuple[int, str]:
    """Requests until the rule stops (0: never), and its reason."""
    for number, ttft in enumerate(ttfts, start=1):
        progress = Progress(
            tick=Tick(number, 10 * number, 0, 0),
            finished=[served(ttft)],
            num_requests=num_requests,
            num_output_tokens=10 * num_requests,
        )
        if reason := rule(progress):
            return number, reason
    return 0, ""


def test_one_miss_too_many_for_the_whole_run_is_certain() -> None:
    # 100 requests may miss 10 times; the eleventh decides.
    at, reason = feed(MissesSlo(SLO, settle=10**9), [0.5] * 50 + [2.0] * 50, 100)
    assert at == 61
    assert "11 of the first 61" in reason


def test_sequential_test_is_earlier_than_counting() -> None:
    rng = np.random.default_rng(0)
    ttfts = [2.0 if miss else 0.5 for miss in rng.random(1000) < 0.4]
    early, _ = feed(MissesSlo(SLO, settle=8), ttfts, 1000)
    late, _ = feed(MissesSlo(SLO, settle=10**9), ttfts, 1000)
    assert 8 < early < late / 4


@pytest.mark.parametrize("seed", range(20))
def test_run_that_meets_its_slo_goes_on(seed: int) -> None:
    misses = np.random.default_rng(seed).random(200) < 0.05
    ttfts = [2.0 if miss else 0.5 for miss in misses]
    if sum(misses) <= 20:
        assert feed(MissesSlo(SLO, settle=8), ttfts, 200) == (0, "")


def queue_run(lengths: list[int]) -> str | None:
    rule = GrowingQueue(every_s=1.0, min_waiting=8)
    for second, waiting in enumerate(lengths):
        progress = Progress(
            tick=Tick(second, 0, 4, waiting),
            finished=[],
            num_requests=100,
            num_output_tokens=100,
        )
        if reason := rule(progress):
            return reason
    return None


def test_growing_queue_is_stopped_and_a_busy_one_is_not() -> None:
    rng = np.random.default_rng(0)
    noise = rng.integers(-3, 4, 100)
    growing = [max(0, int(second + n)) for second, n in enumerate(noise)]
    steady = [max(0, int(12 + n)) for n in noise]
    assert "queue grows" in (queue_run(growing) or "")
    assert queue_run(steady) is None
    assert queue_run([0, 0, 1, 2, 0] * 20) is None


def test_trend_is_zero_without_change() -> None:
    assert trend_z([5] * 20) == 0
    assert trend_z(list(range(20))) > 5
    assert trend_z(list(range(20))[::-1]) < -5


def progress_of(outcome: Outcome, slower: float = 1.0) -> list[Progress]:
    ticks = [t._replace(elapsed_s=t.elapsed_s * slower) for t in outcome.ticks]
    return replayed(
        ticks, (), num_requests=outcome.num_requests, num_output_tokens=outcome.num_output_tokens
    )


@pytest.mark.parametrize(
    ("slower", "stops"), [(1.0, False), (1.1, False), (1.6, True), (4.0, True)]
)
def test_only_runs_that_cannot_win_lose_the_race(slower: float, stops: bool) -> None:
    best = fake.run(fake.space().default)
    rule = CannotWin(best.ticks)
    reasons = [rule(progress) for progress in progress_of(best, slower)]
    assert any(reasons) == stops
    if slower == 4.0:
        first = next(i for i, reason in enumerate(reasons) if reason)
        assert first < len(reasons) / 2


def test_settings_that_end_better_are_never_stopped() -> None:
    """On the whole fake grid: no setting at least as good as the default is cut."""
    space, goal = fake.space(), fake.GOAL
    best = fake.run(space.default)
    known = measure(best, goal.slo)
    cut = 0
    for i in range(len(space.points)):
        outcome = fake.run(space.settings(i))
        stop = rules_for(goal, concurrency=fake.SITE.concurrency, best=best, best_metrics=known)
        steps = replayed(
            outcome.ticks,
            outcome.requests,
            num_requests=outcome.num_requests,
            num_output_tokens=outcome.num_output_tokens,
        )
        stopped = any(stop(step) for step in steps)
        cut += stopped
        if not goal.better(known, measure(outcome, goal.slo)):
            assert not stopped, space.settings(i)
    assert cut > len(space.points) / 4


def test_pareto_studies_do_not_race() -> None:
    best = fake.run(fake.space().default)
    goal = Goal.of(["goodput", "latency"], "ttft=2s")
    stop = rules_for(goal, concurrency=32, best=best, best_metrics=measure(best, goal.slo))
    assert [type(rule) for rule in stop.rules] == [MissesSlo]


def test_open_loop_watches_the_queue() -> None:
    stop = rules_for(fake.GOAL, concurrency=None, best=None, best_metrics={})
    assert [type(rule) for rule in stop.rules] == [MissesSlo, GrowingQueue]
