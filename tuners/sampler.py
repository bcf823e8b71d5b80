"""The sampler: which of the valid points to run next.

It is an Optuna sampler, so that studies, storages and enqueued trials work as everywhere; but
it picks whole points from the enumerated space and never one parameter after the other.
First a few points that the cost model and the need for variety suggest, then the point with the
largest expected improvement under a Gaussian process. Points that run elsewhere count as if
they had come out as believed (the "kriging believer", Ginsbourger et al. 2010).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from kllm.tuners import surrogate
from kllm.tuners.objective import Goal
from kllm.tuners.prior import Prior, first_point
from kllm.tuners.space import Space

FIRST_POINTS = 5  # the default, the model's best, and three spread-out ones
SCORE_SPAN = 3.0  # log units below the best at which scores are cut: 20 times worse is just bad
AUGMENT = 0.05  # share of the plain sum in a Pareto scalarisation (Knowles 2006, ParEGO)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the trials of a study say about the points of its space."""

    taken: frozenset[int]  # points that must not be run (again)
    running: tuple[int, ...]
    measured: tuple[tuple[int, Mapping[str, float]], ...]  # complete and stopped runs
    complete: frozenset[int]  # points measured to the end


def evidence(trials: Sequence[FrozenTrial], space: Space, but: int | None = None) -> Evidence:
    """Read a study's trials.

    Args:
        trials: all of them.
        space: maps their parameters to points.
        but: number of a trial to leave out, the one that asks.
    """
    taken: set[int] = set()
    running: list[int] = []
    measured: list[tuple[int, Mapping[str, float]]] = []
    complete: set[int] = set()
    for trial in trials:
        params = trial.params or trial.system_attrs.get("fixed_params", {})
        # A space with a single point has no parameters; its one trial then has none either.
        index = space.find(params) if params or not space.free else None
        if index is None or trial.number == but or trial.user_attrs.get("retry"):
            continue
        taken.add(index)
        if trial.state in (TrialState.RUNNING, TrialState.WAITING):
            running.append(index)
        if metrics := trial.user_attrs.get("metrics"):
            measured.append((index, metrics))
            if trial.state == TrialState.COMPLETE:
                complete.add(index)
    return Evidence(frozenset(taken), tuple(running), tuple(measured), frozenset(complete))


def scores(
    goal: Goal, runs: Sequence[Mapping[str, float]], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Log scores of runs, higher is better; a run that misses its SLO is marked down.

    The mark-down grows from nothing at the target, so that points around the edge of what is
    feasible, where the best one often lies, still tell about each other.
    """
    table = np.full((len(runs), len(goal.objectives)), np.nan)
    for row, metrics in enumerate(runs):
        for column, objective in enumerate(goal.objectives):
            value = metrics.get(objective.metric, 0.0)
            if value > 0:
                table[row, column] = objective.sign * np.log(value)
    top = np.nanmax(table, axis=0) if np.isfinite(table).any() else np.zeros(table.shape[1])
    table = np.maximum(np.where(np.isnan(table), -np.inf, table), top - SCORE_SPAN)
    weighted = (table - top) * weights
    total = weighted.min(axis=1) + AUGMENT * weighted.sum(axis=1)
    if len(goal.objectives) == 1:
        total = table[:, 0]
    misses = np.array([max(goal.deficit(m), 0.0) for m in runs])
    marked: NDArray[np.float64] = total + np.log1p(-np.minimum(misses / goal.slo.attainment, 0.95))
    return marked


class PointSampler(BaseSampler):
    """Suggests whole points of a `Space`.

    Args:
        space: the points.
        goal: what better means.
        prior: the cost model's predictions, if there are any.
        seed: of everything random; the same trials and seed give the same suggestion.
    """

    def __init__(
        self,
        space: Space,
        goal: Goal,
        *,
        prior: Prior | None = None,
        seed: int = 0,
    ) -> None:
        self.space, self.goal, self.prior, self.seed = space, goal, prior, seed

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The free parameters as Optuna knows them."""
        return {
            name: CategoricalDistribution(list(self.space.candidates[name]))
            for name in self.space.free
        }

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Always the whole space."""
        return self.distributions

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A whole point; empty when none is left (callers ask `left` before)."""
        seen = evidence(study.get_trials(deepcopy=False), self.space, but=trial.number)
        index = self.propose(seen, trial.number)
        if index is None:
            return {}
        settings = self.space.settings(index)
        return {name: settings[name] for name in search_space}

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """The default: only reached when every point has been taken."""
        return self.space.default[param_name]

    def taken(self, trials: Sequence[FrozenTrial]) -> frozenset[int]:
        """Points that are not to be run again."""
        return evidence(trials, self.space).taken

    def complete_scores(self, trials: Sequence[FrozenTrial]) -> dict[int, float]:
        """Log scores of the points that were measured to the end, by the first objective."""
        seen = evidence(trials, self.space)
        runs = [(index, metrics) for index, metrics in seen.measured if index in seen.complete]
        if not runs:
            return {}
        weights = np.eye(len(self.goal.objectives))[0]
        values = scores(self.goal, [metrics for _, metrics in runs], weights)
        return {index: float(value) for (index, _), value in zip(runs, values, strict=True)}

    def propose(self, seen: Evidence, number: int) -> int | None:
        """The next point, or None when every point is taken."""
        rng = np.random.default_rng([self.seed, number])
        left = [i for i in range(len(self.space.points)) if i not in seen.taken]
        if not left:
            return None
        started = len(seen.measured) + len(seen.running)
        if started < FIRST_POINTS or not seen.measured:
            return first_point(self.space, self.prior, seen.taken, rng)
        return self._best_expected(seen, np.array(left), rng)

    def _best_expected(
        self, seen: Evidence, left: NDArray[np.int64], rng: np.random.Generator
    ) -> int:
        weights = rng.dirichlet(np.ones(len(self.goal.objectives)))
        tried = np.array([index for index, _ in seen.measured], dtype=np.int64)
        y = scores(self.goal, [metrics for _, metrics in seen.measured], weights)
        predicted = self.prior.logs if self.prior is not None else None
        features = self.space.features
        belief = surrogate.fit(features, y, tried, predicted=predicted, rng=rng)
        if seen.running:
            running = np.array(seen.running, dtype=np.int64)
            y = np.concatenate([y, belief.mean[running]])
            tried = np.concatenate([tried, running])
            belief = surrogate.fit(features, y, tried, predicted=predicted, rng=rng)
        # Noise makes the best measured score too good; the belief about that point is not.
        incumbent = float(belief.mean[tried].max())
        gain = surrogate.expected_improvement(belief, incumbent)[left]
        return int(left[int(np.argmax(gain))])
