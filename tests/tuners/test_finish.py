"""The winner is judged by repeats against the default, and its boundary by stored requests."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kllm.tuners import boundary
from kllm.tuners.finish import (
    MAX_PAIRS,
    MIN_PAIRS,
    Comparison,
    compare,
    conclude,
    pairs_within,
    ranked,
    verdict,
)
from kllm.tuners.importance import importance
from kllm.tuners.objective import Goal
from kllm.tuners.outcome import Outcome, measure, to_plain
from kllm.tuners.study import Trial
from tests.tuners import fake

GOAL = fake.GOAL
WORDS = "max_batch=8"


def runs(values: Sequence[float], attainment: float = 1.0) -> list[dict[str, float]]:
    return [{"goodput_tokens_per_s": v, "attainment": attainment} for v in values]


NOISE = (1.0, 1.004, 0.996, 1.002, 0.998, 1.001)


def test_clear_gain_is_better_with_its_interval() -> None:
    found = conclude(
        GOAL, default=runs([100 * n for n in NOISE]), winner=runs([120 * n for n in NOISE[::-1]])
    )
    assert found.conclusion == "better"
    assert found.judgement is not None
    assert found.judgement.interval is not None
    assert found.judgement.interval[0] > 1.15
    assert verdict(GOAL, found, WORDS).startswith("Better than default: max_batch=8 (+20")


def test_gain_within_the_noise_is_no_better() -> None:
    rough = (1.0, 1.2, 0.8, 1.1, 0.9, 1.05)
    found = conclude(
        GOAL, default=runs([100 * n for n in rough]), winner=runs([103 * n for n in rough[::-1]])
    )
    assert found.conclusion == "no better"
    assert found.keeps_default
    assert "not measurably better" in verdict(GOAL, found, WORDS)


def test_default_that_misses_the_slo_is_beaten_by_what_meets_it() -> None:
    found = conclude(GOAL, default=runs([200] * 6, 0.5), winner=runs([100] * 6))
    assert found.conclusion == "default fails"
    assert not found.keeps_default
    said = verdict(GOAL, found, WORDS)
    assert said.endswith("which the default does not; goodput 100 against 200 tokens/s.")
    failed = conclude(GOAL, default=[], winner=runs([100] * 6))
    assert verdict(GOAL, failed, WORDS).endswith("which the default does not.")


def test_winner_that_does_not_hold_up_is_not_recommended() -> None:
    found = conclude(GOAL, default=runs([100] * 6), winner=runs([200] * 6, 0.5))
    assert found.conclusion == "unconfirmed"
    assert found.keeps_default
    assert "did not hold up" in verdict(GOAL, found, WORDS)


def test_one_disturbed_repeat_does_not_decide() -> None:
    winner = [*runs([120 * n for n in NOISE[:5]]), *runs([5], 0.2)]
    found = conclude(GOAL, default=runs([100 * n for n in NOISE]), winner=winner)
    assert found.conclusion != "unconfirmed"


def trial(number: int, **settings) -> Trial:
    full = fake.space().default | settings
    outcome = fake.run(full)
    return Trial(
        number=number,
        settings=full,
        state="complete",
        reason="",
        metrics=measure(outcome, GOAL.slo),
        stored=to_plain(outcome),
    )


def test_both_sides_run_in_turn_with_the_order_reversed() -> None:
    order: list[int] = []

    def run(settings) -> Outcome:
        order.append(int(settings["max_batch"]))
        return fake.run(settings)

    found = compare(GOAL, [trial(3, max_batch=8)], fake.space().default, run, pairs=4)
    assert order == [64, 8, 8, 64, 64, 8, 8, 64]
    assert len(found.winner) == len(found.default) == 4


def test_default_as_winner_is_measured_alone() -> None:
    found = compare(GOAL, [trial(0)], fake.space().default, fake.run)
    assert found.conclusion == "default only"
    assert len(found.winner) == MIN_PAIRS


def test_winner_that_fails_again_is_not_recommended() -> None:
    def run(settings) -> Outcome:
        if settings["max_batch"] == 8:
            return Outcome(state="failed", reason="out of device memory")
        return fake.run(settings)

    found = compare(GOAL, [trial(3, max_batch=8)], fake.space().default, run)
    assert found.conclusion == "unconfirmed"
    assert found.failure == "out of device memory"


def test_boundary_is_where_another_setting_takes_over() -> None:
    # A small batch decodes faster: it wins under tight limits although it is slower overall.
    fast, wide = trial(0, max_batch=4), trial(1)
    goal = Goal.of(["goodput"], "ttft=2s,tpot=30ms")
    rows = boundary.sweep(goal, wide, [fast, wide])
    low, high = boundary.region(rows) or (0, 0)
    assert 0.25 < low < 1
    assert high == pytest.approx(4)
    words = boundary.statement(goal, rows, fake.space().default, fake.space().free)
    assert "with tighter limits max_batch=4 (trial 0) is better" in words


def test_boundary_without_a_crossover_says_the_range() -> None:
    goal = Goal.of(["throughput"], "ttft=1000s")
    only = trial(0)
    rows = boundary.sweep(goal, only, [only])
    words = boundary.statement(goal, rows, fake.space().default, fake.space().free)
    assert "no crossover within the swept range of 0.25 to 4 times" in words


def test_importance_finds_what_moves_the_score() -> None:
    space = fake.space()
    picks = range(0, len(space.points), 23)
    measured = [(i, measure(fake.run(space.settings(i)), GOAL.slo)) for i in picks]
    shares = importance(space, GOAL, measured)
    assert sum(shares.values()) == pytest.approx(1)
    assert next(iter(shares)) in ("max_batch", "token_budget")
    assert shares["page_size"] < 0.1


def test_too_few_trials_have_no_importance() -> None:
    space = fake.space()
    assert importance(space, GOAL, [(0, measure(fake.run(space.default), GOAL.slo))]) == {}


def test_verdict_says_when_the_default_misses_the_slo_as_well() -> None:
    goal = Goal.of(["goodput"], "ttft=1s")
    missed = {"attainment": 0.5}
    seen = Comparison(conclusion="unconfirmed", default=(missed,), failure="it misses")
    said = verdict(goal, seen, "max_batch=4")
    assert said.startswith("Misses its SLO")
    assert "What remains are the default settings, with 50%" in said
    met = Comparison(conclusion="unconfirmed", default=({"attainment": 1.0},), failure="it misses")
    assert verdict(goal, met, "max_batch=4").startswith("No better than default")


class Machine:
    """Runs of the fake engine, of which some settings miss every limit when measured again."""

    def __init__(self, *slow: int) -> None:
        self.slow = slow  # values of max_batch
        self.order: list[int] = []

    def run(self, settings) -> Outcome:
        self.order.append(int(settings["max_batch"]))
        outcome = fake.run(settings)
        if settings["max_batch"] not in self.slow:
            return outcome
        late = tuple(row._replace(ttft_s=99.0) for row in outcome.requests)
        return replace(outcome, requests=late)


def test_next_best_takes_the_place_of_a_winner_that_misses_its_slo() -> None:
    machine = Machine(8)
    rivals = [trial(3, max_batch=8), trial(4, max_batch=16), trial(5, max_batch=4)]
    found = compare(GOAL, rivals, fake.space().default, machine.run)
    assert found.trial is rivals[1]
    assert found.dropped == (rivals[0],)
    assert found.conclusion in ("better", "no better")
    assert machine.order.count(8) == 3  # enough for the median of five
    assert 4 not in machine.order
    assert "1 setting that looked better did not hold up" in verdict(GOAL, found, WORDS)


def test_candidates_are_bounded_and_the_default_remains() -> None:
    machine = Machine(1, 2, 4, 8, 16, 64)
    rivals = [trial(n, max_batch=2**n) for n in range(5)]
    found = compare(GOAL, rivals, fake.space().default, machine.run)
    assert found.conclusion == "unconfirmed"
    assert [t.number for t in found.dropped] == [0, 1, 2]
    assert found.misses_slo(GOAL)
    assert machine.order.count(64) == 3  # certain to miss: not measured any more
    assert "nor did the next best 2" in verdict(GOAL, found, WORDS)


def test_default_that_holds_ends_the_row() -> None:
    machine = Machine(8)
    rivals = [trial(3, max_batch=8), trial(0), trial(5, max_batch=4)]
    found = compare(GOAL, rivals, fake.space().default, machine.run)
    assert found.conclusion == "unconfirmed"
    assert len(found.default) == MIN_PAIRS
    assert not found.misses_slo(GOAL)
    assert 4 not in machine.order


def test_default_that_misses_is_not_run_any_more() -> None:
    machine = Machine(64)
    found = compare(GOAL, [trial(3, max_batch=8)], fake.space().default, machine.run)
    assert found.conclusion == "default fails"
    assert machine.order.count(64) == 3
    assert len(found.winner) == MIN_PAIRS


def test_failed_run_of_the_default_costs_its_pair_and_nothing_else() -> None:
    calls = {"default": 0}

    def run(settings) -> Outcome:
        if settings["max_batch"] == 64:
            calls["default"] += 1
            if calls["default"] == 2:
                return Outcome(state="failed", reason="out of device memory")
        return fake.run(settings)

    found = compare(GOAL, [trial(3, max_batch=8)], fake.space().default, run)
    assert len(found.winner) == len(found.default) == MIN_PAIRS
    assert found.judgement is not None
    assert found.judgement.interval is not None


@pytest.mark.parametrize(
    ("search_s", "pair_s", "pairs"),
    [(0, 1, MIN_PAIRS), (300, 28, MIN_PAIRS), (320, 10, 8), (9000, 10, MAX_PAIRS)],
)
def test_pairs_follow_the_time_of_the_search(search_s: float, pair_s: float, pairs: int) -> None:
    assert pairs_within(search_s, pair_s) == pairs


def test_ranking_leaves_out_what_missed_the_slo() -> None:
    best, worse = trial(0), trial(1, max_batch=1)
    missed = replace(best, number=2, metrics={**best.metrics, "attainment": 0.1})
    fine = [t for t in (worse, missed, best) if t is missed or GOAL.feasible(t.metrics)]
    order = [t.number for t in ranked(GOAL, fine)]
    assert 2 not in order
    assert order[0] == 0


def test_progress_counts_every_run() -> None:
    told: list[tuple[int, int]] = []
    compare(
        GOAL,
        [trial(3, max_batch=8)],
        fake.space().default,
        fake.run,
        progress=lambda trial, done, total: told.append((done, total)),
    )
    assert told == [(n, 2 * MIN_PAIRS) for n in range(2 * MIN_PAIRS)]
