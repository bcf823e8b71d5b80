"""The sampler: which of the valid points to run next.

It is an Optuna sampler, so that studies, storages and enqueued trials work as everywhere; but
it picks whole points from the enumerated space and never one parameter after the other.
First a few points that the cost model and the need for variety suggest, then the point with the
largest expected improvement under a Gaussian process. Points that run elsewhere count as if
they had come out as believed (the "kriging believer", Ginsbourger et al. 2010).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState
from scipy.special import ndtr

from kllm.tuners import surrogate
from kllm.tuners.objective import Goal
from kllm.tuners.prior import Prior, first_point
from kllm.tuners.space import Space

FIRST_POINTS = 5  # the default, the model's best, and three spread-out ones
FIRST_ROWS = 8  # the same where values come in rows (layouts)
SAME_ROW = 0.97  # share of the largest gain at which the row of the last trial is kept
SLO_SPAN = 3.0  # log units from the limit: 20 times too slow is just too slow
SCORE_SPAN = 3.0  # log units below the best at which scores are cut: 20 times worse is just bad
FAILURES = 2  # for lack of memory, of smaller points: enough where nothing as large ever ran
AUGMENT = 0.05  # share of the plain sum in a Pareto scalarisation (Knowles 2006, ParEGO)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the trials of a study say about the points of its space."""

    taken: frozenset[int]  # points that must not be run (again)
    running: tuple[int, ...]
    measured: tuple[tuple[int, Mapping[str, float]], ...]  # complete and stopped runs
    complete: frozenset[int]  # points measured to the end
    too_large: tuple[int, ...] = ()  # points that the machine's memory did not hold


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
    too_large: list[int] = []
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
        if trial.user_attrs.get("outcome", {}).get("too_large"):
            too_large.append(index)
    return Evidence(
        frozenset(taken), tuple(running), tuple(measured), frozenset(complete), tuple(too_large)
    )


def oversized(space: Space, seen: Evidence) -> dict[int, str]:
    """Points that will not fit either, because smaller ones did not, with the reason.

    One failure speaks for the points that only hold more requests or tokens; FAILURES of them
    for all larger ones, whatever the other parameters, unless something as large did run.
    """
    ran = [index for index, _ in seen.measured]
    found: dict[int, str] = {}
    for index in range(len(space.points)) if seen.too_large else ():
        if index in seen.taken:
            continue
        smaller = [i for i in seen.too_large if space.holds_more(index, i, alike=False)]
        twin = any(space.holds_more(index, i, alike=True) for i in smaller)
        many = len(smaller) >= FAILURES
        if twin or (many and not any(space.holds_more(i, index, alike=False) for i in ran)):
            found[index] = "too large: smaller settings did not fit the memory"
    return found


