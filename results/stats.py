"""Statistics for benches on machines that are never quiet.

Repeats of a bench are not independent normal draws: they have outliers (another process woke
up), they drift (clocks, heat, neighbours), and a second process differs from the first for
reasons that no amount of repeating inside one process shows. `judge` therefore works on

* the Hodges-Lehmann shift of log values (1963): nearly as efficient as the mean, and up to 29 %
  of outliers cannot carry it away;
* a standard error that is the larger of the bootstrap's and the MAD's, widened by the lag-1
  rank correlation (n values of an AR(1) series are worth n (1-r) / (1+r) independent ones);
* a floor for what differs between two processes and cannot be seen inside either;
* Student's t at 99 %.

"worse" needs both: the change is not noise (the interval excludes no change) and it matters
(the estimate is beyond the margin). "same" needs the whole interval inside the margin: two
one-sided tests (Schuirmann 1987). Everything else is "can't tell". Asking the whole interval to
lie beyond the margin would halve the power at twice the margin without making fewer false alarms
when nothing changed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

Verdict = Literal["better", "worse", "same", "can't tell", "not judged"]
Array = NDArray[np.float64]

BOOTSTRAP_DRAWS = 2000  # for the tails of an interval
SHIFT_DRAWS = 500  # for the quartiles only
MIN_REPEATS = 5  # fewer on a side and no interval deserves trust
DEFAULT_MARGIN = 0.05  # relative change below which nobody should act
# Standard deviation (relative) between the centres of two runs that neither run can show: memory
# layout, hash seeds, thread placement, neighbours (Mytkowicz et al. 2009). It grows with the
# noise of the machine, so it is the larger of a constant and a share of the spread of repeats.
RUN_TO_RUN = 0.01
RUN_TO_RUN_SHARE = 0.35
ALTERNATING = 0.003  # alternating runs, and one value a process, already contain that difference
MAX_CORRELATION = 0.9
MAD_TO_SIGMA = 1.4826
IQR_TO_SIGMA = 1 / 1.349
SHIFT_SE = math.sqrt(math.pi / 3)  # se(Hodges-Lehmann) / se(mean) for normal noise
MAX_PAIRWISE = 64  # beyond, medians are efficient enough and all pairs are too many


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What two lists of repeats say about one metric.

    `ratio` is new / base; `interval` holds its confidence interval at the level that the verdict
    used. All three numbers are None when the lists do not allow an estimate.
    """

    verdict: Verdict
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    p_value: float | None = None  # two-sided, corrected for the number of metrics
    paired: bool = False
    reason: str = ""  # why not more, when there is something to say


def bootstrap_medians(values: Sequence[float] | Array, seed: int = 0) -> Array:
    """Medians of BOOTSTRAP_DRAWS resamples with replacement, [draws]."""
    data = np.asarray(values, dtype=np.float64)
    # Bounded blocks: a series of 100,000 requests must not allocate draws x requests at once.
    block = max(1, min(BOOTSTRAP_DRAWS, 4_000_000 // len(data)))
    rng = np.random.default_rng(seed)
    medians = []
    for start in range(0, BOOTSTRAP_DRAWS, block):
        draws = min(block, BOOTSTRAP_DRAWS - start)
        picks = rng.integers(0, len(data), size=(draws, len(data)))
        medians.append(np.median(data[picks], axis=1))
    return np.concatenate(medians)


def median_ci(
    values: Sequence[float], confidence: float = 0.95, seed: int = 0
) -> tuple[float, tuple[float, float] | None]:
    """Median and its percentile bootstrap interval; no interval below three values."""
    median = float(np.median(values))
    if len(values) < 3:
        return median, None
    tail = 50 * (1 - confidence)
    low, high = np.percentile(bootstrap_medians(values, seed), [tail, 100 - tail])
    return median, (float(low), float(high))


def rank_correlation(*runs: Array) -> float:
    """Lag-1 rank autocorrelation pooled over runs, in [0, MAX_CORRELATION].

    Ranks keep one outlier from hiding a drift. Kendall (1954): the estimate from n values is
    low by about (1 + 3 r) / n, which is corrected.
    """
    total = sum(len(run) for run in runs)
    pooled = 0.0
    for run in runs:
        if len(run) < 3 or np.ptp(run) == 0:
            continue
        ranks = np.argsort(np.argsort(run, kind="stable"), kind="stable") - (len(run) - 1) / 2
        pooled += len(run) * float(ranks[1:] @ ranks[:-1]) / float(ranks @ ranks)
    raw = pooled / total
    corrected = raw + (1 + 3 * raw) * len(runs) / total
    return min(max(corrected, 0.0), MAX_CORRELATION)


def centre(values: Array) -> Array:
    """Hodges-Lehmann centre of each row: median of the means of all pairs. [..., n] -> [...]"""
    if values.shape[-1] > MAX_PAIRWISE:
        return np.asarray(np.median(values, axis=-1))
    i, j = np.triu_indices(values.shape[-1])
    return np.asarray(np.median((values[..., i] + values[..., j]) / 2, axis=-1))


def shift(base: Array, new: Array) -> Array:
    """Hodges-Lehmann shift of each row: median of all differences. [..., n], [..., m] -> [...]"""
    if max(base.shape[-1], new.shape[-1]) > MAX_PAIRWISE:
        return np.asarray(np.median(new, axis=-1) - np.median(base, axis=-1))
    differences = new[..., :, None] - base[..., None, :]
    return np.asarray(np.median(differences.reshape(*base.shape[:-1], -1), axis=-1))


def spread(values: Array) -> float:
    """Standard deviation of normal noise with the same median absolute deviation."""
    return MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values))))


