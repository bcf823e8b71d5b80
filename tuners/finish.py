"""The end of a study: the winner against the default in alternation, and what to say about it.

The best of many noisy trials looks better than it is. So it is measured again, in turn with the
default settings in an order that is reversed each round, and only that decides. One that misses
its SLO then makes way for the next best.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from kllm.results.compare import number
from kllm.results.stats import MIN_REPEATS, Judgement, judge
from kllm.tuners.objective import Goal
from kllm.tuners.outcome import Outcome, measure
from kllm.tuners.space import Settings
from kllm.tuners.study import Trial

CANDIDATES = 3  # measured again at most, until one holds its SLO
MIN_PAIRS = MIN_REPEATS  # what an interval needs
MAX_PAIRS = 10  # beyond, an interval hardly gets narrower
TIME_SHARE = 0.25  # of the search's time, for pairs above the fewest
CONFIDENCE = 0.95

Conclusion = Literal["better", "no better", "default only", "default fails", "unconfirmed"]
Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The winner re-measured against the default."""

    conclusion: Conclusion
    trial: Trial | None = None  # what was compared; "unconfirmed": the best of `dropped`
    winner: tuple[Metrics, ...] = ()  # of each repeat
    default: tuple[Metrics, ...] = ()
    judgement: Judgement | None = None
    failure: str = ""
    dropped: tuple[Trial, ...] = ()  # looked better and did not hold up

    @property
    def keeps_default(self) -> bool:
        """Whether the recommendation is the default settings."""
        return self.conclusion in ("no better", "default only", "unconfirmed")

    @property
    def recommended(self) -> tuple[Metrics, ...]:
        """Repeats of what is recommended."""
        alone = self.conclusion == "default only"
        return self.default if self.keeps_default and not alone else self.winner

    def misses_slo(self, goal: Goal) -> bool:
        """Whether what is recommended, for want of better, does not meet the SLO."""
        return bool(self.recommended) and not _meets(goal, self.recommended)


@dataclass(slots=True)
class _Arm:
    """One side: its runs, and how many of them say that it will not do."""

    settings: Settings
    runs: list[Metrics] = field(default_factory=list)
    bad: int = 0  # runs that failed or missed the SLO
    failure: str = ""

    def lost(self, pairs: int) -> bool:
        """Whether the median of `pairs` runs is certain to miss the SLO."""
        return self.bad > pairs / 2


@dataclass(slots=True, kw_only=True)
class _Rig:
    """What every run of the comparison needs."""

    goal: Goal
    run: Callable[[Settings], Outcome]
    pairs: int
    progress: Callable[[Trial, int, int], None]
    asked_to_stop: Callable[[], bool]

    def measure(self, arm: _Arm) -> Metrics | None:
        """Run once; None: it failed."""
        outcome = self.run(arm.settings)
        if outcome.state != "complete":
            arm.failure, arm.bad = outcome.reason, arm.bad + 1
            return None
        metrics = measure(outcome, self.goal.slo)
        arm.runs.append(metrics)
        arm.bad += not self.goal.feasible(metrics)
        return metrics

    def alone(self, trial: Trial, arm: _Arm) -> None:
        """Run one side until it has its repeats or is lost."""
        total = self.pairs - len(arm.runs)
        for done in range(total):
            if arm.failure or arm.lost(self.pairs):
                return
            self.progress(trial, done, total)
            self.measure(arm)
            if self.asked_to_stop():
                return

    def in_turn(self, trial: Trial, base: _Arm, new: _Arm) -> Comparison:
        """Both sides in turn; a side whose answer is certain is not run any more."""
        pairs: list[tuple[Metrics, Metrics]] = []
        done = 0
        # A round more than wanted: a single failure of the default does not spoil the interval.
        for round_ in range(self.pairs + 1):
            if len(new.runs) >= self.pairs and (base.lost(self.pairs) or len(pairs) >= self.pairs):
                break
            sides = (new,) if base.lost(self.pairs) else (base, new)
            left = max(self.pairs - round_, 1) * len(sides)
            found: dict[int, Metrics | None] = {}
            for at, arm in enumerate(sides if round_ % 2 == 0 else sides[::-1]):
                self.progress(trial, done, done + left - at)
                found[id(arm)] = self.measure(arm)
                done += 1
            one, two = found.get(id(base)), found[id(new)]
            if one is not None and two is not None:
                pairs.append((one, two))
            if new.failure or new.lost(self.pairs) or self.asked_to_stop():
                break
        lost = base.lost(self.pairs)
        return conclude(
            self.goal,
            default=base.runs if lost else [one for one, _ in pairs],
            winner=new.runs if lost or new.failure else [two for _, two in pairs],
            failure=new.failure,
        )


def ranked(goal: Goal, trials: Sequence[Trial]) -> list[Trial]:
    """The complete trials that met the SLO, best first by the first objective."""
    first = goal.objectives[0]
    fine = [t for t in trials if t.measured and goal.feasible(t.metrics)]
    return sorted(fine, key=lambda t: -first.sign * t.metrics[first.metric])


def pairs_within(search_s: float, pair_s: float) -> int:
    """Pairs that TIME_SHARE of the search's time allows, within MIN_PAIRS and MAX_PAIRS.

    Fixed before the first one: looking at each and going on until the interval pleases would
    find differences that are not there.
    """
    allowed = math.floor(TIME_SHARE * search_s / pair_s) if pair_s > 0 else MIN_PAIRS
    return min(max(allowed, MIN_PAIRS), MAX_PAIRS)


