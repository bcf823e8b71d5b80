"""Steps of a layout's ranks, from the engine's side: who is told what, and whose tokens count."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kllm.config import ParallelConfig
from kllm.core import Outcome, Plan, Request
from kllm.engine.executor import Sharing, merge
from kllm.engine.rank_pool import RankPool
from kllm.engine.rank_protocol import Step
from kllm.engine.step import RankOutcome, sampled_on, steps_of
from kllm.parallel.layout import Place, place, rank_of


@dataclass(slots=True)
class _Mirror:
    """What a sampling rank knows of the requests it samples."""

    outputs: dict[str, int] = field(default_factory=dict)  # id: output tokens it has seen
    last: tuple[Request, ...] = ()


class RankSteps:
    """Runs plans on the ranks of a pool that have their KV memory.

    `run_s` is the time that the slowest rank took for its share of the last step.
    """

    def __init__(self, pool: RankPool, layout: ParallelConfig, sharing: Sharing) -> None:
        self._pool, self._layout, self._stripes = pool, layout, sharing.stripes
        self._places = [place(layout, rank) for rank in range(layout.world)]
        self._samplers = {
            (dp, cp): rank_of(layout, Place(layout.pp - 1, dp, cp, 0))
            for dp in range(layout.dp)
            for cp in range(layout.cp)
        }
        self._mirrors = {at: _Mirror() for at in self._samplers}
        self.run_s = 0.0

    def execute(self, plans: Sequence[Plan | None]) -> list[Outcome | None]:
        """Run one step of every group."""
        steps = steps_of(plans, self._layout, self._stripes)
        sampled = [_sampled(plan) for plan in plans]
        messages: dict[tuple[int, int], Step] = {}
        for dp, cp in self._samplers:
            mine = tuple(sampled[dp][i] for i in sampled_on(steps[dp], cp, self._stripes))
            messages[dp, cp] = Step(steps[dp], self._news((dp, cp), mine))
        silent = [Step(micro, ()) for micro in steps]
        samplers = set(self._samplers.values())
        answers: list[RankOutcome] = self._pool.call(
            [
                messages[at.dp, at.cp] if rank in samplers else silent[at.dp]
                for rank, at in enumerate(self._places)
            ]
        )
        self.run_s = max(answer.run_s for answer in answers)
        outcomes: list[Outcome | None] = []
        for dp, plan in enumerate(plans):
            parts = [answers[self._samplers[dp, cp]] for cp in range(self._layout.cp)]
            outcomes.append(None if plan is None else merge(parts, len(sampled[dp])))
        return outcomes

    def _news(
        self, at: tuple[int, int], requests: tuple[Request, ...]
    ) -> tuple[Request | str, ...] | None:
        """What a sampling rank must be told of the requests of a step."""
        mirror = self._mirrors[at]
        seen = mirror.outputs
        news = tuple(
            request.id if seen.get(request.id) == len(request.output_ids) else request
            for request in requests
        )
        # The rank adds the token that it samples, and forgets who is not in this step.
        mirror.outputs = {request.id: len(request.output_ids) + 1 for request in requests}
        same = requests == mirror.last and all(isinstance(item, str) for item in news)
        mirror.last = requests
        return None if same else news


def _sampled(plan: Plan | None) -> tuple[Request, ...]:
    if plan is None:
        return ()
    return tuple(r for r, yes in zip(plan.requests, plan.samples.tolist(), strict=True) if yes)
