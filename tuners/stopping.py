"""When a running trial has shown enough: it misses its SLO, its queue grows, or it cannot win."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kllm.results.sequential import AttainmentTest
from kllm.tuners.objective import Goal, Slo
from kllm.tuners.outcome import Outcome, Progress, Served, Tick

Rule = Callable[[Progress], str | None]  # a sentence stops the trial

INDIFFERENCE = 0.1  # attainment this far below target is surely to be called a miss
RACE_FROM = 0.15  # share of the output tokens before which nothing is compared
RACE_SLACK = (0.8, 0.2)  # tolerated slowness at the start and at the end of the run
# Of layouts: those that are half as fast but answer sooner belong to the trade-off that is shown.
LAYOUT_RACE_SLACK = (2.0, 1.0)
QUEUE_SAMPLES = 16
OPEN_LOOP_SETTLE = 10  # requests of a cold start
OPEN_LOOP_MIN_WAITING = 8
QUEUE_Z = 4.0  # standard errors of the trend; many looks at one run need more than two


class Stopper:
    """All rules for one trial; the first reason wins."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)

    def __call__(self, progress: Progress) -> str | None:
        """A reason to stop, or None."""
        for rule in self.rules:
            if reason := rule(progress):
                return reason
        return None


class MissesSlo:
    """Attainment below target: certain by counting, or likely by a sequential test.

    Counting: more requests have missed than may miss in the whole run. The sequential test
    (Wald 1945) assumes that requests are alike; those of a cold start are not, so it has a say
    only after `settle` requests.
    """

    def __init__(self, slo: Slo, *, settle: int) -> None:
        self.slo = slo
        self.settle = settle
        low = min(INDIFFERENCE, slo.attainment / 2)
        self.test = AttainmentTest(slo.attainment, indifference=low)
        self.ended = 0
        self.missed = 0

    def __call__(self, progress: Progress) -> str | None:
        """A reason to stop, or None."""
        for row in progress.finished:
            met = self.slo.met_by(row)
            self.ended += 1
            self.missed += not met
            if self.ended > self.settle:
                self.test.update(met)
        allowed = math.floor((1 - self.slo.attainment) * progress.num_requests + 1e-9)
        if self.missed > allowed or self.test.decision == "misses":
            return (
                f"misses its SLO: {self.missed} of the first {self.ended} requests missed a limit"
            )
        return None


class GrowingQueue:
    """In an open loop, a queue with a rising trend will miss every TTFT limit sooner or later.

    Mann-Kendall trend test (Mann 1945) on the queue's length at even distances of time.
    """

    def __init__(self, *, every_s: float, min_waiting: int) -> None:
        self.every_s = every_s
        self.min_waiting = min_waiting
        self.lengths: list[int] = []
        self.next_s = 0.0

    def __call__(self, progress: Progress) -> str | None:
        """A reason to stop, or None."""
        tick = progress.tick
        if tick.elapsed_s < self.next_s:
            return None
        self.next_s = tick.elapsed_s + self.every_s
        self.lengths.append(tick.waiting)
        if len(self.lengths) < QUEUE_SAMPLES or tick.waiting < self.min_waiting:
            return None
        if trend_z(self.lengths) < QUEUE_Z:
            return None
        return (
            f"its queue grows: {tick.waiting} requests wait after {tick.elapsed_s:.1f} s "
            "and the load does not adapt"
        )


def trend_z(values: Sequence[float]) -> float:
    """Mann-Kendall statistic in standard errors; above 0 means rising. Ties are corrected."""
    data = np.asarray(values, float)
    n = len(data)
    rises = float(np.sign(data[None, :] - data[:, None])[np.triu_indices(n, 1)].sum())
    _, ties = np.unique(data, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    return (rises - math.copysign(1, rises)) / math.sqrt(variance) if variance and rises else 0.0


class CannotWin:
    """Too slow against the best trial at the same number of output tokens.

    Goodput is at most the throughput, so a run whose tokens come later than the best's good
    tokens by more than the slack cannot end above it. The slack shrinks as the run goes on:
    early tokens say little, because settings differ in how they mix prefill with decode.

    Args:
        best: progress of the best trial so far.
        attainment: share of the best trial's tokens that counted.
        slack: tolerated slowness at the start and at the end.
    """

    def __init__(
        self,
        best: Sequence[Tick],
        *,
        attainment: float = 1.0,
        slack: tuple[float, float] = RACE_SLACK,
    ) -> None:
        self.slack = slack
        self.tokens = np.array([0.0, *(t.output_tokens for t in best)]) * attainment
        self.seconds = np.array([0.0, *(t.elapsed_s for t in best)])

    def __call__(self, progress: Progress) -> str | None:
        """A reason to stop, or None."""
        tick = progress.tick
        done = tick.output_tokens / max(progress.num_output_tokens, 1)
        if done < RACE_FROM or tick.output_tokens > self.tokens[-1]:
            return None
        rival_s = float(np.interp(tick.output_tokens, self.tokens, self.seconds))
        first, last = self.slack
        if tick.elapsed_s <= rival_s * (1 + first + (last - first) * done):
            return None
        return (
            f"cannot win: {tick.output_tokens} output tokens took {tick.elapsed_s:.2f} s, "
            f"the best setting so far needed {rival_s:.2f} s"
        )


def replayed(
    ticks: Sequence[Tick],
    requests: Sequence[Served],
    *,
    num_requests: int,
    num_output_tokens: int,
) -> list[Progress]:
    """The progress that a stopping rule would have been told, from a stored run."""
    rows = sorted(requests, key=lambda row: row.finished_s)
    steps, at = [], 0
    for tick in ticks:
        upto = at
        while upto < len(rows) and rows[upto].finished_s <= tick.elapsed_s:
            upto += 1
        steps.append(
            Progress(
                tick=tick,
                finished=rows[at:upto],
                num_requests=num_requests,
                num_output_tokens=num_output_tokens,
            )
        )
        at = upto
    return steps


def rules_for(
    goal: Goal,
    *,
    concurrency: int | None,
    best: Outcome | None,
    best_metrics: Mapping[str, float],
    slack: tuple[float, float] = RACE_SLACK,
) -> Stopper:
    """The rules that suit a goal.

    Args:
        goal: objectives and SLO.
        concurrency: of a closed loop; None: an open loop, whose queue can grow.
        best: run of the best trial so far, if there is one.
        best_metrics: its metrics.
        slack: of `CannotWin`.
    """
    rules: list[Rule] = []
    if goal.slo.limited:
        rules.append(MissesSlo(goal.slo, settle=concurrency or OPEN_LOOP_SETTLE))
        if concurrency is None and math.isfinite(goal.slo.ttft_s):
            rules.append(
                GrowingQueue(every_s=goal.slo.ttft_s / 2, min_waiting=OPEN_LOOP_MIN_WAITING)
            )
    # Several objectives: a slow run may still be the best in another one.
    racing = goal.single and goal.objectives[0].name in ("goodput", "throughput")
    if racing and best is not None and goal.feasible(best_metrics):
        counted = _counted(goal, best_metrics)
        rules.append(CannotWin(best.ticks, attainment=counted, slack=slack))
    return Stopper(rules)


def _counted(goal: Goal, metrics: Mapping[str, float]) -> float:
    """Share of the best run's output tokens that its objective counted."""
    return metrics[goal.objectives[0].metric] / metrics["output_tokens_per_s"]
