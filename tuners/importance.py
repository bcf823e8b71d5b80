"""Which parameters mattered, from a few dozen trials.

The surrogate fills in the points that were not run. A parameter's importance is how much the
score varies when it alone changes, averaged over everything else (the total effect of Sobol's
variance decomposition, Homma & Saltelli 1996), as a share of all parameters' effects.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kllm.tuners import surrogate
from kllm.tuners.objective import Goal
from kllm.tuners.sampler import merits
from kllm.tuners.space import Space

FEWEST_TRIALS = 6  # below this the surrogate says little more than its prior


def importance(
    space: Space, goal: Goal, measured: Sequence[tuple[int, Mapping[str, float]]], seed: int = 0
) -> dict[str, float]:
    """Shares by free parameter, largest first; empty when there is too little to say.

    Args:
        space: the points.
        goal: the first objective is explained.
        measured: (point, metrics) of complete and stopped trials.
        seed: of the surrogate's fit.
    """
    if len(measured) < FEWEST_TRIALS:
        return {}
    y = merits(goal, [metrics for _, metrics in measured])
    if np.ptp(y) == 0:
        return {}
    tried = np.array([index for index, _ in measured], dtype=np.int64)
    rng = np.random.default_rng(seed)
    belief = surrogate.fit(space.features, y, tried, predicted=None, rng=rng).mean
    effects = {name: _total_effect(space, name, belief) for name in space.free}
    total = sum(effects.values())
    if total <= 0:
        return {}
    ranked = sorted(effects.items(), key=lambda item: -item[1])
    return {name: effect / total for name, effect in ranked}


def _total_effect(space: Space, name: str, values: NDArray[np.float64]) -> float:
    """Mean variance of `values` within groups of points that differ in one parameter only."""
    column = [param.name for param in space.params].index(name)
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, point in enumerate(space.points):
        groups.setdefault((*point[:column], *point[column + 1 :]), []).append(i)
    return float(np.mean([np.var(values[members]) for members in groups.values()]))