def scores(
    goal: Goal, runs: Sequence[Mapping[str, float]], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """[runs] log scores, higher is better, whether or not the SLO is met.

    Whether it is met is modelled apart (`slo_logs`): the goodput of a run that misses its SLO
    drops to nothing at once and would tell little about the points around it. So goodput is
    scored as throughput times an attainment that is never below its target.
    """
    table = np.full((len(runs), len(goal.objectives)), -np.inf)
    for row, metrics in enumerate(runs):
        for column, objective in enumerate(goal.objectives):
            value = metrics.get(objective.metric, 0.0)
            if objective.name == "goodput":
                share = max(metrics.get("attainment", 0.0), goal.slo.attainment)
                value = metrics.get("output_tokens_per_s", 0.0) * share
            if value > 0:
                table[row, column] = objective.sign * np.log(value)
    top = table.max(axis=0)
    top = np.where(np.isfinite(top), top, 0.0)
    table = np.maximum(table, top - SCORE_SPAN)
    if goal.single:
        return np.asarray(table[:, 0])
    weighted = (table - top) * weights
    return np.asarray(weighted.min(axis=1) + AUGMENT * weighted.sum(axis=1))


def slo_logs(runs: Sequence[Mapping[str, float]]) -> NDArray[np.float64]:
    """[runs] log of the time over its limit; at most 0 meets the SLO."""
    ratios = [metrics.get("slo_ratio", math.inf) for metrics in runs]
    return np.clip(np.log(np.maximum(ratios, 1e-9)), -SLO_SPAN, SLO_SPAN)


def merits(goal: Goal, runs: Sequence[Mapping[str, float]]) -> NDArray[np.float64]:
    """[runs] scores by the first objective, marked down by how far the SLO is missed."""
    values = scores(goal, runs, np.eye(len(goal.objectives))[0])
    return values - np.maximum(slo_logs(runs), 0.0) if goal.slo.limited else values


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
        # Off: suggest what looks best even if the cost model rules it out, to have it recorded.
        self.avoid_hopeless = False

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
        if self.avoid_hopeless:
            seen = replace(seen, taken=seen.taken | self.ruled_out(seen).keys())
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

    def ruled_out(self, seen: Evidence) -> dict[int, str]:
        """Points that cannot win by the cost model, or that will not fit, with the reason."""
        # With one layout there is little to rule out before anything is measured.
        floors = self.prior.out_of_reach(seen.taken) if self.prior and self.space.joint else {}
        return self._hopeless(seen) | floors | oversized(self.space, seen)

    def _hopeless(self, seen: Evidence) -> dict[int, str]:
        runs = [(i, metrics) for i, metrics in seen.measured if i in seen.complete]
        if self.prior is None or not self.goal.single or not runs:
            return {}
        values = scores(self.goal, [metrics for _, metrics in runs], np.ones(1))
        fine = [v for v, (_, m) in zip(values, runs, strict=True) if self.goal.feasible(m)]
        if not fine:
            return {}
        measured = {i: float(v) for v, (i, _) in zip(values, runs, strict=True)}
        return self.prior.hopeless(measured, float(max(fine)), seen.taken)

    def propose(self, seen: Evidence, number: int) -> int | None:
        """The next point, or None when every point is taken."""
        rng = np.random.default_rng([self.seed, number])
        left = [i for i in range(len(self.space.points)) if i not in seen.taken]
        if not left:
            return None
        started = len(seen.measured) + len(seen.running)
        first = FIRST_ROWS if self.space.joint else FIRST_POINTS
        if started < first or not seen.measured:
            return first_point(self.space, self.prior, seen.taken, rng)
        return self._best_expected(seen, np.array(left), rng)

    def _best_expected(
        self, seen: Evidence, left: NDArray[np.int64], rng: np.random.Generator
    ) -> int:
        """Largest expected improvement times chance to meet the SLO (Gardner et al. 2014)."""
        runs = [metrics for _, metrics in seen.measured]
        tried = np.array([index for index, _ in seen.measured], dtype=np.int64)
        weights = rng.dirichlet(np.ones(len(self.goal.objectives)))
        values = scores(self.goal, runs, weights)
        prior = self.prior
        value = self._believe(values, tried, seen.running, prior.logs if prior else None, rng)
        fine = np.array([self.goal.feasible(metrics) for metrics in runs])
        if not self.goal.slo.limited:
            chance = np.ones(len(self.space.points))
        else:
            predicted = prior.slo_logs if prior else None
            limit = self._believe(slo_logs(runs), tried, seen.running, predicted, rng)
            chance = ndtr(-limit.mean / limit.std)
            if not fine.any():
                # Nothing to improve on yet: find something that meets the SLO first.
                return self._largest(chance, left, seen)
        # Noise makes the best measured score too good; the belief about that point is not.
        incumbent = float(value.mean[tried[fine]].max())
        gain = surrogate.expected_improvement(value, incumbent) * chance
        return self._largest(gain, left, seen)

    def _largest(self, gain: NDArray[np.float64], left: NDArray[np.int64], seen: Evidence) -> int:
        """The point of largest gain; among near ties one whose weights are loaded already."""
        best = int(left[int(np.argmax(gain[left]))])
        if not self.space.joint:
            return best
        row = self.space.row_of(seen.measured[-1][0])
        ties = left[gain[left] >= SAME_ROW * gain[best]]
        kept = [i for i in ties.tolist() if self.space.row_of(i) == row]
        return max(kept, key=lambda i: float(gain[i]), default=best)

    def _believe(
        self,
        values: NDArray[np.float64],
        tried: NDArray[np.int64],
        running: Sequence[int],
        predicted: NDArray[np.float64] | None,
        rng: np.random.Generator,
    ) -> surrogate.Posterior:
        features = self.space.features
        if predicted is not None and np.ptp(predicted) == 0:
            predicted = None
        belief = surrogate.fit(features, values, tried, predicted=predicted, rng=rng)
        if not running:
            return belief
        also = np.array(running, dtype=np.int64)
        values = np.concatenate([values, belief.mean[also]])
        tried = np.concatenate([tried, also])
        return surrogate.fit(features, values, tried, predicted=predicted, rng=rng)
