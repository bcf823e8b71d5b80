"""What every rank of a ring takes for the same steps, from one process that stands for each."""

import math
from typing import Any

import numpy as np
import pytest

from kllm.bench.prompt_time import Cost, Place, RankTimes
from kllm.bench.ring_arms import Arm
from kllm.bench.ring_balance import measure_ranks
from kllm.bench.ring_setup import choose
from kllm.bench.shared_prompt import SharedPrompt
from kllm.config import EngineConfig, SchedulerConfig
from kllm.engine import rank as engine_rank
from kllm.errors import CapacityError
from kllm.models.load import resolve
from kllm.parallel.overlap import RING
from kllm.parallel.stripes import Stripes

CHUNK = 256


class Uneven:
    """Ranks of which each takes a second more than the one before, and one more behind a prefix."""

    chunk, stripes = CHUNK, Stripes(4, 32)

    def __init__(self, fits: bool = True) -> None:
        self.rank, self.fits = 0, fits
        self.ran: list[tuple[int, int]] = []

    def stand_for(self, rank: int) -> None:
        self.rank = rank

    def arrange(self, kind: str, tokens: int) -> None:
        if not self.fits:
            raise CapacityError("the pool does not fit")

    def run(self, place: Place, link: object) -> Cost:
        self.ran.append((self.rank, place.start))
        return Cost(seconds=1.0 + self.rank + (place.start > 0))


def measured(isl: int, left_s: float, fits: bool = True) -> tuple[Uneven, RankTimes | None]:
    prompt: Any = Uneven(fits)
    ring = Arm(RING, [isl])
    ring.rounds["a"] = [{place: Cost(seconds=1.0) for place in ring.places(CHUNK)}]
    measure_ranks(prompt, ring, {"a": None}, left_s, lambda what: None)
    assert prompt.rank == 0, "the slice is again the rank that it was"
    return prompt, ring.ranks


def test_steps_at_both_ends_and_in_the_middle_run_on_every_rank() -> None:
    prompt, times = measured(16 * CHUNK, math.inf)
    assert times is not None
    assert [place.start // CHUNK for place in times.seconds] == [0, 4, 14]
    last = 14 * CHUNK
    assert prompt.ran[:4] == [(0, last), (0, 0), (0, 4 * CHUNK), (0, last)]
    assert [times.seconds[place] for place in times.seconds] == [
        [1, 2, 3, 4],
        [2, 3, 4, 5],
        [2, 3, 4, 5],
    ]
    assert times.over_mean == pytest.approx((4 + 5 + 5) / (2.5 + 3.5 + 3.5))


def test_less_time_leaves_the_last_step_and_none_leaves_nothing() -> None:
    _, times = measured(16 * CHUNK, 10.0)  # 4 ranks, 2 steps of a second
    assert times is not None
    assert [place.start // CHUNK for place in times.seconds] == [14]
    prompt, times = measured(16 * CHUNK, 7.9)
    assert (prompt.ran, times) == ([], None)


def test_a_rank_that_does_not_fit_leaves_nothing() -> None:
    assert measured(CHUNK, math.inf, fits=False)[1] is None


def test_a_slice_runs_the_tokens_of_the_rank_that_it_stands_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = []

    def watched(*args: Any, **options: Any) -> Any:
        ran.append(local_plan(*args, **options))
        return ran[-1]

    local_plan = engine_rank.local_plan
    monkeypatch.setattr(engine_rank, "local_plan", watched)
    scheduler = SchedulerConfig(max_batch=1, token_budget=CHUNK)
    tiny = EngineConfig(model="llama-3-8b", scale="tiny", device="cpu", scheduler=scheduler)
    config = choose(tiny, "rank-slice", 2)
    prompt = SharedPrompt(config, resolve(config), None)
    try:
        assert prompt.owner == 1
        for rank in (1, 0):
            prompt.stand_for(rank)
            assert prompt.owner == 1 - rank
            prompt.arrange(RING, 2 * CHUNK)
            prompt.run(Place(0, CHUNK, False))
    finally:
        prompt.close()
    assert [local.step.rank for local in ran] == [1, 0]
    positions = [local.plan.positions for local in ran]
    assert not np.intersect1d(*positions).size
    assert sorted(np.concatenate(positions)) == list(range(CHUNK))
