"""How good a search is: replayed on a recorded grid, against the grid's best and random search.

Two questions, both over several seeds. What share of the grid's best is reached within a number
of trials and a share of the grid's run time, whichever is used up first? And how much run time
until the best so far is within 5 % of the grid's best?
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import optuna

from kllm.errors import KllmError
from kllm.tuners.grid import Grid
from kllm.tuners.objective import Goal
from kllm.tuners.outcome import Outcome, measure
from kllm.tuners.replay import Replay
from kllm.tuners.sampler import PointSampler
from kllm.tuners.search import Search
from kllm.tuners.space import Value
from kllm.tuners.stopping import rules_for
from kllm.tuners.study import Trial, open_study

NEAR = 0.95  # "within 5 % of the best"


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One search: the best value so far after each trial, and the time it had taken by then."""

    seconds: tuple[float, ...]
    best: tuple[float, ...]  # share of the grid's best; 0 before anything meets the SLO

    def reached(self, trials: int, seconds: float) -> float:
        """Share of the grid's best within both budgets."""
        within = [b for s, b in zip(self.seconds, self.best, strict=True) if s <= seconds]
        return max(within[:trials], default=0.0)

    def seconds_to(self, share: float) -> float:
        """Run time until that share is reached; infinite if it is not."""
        for seconds, best in zip(self.seconds, self.best, strict=True):
            if best >= share:
                return seconds
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """A search's paths over seeds, and random search's on the same grid."""

    grid_s: float
    points: int
    best: float  # the grid's best value
    trials: int  # budget
    time_share: float  # budget
    tuned: tuple[Path, ...]
    random: tuple[Path, ...]

    def reached(self) -> list[float]:
        """By seed: share of the best within the budgets."""
        return [path.reached(self.trials, self.time_share * self.grid_s) for path in self.tuned]

    def near_s(self, paths: Sequence[Path]) -> list[float]:
        """By seed: run time until within 5 % of the best."""
        return [path.seconds_to(NEAR) for path in paths]


def evaluate(
    grid: Grid,
    goal: Goal,
    *,
    seeds: Sequence[int] = range(5),
    trials: int = 25,
    time_share: float = 0.2,
) -> Quality:
    """Replay searches.

    Args:
        grid: every point of it was measured.
        goal: one objective, under an SLO or not.
        seeds: one search each.
        trials: budget of the tuned search.
        time_share: budget, as a share of the whole grid's run time.
    """
    values = [value_of(goal, measure(outcome, goal.slo)) for outcome in grid.outcomes]
    best = max(values)
    if best <= 0:
        raise KllmError(f"nothing on the grid meets {goal.slo}; choose wider limits")
    points = len(grid.outcomes)
    return Quality(
        grid_s=grid.run_s,
        points=points,
        best=best,
        trials=trials,
        time_share=time_share,
        tuned=tuple(search_path(grid, goal, seed, trials=trials, best=best) for seed in seeds),
        random=tuple(random_path(grid, values, best, seed) for seed in seeds),
    )


def value_of(goal: Goal, metrics: dict[str, float]) -> float:
    """The first objective as "more is better", 0 for what misses the SLO or failed."""
    value = metrics.get(goal.objectives[0].metric, 0.0)
    if value <= 0 or not goal.feasible(metrics):
        return 0.0
    return value if goal.objectives[0].sign > 0 else 1 / value


def random_path(grid: Grid, values: Sequence[float], best: float, seed: int) -> Path:
    """Random search without repeats, every trial run to its end."""
    order = np.random.default_rng(seed).permutation(len(values))
    costs = np.array([outcome.total_s for outcome in grid.outcomes])[order]
    shares = np.array(values)[order] / best
    return Path(
        seconds=tuple(np.cumsum(costs).tolist()),
        best=tuple(np.maximum.accumulate(shares).tolist()),
    )


def search_path(grid: Grid, goal: Goal, seed: int, *, trials: int, best: float) -> Path:
    """One replayed search, as `kllm tune` runs it."""
    replay = Replay(grid)
    seconds: list[float] = []

    def run(settings: Mapping[str, Value], incumbent: Trial | None) -> Outcome:
        rule = rules_for(
            goal,
            concurrency=grid.header.concurrency,
            best=incumbent.outcome if incumbent else None,
            best_metrics=incumbent.metrics if incumbent else {},
        )
        outcome = replay.run(settings, rule)
        seconds.append(replay.spent_s)
        return outcome

    sampler = PointSampler(grid.space, goal, prior=grid.prior, seed=seed)
    study = open_study(
        optuna.storages.InMemoryStorage(),
        "replay",
        goal=goal,
        identity={"model": "replay"},
        resume=False,
        sampler=sampler,
    )
    search = Search(study, grid.space, goal, sampler, run)
    search.run(trials=trials)
    shares, so_far = [], 0.0
    for trial in search.trials():
        if trial.state == "pruned":
            continue
        if trial.measured:
            so_far = max(so_far, value_of(goal, dict(trial.metrics)) / best)
        shares.append(so_far)
    return Path(seconds=tuple(seconds), best=tuple(shares))