def _resample(values: Array, rng: np.random.Generator) -> Array:
    return values[rng.integers(0, len(values), size=(SHIFT_DRAWS, len(values)))]


def _robust_error(draws: Array) -> float:
    # The quartiles, not the standard deviation: a resample that happens to hold one outlier
    # several times would otherwise decide the error alone.
    low, high = np.percentile(draws, [25, 75])
    return float(high - low) * IQR_TO_SIGMA


def _paired_change(base: Array, new: Array, seed: int) -> tuple[float, float, int]:
    """Log change, its standard error and the degrees of freedom, for alternating repeats."""
    differences = new - base
    drawn = _robust_error(centre(_resample(differences, np.random.default_rng(seed))))
    error = max(drawn, SHIFT_SE * spread(differences) / math.sqrt(len(base)))
    r = rank_correlation(differences)
    error = math.hypot(error * math.sqrt((1 + r) / (1 - r)), ALTERNATING)
    return float(centre(differences)), error, len(base) - 1


def _unpaired_change(
    base: Array, new: Array, seed: int, *, processes: bool
) -> tuple[float, float, int]:
    """As `_paired_change`, for two runs; `processes`: each value is a process of its own."""
    rng = np.random.default_rng(seed)
    drawn = _robust_error(shift(_resample(base, rng), _resample(new, rng)))
    sigma = spread(base), spread(new)
    from_spread = math.hypot(sigma[0] / math.sqrt(len(base)), sigma[1] / math.sqrt(len(new)))
    r = rank_correlation(base, new)
    within = max(drawn, SHIFT_SE * from_spread) * math.sqrt((1 + r) / (1 - r))
    between = max(RUN_TO_RUN, RUN_TO_RUN_SHARE * max(sigma))
    error = math.hypot(within, ALTERNATING if processes else math.sqrt(2) * between)
    return float(shift(base, new)), error, len(base) + len(new) - 2


def judge(
    base: Sequence[float],
    new: Sequence[float],
    *,
    higher_is_better: bool,
    paired: bool = False,
    processes: bool = False,
    margin: float = DEFAULT_MARGIN,
    confidence: float = 0.99,
    seed: int = 0,
) -> Judgement:
    """Compare two lists of repeats of one metric.

    Args:
        base: repeats of the reference, in the order they were measured.
        new: repeats of the candidate.
        higher_is_better: False for times.
        paired: value i of both sides was measured in alternation.
        processes: every value comes from a process of its own.
        margin: relative change that matters, 0.05 for five percent.
        confidence: of the interval; the chance of a false alarm is half of 1 - confidence.
        seed: of the bootstrap.
    """
    a, b = np.asarray(base, dtype=np.float64), np.asarray(new, dtype=np.float64)
    paired = paired and len(a) == len(b)
    if len(a) == 0 or len(b) == 0:
        return Judgement(verdict="can't tell", reason="one side has no values")
    if not (np.all(a > 0) and np.all(b > 0)):
        if np.ptp(np.concatenate([a, b])) == 0:
            return Judgement(verdict="same", ratio=1.0, interval=(1.0, 1.0), p_value=1.0)
        return Judgement(verdict="can't tell", reason="a ratio needs positive values")
    log_a, log_b = np.log(a), np.log(b)
    if len(a) < MIN_REPEATS or len(b) < MIN_REPEATS:
        ratio = math.exp(float(shift(log_a, log_b)))
        reason = f"{len(a)} and {len(b)} repeats; at least {MIN_REPEATS} a side are needed"
        return Judgement(verdict="can't tell", ratio=ratio, reason=reason)
    if paired:
        change, error, freedom = _paired_change(log_a, log_b, seed)
    else:
        change, error, freedom = _unpaired_change(log_a, log_b, seed, processes=processes)
    half = float(stdtrit(freedom, 0.5 + confidence / 2)) * error
    low, high = change - half, change + half
    p_value = 2 * float(stdtr(freedom, -abs(change) / error))
    return Judgement(
        verdict=decide(change, (low, high), higher_is_better=higher_is_better, margin=margin),
        ratio=math.exp(change),
        interval=(math.exp(low), math.exp(high)),
        p_value=min(p_value, 1.0),
        paired=paired,
    )


