"""The Gaussian process against dense formulas and finite differences."""

import numpy as np
import pytest
from scipy.optimize import approx_fprime

from kllm.tuners import surrogate


def problem(seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    count, dims = int(rng.integers(2, 12)), int(rng.integers(1, 5))
    x = rng.integers(0, 3, (count, dims)) / 2  # points repeat
    trend = np.stack([np.ones(count), rng.normal(size=count)], axis=1)
    return rng.normal(0, 0.5, 3 + dims), x, trend, rng.normal(size=count)


@pytest.mark.parametrize("seed", range(8))
def test_gradient_is_that_of_finite_differences(seed: int) -> None:
    logs, *data = problem(seed)
    _, gradient = surrogate.misfit(logs, *data)
    numeric = approx_fprime(logs, lambda at: surrogate.misfit(at, *data)[0], 1e-6)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-4)


def test_belief_follows_the_scores_and_is_unsure_elsewhere() -> None:
    features = np.linspace(0, 1, 21)[:, None]
    tried = np.array([0, 4, 8, 10])
    scores = np.sin(4 * features[tried, 0])
    belief = surrogate.fit(features, scores, tried, predicted=None, rng=np.random.default_rng(0))
    np.testing.assert_allclose(belief.mean[tried], scores, atol=0.1)
    assert belief.std[20] > 2 * belief.std[4]


def test_expected_improvement_is_the_mean_of_what_draws_gain() -> None:
    belief = surrogate.Posterior(np.array([0.0, 1.0, -1.0]), np.array([1.0, 0.1, 2.0]))
    draws = np.random.default_rng(0).normal(belief.mean, belief.std, (200_000, 3))
    want = np.maximum(draws - 0.5, 0).mean(0)
    np.testing.assert_allclose(surrogate.expected_improvement(belief, 0.5), want, atol=0.01)
