"""What the cost model says before anything is measured, and how far it can be trusted.

The model only orders candidates and drops hopeless ones. A point is hopeless when even the
prediction corrected by what the trials so far showed, plus the largest error seen, stays well
below the best measured value. The model never decides which trial wins.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kllm.tuners.space import Point, Settings, Space

MIN_TRIALS = 5  # before that the model's error is not known
ERROR_FACTOR = 1.5  # times the largest error seen
ERROR_FLOOR = math.log(1.1)  # and never less than this
HOPELESS = math.log(0.8)  # share of the best that a point must be able to reach
FLOOR_SLACK = 1.25  # ceilings are measured, and a busy moment makes them too low


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """What the model says about one point; NaN: not known."""

    value: float  # the first objective without its SLO, more is better
    slo_ratio: float  # the worse of TTFT and TPOT over its limit
    floor_ratio: float = 0.0  # the least TPOT that the machine allows over its limit


@dataclass(frozen=True, slots=True)
class Prior:
    """Predictions for every point of a space."""

    logs: NDArray[np.float64]  # [points] log of the value
    slo_logs: NDArray[np.float64]  # [points] log of the SLO ratio; all 0 without an SLO
    floors: NDArray[np.float64] | None = None  # [points] of `Guess.floor_ratio`

    @classmethod
    def of(cls, space: Space, predict: Callable[[Settings], Guess]) -> "Prior | None":
        """Predict every point; None when the model cannot tell any two apart."""
        guesses = [predict(space.settings(i)) for i in range(len(space.points))]
        logs = _logs([guess.value for guess in guesses])
        slo_logs = _logs([guess.slo_ratio for guess in guesses])
        if logs is None or np.ptp(logs) == 0:
            return None
        return cls(
            logs,
            np.zeros_like(logs) if slo_logs is None else slo_logs,
            np.array([guess.floor_ratio for guess in guesses]),
        )

    @property
    def favourite(self) -> int:
        """The model's best: the highest value that meets the SLO, or the nearest to meeting it."""
        meets = self.slo_logs <= 0
        if not meets.any():
            return int(np.argmin(self.slo_logs))
        return int(np.argmax(np.where(meets, self.logs, -np.inf)))

    def above(self, one: int, other: int) -> bool:
        """Whether the model prefers a point to another: nearer to the SLO, then more value."""
        misses = [max(self.slo_logs[i], 0.0) for i in (one, other)]
        if misses[0] != misses[1]:
            return bool(misses[0] < misses[1])
        return bool(self.logs[one] > self.logs[other])

    def out_of_reach(self, taken: Collection[int]) -> dict[int, str]:
        """Points whose mean TPOT could not meet its limit on ideal hardware, with the reason."""
        if self.floors is None:
            return {}
        return {
            int(i): (
                f"out of reach by the cost model: its floor of TPOT is {self.floors[i]:.3g} times "
                "the limit"
            )
            for i in np.flatnonzero(self.floors > FLOOR_SLACK)
            if i not in taken
        }

    def hopeless(
        self, measured: Mapping[int, float], best: float, taken: Collection[int]
    ) -> dict[int, str]:
        """Points that need not be run, with the reason.

        Args:
            measured: log scores of complete trials by point.
            best: log score of the best that meets the SLO.
            taken: points that are not asked about.
        """
        if len(measured) < MIN_TRIALS:
            return {}
        errors = np.array([score - self.logs[i] for i, score in measured.items()])
        offset = float(np.median(errors))
        bound = max(ERROR_FACTOR * float(np.abs(errors - offset).max()), ERROR_FLOOR)
        ceilings = self.logs + offset + bound
        return {
            int(i): (
                f"hopeless by the cost model: at most {math.exp(ceilings[i] - best):.0%} of the "
                f"best, allowing for {ERROR_FACTOR:g} times its largest error so far"
            )
            for i in np.flatnonzero(ceilings < best + HOPELESS)
            if i not in taken
        }


def _logs(values: Sequence[float]) -> NDArray[np.float64] | None:
    """Logs; what is not known gets the median, so that it is neither preferred nor dropped."""
    data = np.array(values)
    known = np.isfinite(data) & (data > 0)
    if not known.any():
        return None
    return np.log(np.where(known, data, np.median(data[known])))


def first_point(
    space: Space, prior: Prior | None, taken: Collection[int], rng: np.random.Generator
) -> int:
    """The next point to start from: the default, the model's best, then the farthest one.

    The farthest from everything taken comes from the better half of what the model predicts; where
    values come in rows, it is the best of a row that was not tried, while there is one.

    Args:
        space: must have a point that is not taken.
        prior: predictions, if there are any.
        taken: points that ran, run or are not to be run.
        rng: chooses among points that are equally far.
    """
    favourites = [space.find(space.default)]
    if prior is not None:
        favourites.append(prior.favourite)
    for point in favourites:
        if point is not None and point not in taken:
            return point
    pool = np.array([i for i in range(len(space.points)) if i not in taken], dtype=np.int64)
    if leaders := _leaders(space, prior, pool, taken):
        pool = np.array(leaders, dtype=np.int64)
    if prior is not None:
        pool = pool[prior.logs[pool] >= np.median(prior.logs[pool])]
    if not taken:
        return int(rng.choice(pool))
    anchors = space.features[sorted(taken)]
    gaps = np.square(space.features[pool][:, None] - anchors[None]).sum(-1).min(1)
    return int(pool[rng.choice(np.flatnonzero(gaps >= gaps.max() - 1e-9))])


def _leaders(
    space: Space, prior: Prior | None, pool: NDArray[np.int64], taken: Collection[int]
) -> list[int]:
    """The most promising point of every row that has no point taken."""
    if not space.joint:
        return []
    tried = {space.row_of(i) for i in taken}
    best: dict[Point, int] = {}
    for i in pool.tolist():
        row = space.row_of(i)
        if row not in tried and (row not in best or (prior and prior.above(i, best[row]))):
            best[row] = i
    return list(best.values())