def decide(
    change: float, interval: tuple[float, float], *, higher_is_better: bool, margin: float
) -> Verdict:
    """The verdict on a log change; margin m is m more of a time, or m less of a rate."""
    low, high = interval
    if higher_is_better:  # turn it round: from here on positive is worse
        change, low, high = -change, -high, -low
    worse = -math.log1p(-margin) if higher_is_better else math.log1p(margin)
    better = math.log1p(margin) if higher_is_better else -math.log1p(-margin)
    if low > 0 and change >= worse:
        return "worse"
    if high < 0 and -change >= better:
        return "better"
    return "same" if -better < low and high < worse else "can't tell"


def judge_exact(
    base: Sequence[float], new: Sequence[float], *, higher_is_better: bool, margin: float
) -> Judgement:
    """Compare counts that repeat bit for bit: there is no noise to allow for."""
    a, b = float(np.median(base)), float(np.median(new))
    if a == b:
        return Judgement(verdict="same", ratio=1.0, interval=(1.0, 1.0))
    if a <= 0 or b <= 0:
        verdict: Verdict = "better" if (b > a) == higher_is_better else "worse"
        return Judgement(verdict=verdict, reason=f"from {a:g} to {b:g}")
    change = math.log(b / a)
    verdict = decide(change, (change, change), higher_is_better=higher_is_better, margin=margin)
    return Judgement(verdict=verdict, ratio=b / a, interval=(b / a, b / a))


def holm(judgements: Mapping[str, Judgement], alpha: float = 0.01) -> dict[str, Judgement]:
    """Correct p values for their number (Holm 1979) and withdraw what no longer holds.

    A bench with twenty metrics looks twenty times for a difference; without this a quiet change
    would raise a false alarm in one run out of a few. Works under any dependence of the metrics.
    """
    tested = sorted((j.p_value, name) for name, j in judgements.items() if j.p_value is not None)
    corrected, running = dict(judgements), 0.0
    for rank, (p_value, name) in enumerate(tested):
        running = max(running, min(1.0, p_value * (len(tested) - rank)))
        judgement = replace(judgements[name], p_value=running)
        if judgement.verdict in ("better", "worse") and running > alpha:
            reason = f"not certain enough among {len(tested)} metrics"
            judgement = replace(judgement, verdict="can't tell", reason=reason)
        corrected[name] = judgement
    return corrected


def median_ratio(
    base: Sequence[float], new: Sequence[float], seed: int = 0
) -> tuple[float, tuple[float, float] | None]:
    """Median of `new` over that of `base`, with its 95 % bootstrap interval.

    The interval draws whole rounds (new[i] with base[i]); there is none below three of them.

    Raises:
        ValueError: the lists have different lengths.
    """
    rounds = np.array(list(zip(base, new, strict=True)), dtype=np.float64)
    old, latest = np.median(rounds, axis=0)
    if len(rounds) < 3:
        return float(latest / old), None
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(rounds), size=(BOOTSTRAP_DRAWS, len(rounds)))
    medians = np.median(rounds[draws], axis=1)  # [draws, 2]
    low, high = np.percentile(medians[:, 1] / medians[:, 0], [2.5, 97.5])
    return float(latest / old), (float(low), float(high))


def paired_ratio(
    base: Sequence[float], new: Sequence[float]
) -> tuple[float, tuple[float, float] | None]:
    """Median of new[i] / base[i] over interleaved pairs, with its 95 % bootstrap interval.

    Raises:
        ValueError: the lists have different lengths.
    """
    logs = np.log([n / b for b, n in zip(base, new, strict=True)])
    median, interval = median_ci([float(x) for x in logs])
    if interval is None:
        return math.exp(median), None
    return math.exp(median), (math.exp(interval[0]), math.exp(interval[1]))
