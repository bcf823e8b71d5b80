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

LAYOUT = "layout"  # stands for the parameters whose values come in rows
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
    effects = {
        name: _total_effect(space, (name,), belief)
        for name in space.free
        if name not in space.joint
    }
    if len(space.rows) > 1:
        effects[LAYOUT] = _total_effect(space, space.joint, belief)
    total = sum(effects.values())
    if total <= 0:
        return {}
    ranked = sorted(effects.items(), key=lambda item: -item[1])
    return {name: effect / total for name, effect in ranked}


def _total_effect(space: Space, names: Sequence[str], values: NDArray[np.float64]) -> float:
    """Mean variance of `values` within groups of points that differ in these parameters only."""
    others = [i for i, param in enumerate(space.params) if param.name not in names]
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, point in enumerate(space.points):
        groups.setdefault(tuple(point[column] for column in others), []).append(i)
    return float(np.mean([np.var(values[members]) for members in groups.values()]))
