"""What a rank keeps from one message to the next."""

import weakref
from collections.abc import Sequence

import numpy as np

from kllm.core import Request, SamplingParams
from kllm.engine.rank_process import RankServer
from kllm.engine.rank_protocol import Release, Sampled, StandIn, Step
from kllm.engine.step import MicroStep, RankOutcome
from kllm.engine.step_codec import StepCodec


class Recorder:
    """Samples a 7 for each request it is given."""

    def run(self, micro: Sequence[MicroStep], requests: Sequence[Request]) -> RankOutcome:
        count = len(requests)
        return RankOutcome(np.arange(count), np.full(count, 7))


def test_new_steps_begin_without_the_requests_of_earlier_ones() -> None:
    """A first step that samples nobody says nothing of requests."""
    idle = MicroStep(None, np.zeros(0, np.int64), (1,), True, 1)
    server, asked = RankServer(0), (Request("a", (5,), SamplingParams()),)

    def sampled(requests: tuple[Request, ...] | None) -> list[int]:
        found = server.reply(Step(StepCodec().pack([idle]), requests))
        assert isinstance(found, Sampled), found
        return np.frombuffer(found.token_ids, np.int64).tolist()

    server.reply(StandIn(Recorder()))
    assert sampled(asked) == [7]
    assert sampled(None) == [7]
    server.reply(StandIn(Recorder()))
    assert sampled(None) == []


def test_a_released_rank_is_gone() -> None:
    """With its weights: the next layout's need the memory."""
    server, rank = RankServer(0), Recorder()
    server.reply(StandIn(rank))
    held = weakref.ref(rank)
    del rank
    assert held() is not None
    assert server.reply(Release()) is True
    assert held() is None
