"""Prompts put together from some of their steps; the balance of a deal."""

from itertools import pairwise

import pytest

from kllm.bench.prompt_time import Cost, Place, critical_path, places, prompt_cost
from kllm.parallel.stripes import Stripes

K = 1024


def steps_of(tokens: int, chunk: int) -> list[Place]:
    return [
        Place(start, min(start + chunk, tokens), start + chunk >= tokens)
        for start in range(0, tokens, chunk)
    ]


@pytest.mark.parametrize("prompts", [[1], [512 * K], [100, 8192, 8193, 40 * K], [32 * K, 1 << 20]])
def test_both_ends_are_measured_and_no_gap_is_wide(prompts: list[int]) -> None:
    chunk = 8192
    found = places(prompts, chunk)
    assert found == sorted(set(found))
    for tokens in prompts:
        steps = steps_of(tokens, chunk)
        assert {steps[0], steps[-1]} <= set(found)
        assert set(steps[-2:-1]) <= set(found)
    starts = [place.start for place in found if not place.last]
    for low, high in pairwise(starts):
        # Places stand at whole steps: rounding may widen a gap a little.
        assert high <= 9 * max(low, chunk)


@pytest.mark.parametrize("tokens", [1, 100, 128, 129, 1000, 128 * 37])
def test_costs_that_grow_along_a_line_add_up_exactly(tokens: int) -> None:
    chunk = 128

    def cost(place: Place) -> Cost:
        behind = place.start / 1000
        end = 5.0 if place.last else 0.0
        return Cost(
            seconds=2 + 3 * behind + end,
            exposed_s=1 + behind,
            transfer_s=4 * behind,
            passing_bytes=place.end,
        )

    every = [cost(place) for place in steps_of(tokens, chunk)]
    found = prompt_cost(tokens, chunk, {place: cost(place) for place in places([tokens], chunk)})
    assert found.seconds == pytest.approx(sum(step.seconds for step in every))
    assert found.exposed_s == pytest.approx(sum(step.exposed_s for step in every))
    assert found.transfer_s == pytest.approx(sum(step.transfer_s for step in every))
    assert found.passing_bytes == tokens, "the most, not the sum"


def test_a_short_prompt_is_read_off_the_places_of_longer_ones() -> None:
    measured = {place: Cost(seconds=1 + place.start) for place in places([1024, 4096], 128)}
    want = sum(1 + place.start for place in steps_of(1024, 128))
    assert prompt_cost(1024, 128, measured).seconds == pytest.approx(want)


@pytest.mark.parametrize("tokens", [32 * K, 100_000, 512 * K, 1 << 20])
def test_the_deal_keeps_eight_ranks_in_step(tokens: int) -> None:
    assert critical_path(tokens, 8192, Stripes(8, 512)) <= 1.05


def test_the_critical_path_counts_every_visible_pair() -> None:
    """Against counting pairs one by one, where a step has less than a whole deal."""
    stripes, tokens, chunk = Stripes(2, 4), 50, 8
    longest = total = 0
    for start in range(0, tokens, chunk):
        work = [0, 0]
        for position in range(start, min(start + chunk, tokens)):
            stripe = position // 4 % 4
            work[min(stripe, 3 - stripe)] += position + 1
        longest += max(work)
        total += sum(work)
    found = critical_path(tokens, chunk, stripes)
    assert found == pytest.approx(2 * longest / total)
    assert found > 1.05, "steps this short cannot be balanced"
