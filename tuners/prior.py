"""What the cost model says before anything is measured, and how far it can be trusted.

The model only orders candidates and drops hopeless ones. A point is hopeless when even the
prediction corrected by what the trials so far showed, plus the largest error seen, stays well
below the best measured value. The model never decides which trial wins.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kllm.tuners.space import Settings, Space

Predictor = Callable[[Settings], float]  # the first objective, more is better; NaN: not known

MIN_TRIALS = 5  # before that the model's error is not known
ERROR_FACTOR = 1.5  # times the largest error seen
ERROR_FLOOR = math.log(1.1)  # and never less than this
HOPELESS = math.log(0.8)  # share of the best that a point must be able to reach


@dataclass(frozen=True, slots=True)
class Prior:
    """Log predictions for every point of a space."""

    logs: NDArray[np.float64]  # [points]

    @classmethod
    def of(cls, space: Space, predict: Predictor) -> "Prior | None":
        """Predict every point; None when the model cannot tell any two apart."""
        values = np.array([predict(space.settings(i)) for i in range(len(space.points))])
        known = np.isfinite(values) & (values > 0)
        if not known.any():
            return None
        # An unknown point gets the median: neither preferred nor dropped.
        values = np.where(known, values, np.median(values[known]))
        return cls(np.log(values)) if np.ptp(values) > 0 else None

    def hopeless(self, index: int, measured: Mapping[int, float], best: float) -> str:
        """Why a point need not be run, or "".

        Args:
            index: the point.
            measured: log scores of complete trials by point.
            best: log score of the best of them.
        """
        if len(measured) < MIN_TRIALS:
            return ""
        errors = np.array([score - self.logs[i] for i, score in measured.items()])
        offset = float(np.median(errors))
        bound = max(ERROR_FACTOR * float(np.abs(errors - offset).max()), ERROR_FLOOR)
        ceiling = self.logs[index] + offset + bound
        if ceiling >= best + HOPELESS:
            return ""
        return (
            f"hopeless by the cost model: at most {math.exp(ceiling - best):.0%} of the best, "
            f"allowing for {ERROR_FACTOR:g} times its largest error so far"
        )


def first_point(
    space: Space, prior: Prior | None, taken: Collection[int], rng: np.random.Generator
) -> int:
    """The next point to start from: the default, the model's best, then the farthest one.

    The farthest from everything taken comes from the better half of what the model predicts.

    Args:
        space: must have a point that is not taken.
        prior: predictions, if there are any.
        taken: points that ran, run or are not to be run.
        rng: chooses among points that are equally far.
    """
    favourites = [space.find(space.default)]
    if prior is not None:
        favourites.append(int(np.argmax(prior.logs)))
    for point in favourites:
        if point is not None and point not in taken:
            return point
    pool = np.array([i for i in range(len(space.points)) if i not in taken], dtype=np.int64)
    if prior is not None:
        pool = pool[prior.logs[pool] >= np.median(prior.logs[pool])]
    if not taken:
        return int(rng.choice(pool))
    anchors = space.features[sorted(taken)]
    gaps = np.square(space.features[pool][:, None] - anchors[None]).sum(-1).min(1)
    return int(pool[rng.choice(np.flatnonzero(gaps >= gaps.max() - 1e-9))])
