"""A Gaussian process for a few dozen noisy trials on a space of known points.

Scores are logs, so the mean can be "cost model times a constant": a linear trend in the model's
log prediction, whose slope and offset the data decide (slope 0: the model is of no use). What
the model does not explain is a smooth function of the settings (Matern 5/2 with a length scale
for each feature) plus a linear one. Rasmussen & Williams 2006, chapters 2.7 and 5.4; expected
improvement as in Jones et al. 1998.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize
from scipy.special import ndtr
from threadpoolctl import ThreadpoolController

Array = NDArray[np.float64]

# Prior over log hyperparameters, for standardised scores and features in [0, 1]: (median, sigma).
AMPLITUDE = (1.0, 0.7)
LENGTH = (0.7, 0.8)
LINEAR = (0.5, 0.8)
NOISE = (0.1, 0.8)
TREND_VARIANCE = 4.0  # of offset and slope; wide against standardised scores
MAX_ITERATIONS = 40
STARTS = 2  # the prior's medians, and one random point


@dataclass(frozen=True, slots=True)
class Posterior:
    """What is believed about the points of the space."""

    mean: Array  # [points] score
    std: Array  # [points] of the noise-free score


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Hyperparameters, in standardised units."""

    amplitude: float
    linear: float
    noise: float
    lengths: Array  # [features]

    @classmethod
    def from_logs(cls, logs: Array) -> "_Kernel":
        values = np.exp(logs)
        return cls(float(values[0]), float(values[1]), float(values[2]), values[3:])

    def between(self, a: Array, b: Array, trend_a: Array, trend_b: Array) -> Array:
        distance = self._distance(np.square(a[:, None, :] - b[None, :, :]))
        linear = (a - 0.5) @ (b - 0.5).T
        trend = TREND_VARIANCE * (trend_a @ trend_b.T)
        out: Array = self.amplitude**2 * _matern(distance) + self.linear**2 * linear + trend
        return out

    def at(self, a: Array, trend: Array) -> Array:
        """The diagonal of `between(a, a)`."""
        linear = np.square(a - 0.5).sum(-1)
        tail = TREND_VARIANCE * np.square(trend).sum(-1)
        out: Array = self.amplitude**2 + self.linear**2 * linear + tail
        return out

    def slopes(self, x: Array, weights: Array) -> Array:
        """[3 + features] sum of `weights` [n, n] times the covariance's derivative by each log."""
        squares = np.square(x[:, None, :] - x[None, :, :])
        distance = self._distance(squares)
        # d matern / d log length = 5/3 (1 + distance) exp(-distance) (difference / length)^2
        radial = weights * (5 / 3) * (1 + distance) * np.exp(-distance)
        linear = (x - 0.5) @ (x - 0.5).T
        return np.array(
            [
                2 * self.amplitude**2 * (weights * _matern(distance)).sum(),
                2 * self.linear**2 * (weights * linear).sum(),
                2 * self.noise**2 * np.trace(weights),
                *(self.amplitude**2 * np.einsum("ij,ijk->k", radial, squares) / self.lengths**2),
            ]
        )

    def _distance(self, squares: Array) -> Array:
        out: Array = np.sqrt(5 * (squares @ self.lengths**-2))
        return out


def _matern(distance: Array) -> Array:
    out: Array = (1 + distance + distance**2 / 3) * np.exp(-distance)
    return out


def _prior(dims: int) -> tuple[Array, Array]:
    rows = [AMPLITUDE, LINEAR, NOISE, *[LENGTH] * dims]
    return np.log([median for median, _ in rows]), np.array([sigma for _, sigma in rows])


def _trend(logs: Array | None, count: int) -> Array:
    """[count, 1 or 2]: the constant, and the model's standardised log prediction."""
    if logs is None:
        return np.ones((count, 1))
    return np.stack([np.ones(count), logs], axis=1)


def fit(
    features: Array,
    scores: Array,
    tried: NDArray[np.int64],
    *,
    predicted: Array | None,
    rng: np.random.Generator,
) -> Posterior:
    """Believe something about every point from the scores of some.

    Args:
        features: [points, features] in [0, 1].
        scores: [n] log scores, higher is better.
        tried: [n] which point each score belongs to; repeats are allowed.
        predicted: [points] log of what the cost model predicts, or None.
        rng: of the optimiser's second start.
    """
    centre, spread = float(scores.mean()), max(float(scores.std()), 1e-3)
    y = (scores - centre) / spread
    if predicted is not None:
        predicted = (predicted - predicted.mean()) / max(float(predicted.std()), 1e-9)
    trend = _trend(predicted, len(features))
    x, t = features[tried], trend[tried]
    # Matrices this small gain nothing from threads, which spin on cores that others want.
    with _libraries().limit(limits=1, user_api="blas"):
        kernel = _optimise(x, t, y, rng)
        factor = cho_factor(_covariance(kernel, x, t), lower=True)
        cross = kernel.between(features, x, trend, t)  # [points, n]
        mean = cross @ cho_solve(factor, y)
        solved = solve_triangular(factor[0], cross.T, lower=True)
    variance = kernel.at(features, trend) - np.square(solved).sum(0)
    return Posterior(centre + spread * mean, spread * np.sqrt(np.maximum(variance, 1e-10)))


@cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


def _covariance(kernel: _Kernel, x: Array, trend: Array) -> Array:
    matrix = kernel.between(x, x, trend, trend)
    matrix[np.diag_indices_from(matrix)] += kernel.noise**2 + 1e-8
    return matrix


def misfit(logs: Array, x: Array, trend: Array, y: Array) -> tuple[float, Array]:
    """Negative log posterior of the hyperparameters, up to a constant, and its gradient.

    Args:
        logs: [3 + features] of amplitude, linear, noise and lengths.
        x: [n, features].
        trend: [n, 1 or 2].
        y: [n] standardised scores.

    Source: Rasmussen & Williams 2006, equations 5.8 and 5.9, plus the log-normal priors.
    """
    centre, sigma = _prior(x.shape[1])
    kernel = _Kernel.from_logs(logs)
    factor = cho_factor(_covariance(kernel, x, trend), lower=True)
    solved = cho_solve(factor, y)
    weights = cho_solve(factor, np.eye(len(y))) - np.outer(solved, solved)
    away = (logs - centre) / sigma
    value = 0.5 * (y @ solved + away @ away) + np.log(np.diag(factor[0])).sum()
    return float(value), 0.5 * kernel.slopes(x, weights) + away / sigma


def _optimise(x: Array, trend: Array, y: Array, rng: np.random.Generator) -> _Kernel:
    centre, sigma = _prior(x.shape[1])
    low, high = centre - 3 * sigma, centre + 3 * sigma  # so the noise keeps the matrix definite
    starts = [centre, *(rng.normal(centre, sigma) for _ in range(STARTS - 1))]
    found = [
        minimize(
            misfit,
            np.clip(start, low, high),
            args=(x, trend, y),
            jac=True,
            bounds=list(zip(low, high, strict=True)),
            options={"maxiter": MAX_ITERATIONS},
        )
        for start in starts
    ]
    best = min(found, key=lambda result: float(result.fun))
    return _Kernel.from_logs(np.asarray(best.x))


def expected_improvement(posterior: Posterior, best: float) -> Array:
    """[points] mean gain over `best`, in score units."""
    gain = posterior.mean - best
    z = gain / posterior.std
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    out: Array = gain * ndtr(z) + posterior.std * density
    return out
