"""A recorded grid in place of the engine: searches can be compared in seconds, on real numbers.

Stopping rules see the recorded progress as they would have seen it live, and a stopped run
costs what it had cost by then.
"""

from collections.abc import Mapping
from dataclasses import replace

from kllm.tuners.grid import Grid
from kllm.tuners.outcome import Outcome
from kllm.tuners.space import Value
from kllm.tuners.stopping import Rule, replayed


class Replay:
    """Measures by looking up, and keeps the time that the real runs would have taken."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.spent_s = 0.0

    def run(self, settings: Mapping[str, Value], rule: Rule | None = None) -> Outcome:
        """The recorded outcome of a point, cut where `rule` stops it."""
        index = self.grid.space.find(settings)
        assert index is not None  # searches only know points of the grid's space
        outcome = self.grid.outcomes[index]
        if rule is not None and outcome.state == "complete":
            outcome = _cut(outcome, rule)
        self.spent_s += outcome.total_s
        return outcome


def _cut(outcome: Outcome, rule: Rule) -> Outcome:
    steps = replayed(
        outcome.ticks,
        outcome.requests,
        num_requests=outcome.num_requests,
        num_output_tokens=outcome.num_output_tokens,
    )
    for count, progress in enumerate(steps, start=1):
        if not (reason := rule(progress)):
            continue
        now = progress.tick.elapsed_s
        return replace(
            outcome,
            state="stopped",
            reason=reason,
            run_s=now,
            total_s=outcome.total_s - (outcome.run_s - now),
            ticks=outcome.ticks[:count],
            requests=tuple(row for row in outcome.requests if row.finished_s <= now),
        )
    return outcome
