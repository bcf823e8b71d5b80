"""Steps of a layout's ranks, from the engine's side: who is told what, and whose tokens count."""

from collections.abc import Sequence

import numpy as np

from kllm.config import ParallelConfig
from kllm.core import Outcome, Plan, Request
from kllm.engine.executor import Sharing, merge
from kllm.engine.rank_pool import RankPool
from kllm.engine.rank_protocol import Sampled, Step
from kllm.engine.step import RankOutcome, sampled_on, steps_of
from kllm.engine.step_codec import StepCodec
from kllm.parallel.layout import Place, place, rank_of


class _Mirror:
    """What a sampling rank knows of the requests it samples."""

    def __init__(self) -> None:
        self._requests: tuple[Request, ...] = ()  # of the last step
        self._lengths: list[int] = []  # output tokens of each

    def news(self, requests: tuple[Request, ...]) -> tuple[Request | str, ...] | None:
        """What it must be told of the requests of a step (`Step.requests`)."""
        lengths = [len(request.output_ids) for request in requests]
        news: tuple[Request | str, ...] | None = None
        if requests != self._requests or lengths != self._lengths:
            ids = (request.id for request in self._requests)
            known = dict(zip(ids, self._lengths, strict=True))
            pairs = zip(requests, lengths, strict=True)
            news = tuple(r.id if known.get(r.id) == length else r for r, length in pairs)
        # The rank adds the token that it samples, and forgets who is not in this step.
        self._requests, self._lengths = requests, [length + 1 for length in lengths]
        return news


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
        self._codecs = [StepCodec() for _ in range(layout.dp)]
        self._mirrors = {at: _Mirror() for at in self._samplers}
        self.run_s = 0.0

    def execute(self, plans: Sequence[Plan | None]) -> list[Outcome | None]:
        """Run one step of every group."""
        stripes, layout = self._stripes, self._layout
        steps = steps_of(plans, layout, stripes)
        plain = [Step(codec.pack(m), None) for codec, m in zip(self._codecs, steps, strict=True)]
        messages = [plain[at.dp] for at in self._places]
        asked = [() if plan is None else plan.sampled for plan in plans]
        indices: dict[tuple[int, int], list[int]] = {}  # of `asked`, by who samples
        for (dp, cp), rank in self._samplers.items():
            indices[dp, cp] = here = sampled_on(steps[dp], cp, stripes)
            news = self._mirrors[dp, cp].news(tuple(asked[dp][i] for i in here))
            if news is not None:
                messages[rank] = Step(plain[dp].plan, news)
        answers: list[Sampled] = self._pool.call(messages)
        self.run_s = max(answer.run_s for answer in answers)
        outcomes: list[Outcome | None] = []
        for dp, plan in enumerate(plans):
            parts = [
                _outcome(answers[self._samplers[dp, cp]], indices[dp, cp])
                for cp in range(layout.cp)
            ]
            outcomes.append(None if plan is None else merge(parts, len(asked[dp])))
        return outcomes


def _outcome(answer: Sampled, indices: list[int]) -> RankOutcome:
    token_ids = np.frombuffer(answer.token_ids, np.int64)
    assert len(token_ids) == len(indices)
    return RankOutcome(np.array(indices, np.int64), token_ids, answer.logprobs)