def compare(
    goal: Goal,
    candidates: Sequence[Trial],
    default: Settings,
    run: Callable[[Settings], Outcome],
    *,
    pairs: int = MIN_PAIRS,
    progress: Callable[[Trial, int, int], None] = lambda trial, done, total: None,
    asked_to_stop: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Measure the best candidate and the default in turn, `pairs` times each.

    A candidate that fails or misses the SLO makes way for the next, for CANDIDATES of them. The
    default ends the row where it is a candidate itself and holds.

    Args:
        goal: its first objective is compared, under its SLO.
        candidates: trials that met the SLO, best first; at least one.
        default: the settings to beat.
        run: measures settings to the end.
        pairs: rounds.
        progress: told the candidate, runs done and runs in all, before each run.
        asked_to_stop: after a round; what there is by then is judged.
    """
    rig = _Rig(goal=goal, run=run, pairs=pairs, progress=progress, asked_to_stop=asked_to_stop)
    base = _Arm(default)
    dropped: list[Trial] = []
    first: Comparison | None = None  # how the best candidate ended
    for trial in candidates[:CANDIDATES]:
        if dict(trial.settings) == dict(default):
            rig.alone(trial, base)
            if not dropped and base.runs and _meets(goal, base.runs):
                return Comparison(
                    conclusion="default only",
                    trial=trial,
                    winner=tuple(base.runs),
                    failure=base.failure,
                )
            if base.runs and _meets(goal, base.runs):
                break
            failure = base.failure or _missed(goal)
            found = Comparison(conclusion="unconfirmed", winner=tuple(base.runs), failure=failure)
        else:
            found = rig.in_turn(trial, base, _Arm(trial.settings))
        if found.conclusion != "unconfirmed":
            return replace(found, trial=trial, dropped=tuple(dropped))
        first = first or replace(found, trial=trial)
        dropped.append(trial)
        if asked_to_stop():
            break
    assert first is not None
    assert first.trial is not None
    if not asked_to_stop():  # it is what remains: its figures are the recommendation's
        rig.alone(first.trial, base)
    return replace(first, default=tuple(base.runs), dropped=tuple(dropped))


def conclude(
    goal: Goal,
    *,
    default: Sequence[Metrics],
    winner: Sequence[Metrics],
    failure: str = "",
) -> Comparison:
    """What the repeats of both sides say."""
    first = goal.objectives[0]
    seen = Comparison(conclusion="no better", winner=tuple(winner), default=tuple(default))
    if failure or not winner or not _meets(goal, winner):
        return replace(seen, conclusion="unconfirmed", failure=failure or _missed(goal))
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


def _missed(goal: Goal) -> str:
    return f"missed {goal.slo} when measured again"


def _meets(goal: Goal, runs: Sequence[Metrics]) -> bool:
    """Whether the SLO holds in the median repeat: one disturbed repeat does not decide."""
    return goal.feasible({"attainment": float(np.median([m["attainment"] for m in runs]))})


def verdict(goal: Goal, comparison: Comparison, words: str) -> str:
    """One sentence, and a second one where better-looking settings were dropped.

    Args:
        goal: names objective and SLO.
        comparison: the result.
        words: the winner's settings.
    """
    text = _verdict(goal, comparison, words)
    count = len(comparison.dropped)
    if comparison.conclusion == "unconfirmed" or not count:
        return text
    many = "1 setting that looked better" if count == 1 else f"{count} settings that looked better"
    return f"{text} {many} did not hold up when measured again."


def _verdict(goal: Goal, comparison: Comparison, words: str) -> str:
    first = goal.objectives[0]
    if comparison.conclusion == "default only":
        return f"No better than default: the default settings have the best {first.name} measured."
    if comparison.conclusion == "unconfirmed":
        return _unconfirmed(goal, comparison, words)
    if comparison.conclusion == "default fails":
        meets = f"{words} meets {goal.slo}, which the default does not"
        return f"Better than default: {meets}{_against(goal, comparison)}."
    judged = comparison.judgement
    assert judged is not None
    if judged.ratio is None or judged.interval is None:
        return f"No better than default: {words} cannot be told apart from it ({judged.reason})."
    low, high = (_percent(end) for end in judged.interval)
    margin = f"{_percent(judged.ratio)} {first.name}, 95 % interval {low} to {high}"
    if comparison.conclusion == "better":
        return f"Better than default: {words} ({margin})."
    return f"No better than default: {words} is not measurably better ({margin})."


def _against(goal: Goal, comparison: Comparison) -> str:
    """Both sides' first objective: one that meets the SLO may have the worse."""
    first = goal.objectives[0]
    sides = [
        [m[first.metric] for m in runs if first.metric in m]  # no request ended: no latency
        for runs in (comparison.winner, comparison.default)
    ]
    if not all(sides):
        return ""
    winner, default = (number(float(np.median(side))) for side in sides)
    return f"; {first.name} {winner} against {default} {first.unit}"


def _unconfirmed(goal: Goal, comparison: Comparison, words: str) -> str:
    others = len(comparison.dropped) - 1
    nor = ", nor did the next best" + (f" {others}" if others > 1 else "") if others > 0 else ""
    text = f"{words} did not hold up ({comparison.failure}){nor}"
    if not comparison.misses_slo(goal):
        return f"No better than default: {text}."
    attained = float(np.median([m["attainment"] for m in comparison.default]))
    return (
        f"Misses its SLO: {text}. What remains are the default settings, with {attained:.0%} of "
        "requests within the limits."
    )


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"
