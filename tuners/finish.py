"""The end of a study: the winner against the default in alternation, and what to say about it.

The best of many noisy trials looks better than it is. So it is measured again, in turn with the
default settings in an order that is reversed each round, and only that decides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from kllm.results.stats import Judgement, judge
from kllm.tuners.objective import Goal
from kllm.tuners.outcome import Outcome, measure
from kllm.tuners.space import Settings
from kllm.tuners.study import Trial

PAIRS = 6  # one more than an interval needs, so that a single failure does not spoil it
CONFIDENCE = 0.95

Conclusion = Literal["better", "no better", "default only", "default fails", "unconfirmed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The winner re-measured against the default."""

    conclusion: Conclusion
    winner: tuple[Mapping[str, float], ...] = ()  # metrics of each repeat
    default: tuple[Mapping[str, float], ...] = ()
    judgement: Judgement | None = None
    failure: str = ""

    @property
    def keeps_default(self) -> bool:
        """Whether the recommendation is the default settings."""
        return self.conclusion in ("no better", "default only", "unconfirmed")


@dataclass(slots=True)
class _Arm:
    settings: Settings
    runs: list[Mapping[str, float]] = field(default_factory=list)
    failure: str = ""


def compare(
    goal: Goal,
    winner: Trial,
    default: Settings,
    run: Callable[[Settings], Outcome],
    *,
    pairs: int = PAIRS,
    progress: Callable[[int, int], None] = lambda done, total: None,
    asked_to_stop: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Measure winner and default in turn, `pairs` times each.

    Args:
        goal: its first objective is compared, under its SLO.
        winner: the best trial.
        default: the settings to beat.
        run: measures settings to the end.
        pairs: rounds.
        progress: told runs done and runs in all.
        asked_to_stop: after a round; what there is by then is judged.
    """
    a, b = _Arm(default), _Arm(winner.settings)
    if dict(winner.settings) == dict(default):
        for done in range(pairs):
            progress(done, pairs)
            _measure(goal, b, run)
            if asked_to_stop():
                break
        return Comparison(conclusion="default only", winner=tuple(b.runs), failure=b.failure)
    for round_ in range(pairs):
        progress(2 * round_, 2 * pairs)
        for arm in (a, b) if round_ % 2 == 0 else (b, a):
            _measure(goal, arm, run)
        if asked_to_stop() or b.failure:
            break
    return conclude(goal, default=a.runs, winner=b.runs, failure=b.failure)


def _measure(goal: Goal, arm: _Arm, run: Callable[[Settings], Outcome]) -> None:
    outcome = run(arm.settings)
    if outcome.state == "complete":
        arm.runs.append(measure(outcome, goal.slo))
    else:
        arm.failure = outcome.reason


def conclude(
    goal: Goal,
    *,
    default: Sequence[Mapping[str, float]],
    winner: Sequence[Mapping[str, float]],
    failure: str = "",
) -> Comparison:
    """What the repeats of both sides say."""
    first = goal.objectives[0]
    seen = Comparison(conclusion="no better", winner=tuple(winner), default=tuple(default))
    if failure or not winner or not _meets(goal, winner):
        failure = failure or f"measured again, it misses {goal.slo}"
        return replace(seen, conclusion="unconfirmed", failure=failure)
    if not default or not _meets(goal, default):
        return replace(seen, conclusion="default fails")
    count = min(len(default), len(winner))
    judgement = judge(
        [m[first.metric] for m in default[:count]],
        [m[first.metric] for m in winner[:count]],
        higher_is_better=first.sign > 0,
        paired=True,
        margin=0.0,
        confidence=CONFIDENCE,
    )
    better = judgement.verdict == "better"
    return replace(seen, conclusion="better" if better else "no better", judgement=judgement)


def _meets(goal: Goal, runs: Sequence[Mapping[str, float]]) -> bool:
    """Whether the SLO holds in the median repeat: one disturbed repeat does not decide."""
    return goal.feasible({"attainment": float(np.median([m["attainment"] for m in runs]))})


def verdict(goal: Goal, comparison: Comparison, words: str) -> str:
    """One sentence.

    Args:
        goal: names objective and SLO.
        comparison: the result.
        words: the winner's settings.
    """
    first = goal.objectives[0]
    if comparison.conclusion == "default only":
        return f"No better than default: the default settings have the best {first.name} measured."
    if comparison.conclusion == "unconfirmed":
        fine = not comparison.default or _meets(goal, comparison.default)
        also = "" if fine else f"; the default settings miss {goal.slo} as well"
        return f"No better than default: {words} did not hold up ({comparison.failure}){also}."
    if comparison.conclusion == "default fails":
        return f"Better than default: {words} meets {goal.slo}, which the default does not."
    judged = comparison.judgement
    assert judged is not None
    if judged.ratio is None or judged.interval is None:
        return f"No better than default: {words} cannot be told apart from it ({judged.reason})."
    low, high = (_percent(end) for end in judged.interval)
    margin = f"{_percent(judged.ratio)} {first.name}, 95 % interval {low} to {high}"
    if comparison.conclusion == "better":
        return f"Better than default: {words} ({margin})."
    return f"No better than default: {words} is not measurably better ({margin})."


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"
