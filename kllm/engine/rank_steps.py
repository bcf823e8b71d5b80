"""Steps of a layout's ranks, from the engine's side: who is told what, and whose tokens count."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kllm.config import ParallelConfig
from kllm.core import Outcome, Plan, Request
from kllm.engine.rank_protocol import Sampled, Step
from kllm.engine.step import RankOutcome, merge, sampled_on, steps_of
from kllm.engine.step_codec import StepCodec
from kllm.parallel.layout import place
from kllm.parallel.stripes import Stripes


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


class RankCaller(Protocol):
    """Reaches ranks that have their KV memory."""

    def call(self, messages: Sequence[Step]) -> list[Sampled]:
        """Send each of them its message; their answers."""


class RankSteps:
    """Runs plans on ranks.

    `run_s` is the time that the slowest rank took for its share of the last step.

    Args:
        ranks: reaches them.
        stripes: how prompts are dealt to the cp ranks; None without context parallelism.
        numbers: of the ranks that `ranks` reaches, some of each group; None: all of the layout.
    """

    def __init__(
        self,
        ranks: RankCaller,
        layout: ParallelConfig,
        stripes: Stripes | None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self._ranks, self._layout, self._stripes = ranks, layout, stripes
        places = [place(layout, n) for n in (range(layout.world) if numbers is None else numbers)]
        self._groups = [at.dp for at in places]
        self._samplers = {
            (at.dp, at.cp): rank
            for rank, at in enumerate(places)
            if at.pp == layout.pp - 1 and at.tp == 0
        }
        self._codecs = [StepCodec() for _ in range(layout.dp)]
        self._mirrors = {at: _Mirror() for at in self._samplers}
        self.run_s = 0.0

    def execute(self, plans: Sequence[Plan | None]) -> list[Outcome | None]:
        """Run one step of every group."""
        steps = steps_of(plans, self._layout, self._stripes)
        plain = [Step(codec.pack(m), None) for codec, m in zip(self._codecs, steps, strict=True)]
        messages = [plain[group] for group in self._groups]
        asked = [() if plan is None else plan.sampled for plan in plans]
        indices: dict[tuple[int, int], list[int]] = {}  # of `asked`, by who samples
        for (group, cp), rank in self._samplers.items():
            indices[group, cp] = here = sampled_on(steps[group], cp, self._stripes)
            news = self._mirrors[group, cp].news(tuple(asked[group][i] for i in here))
            if news is not None:
                messages[rank] = Step(plain[group].plan, news)
        answers = self._ranks.call(messages)
        self.run_s = max(answer.run_s for answer in answers)
        parts: list[list[RankOutcome]] = [[] for _ in plans]
        for at, rank in self._samplers.items():
            parts[at[0]].append(_outcome(answers[rank], indices[at]))
        return [
            None if plan is None else merge(found, len(wanted))
            for plan, found, wanted in zip(plans, parts, asked, strict=True)
        ]


def _outcome(answer: Sampled, indices: list[int]) -> RankOutcome:
    token_ids = np.frombuffer(answer.token_ids, np.int64)
    assert len(token_ids) == len(indices)
    return RankOutcome(np.array(indices, np.int64), token_ids, answer.logprobs)
