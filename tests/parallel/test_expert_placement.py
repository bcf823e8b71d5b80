"""Experts and their copies are placed on equal slots so that the busiest rank has little to do."""

from collections.abc import Sequence
from functools import cache
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kllm.config import ParallelConfig
from kllm.errors import ConfigError
from kllm.layers.experts import ExpertRanks, RoutedExperts
from kllm.parallel.expert_placement import (
    ExpertOptions,
    ExpertPlacement,
    balanced,
    imbalance,
    in_order,
)
from kllm.parallel.single import SingleComm


def sound(placement: ExpertPlacement, num_experts: int, redundant: int, ranks: int) -> None:
    """Every expert is there, slots are equal, and copies lie on different ranks."""
    assert len(placement.slots) == num_experts + redundant
    assert set(placement.slots) == set(range(num_experts))
    for rank in range(ranks):
        held = placement.held(rank)
        assert len(held) == len(set(held)) == placement.per_rank


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """(counts, redundant experts, ranks) that fit."""
    ranks = draw(st.integers(1, 8))
    per_rank = draw(st.integers(1, 6))
    num_experts = draw(st.integers(per_rank, ranks * per_rank))
    counts = draw(st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts))
    return counts, ranks * per_rank - num_experts, ranks


@given(cases())
@settings(deadline=None)
def test_placements_are_sound_and_never_worse_than_in_order(
    case: tuple[list[int], int, int],
) -> None:
    counts, redundant, ranks = case
    usual = in_order(len(counts), redundant, ranks)
    found = balanced(counts, redundant, ranks)
    for placement in (usual, found):
        sound(placement, len(counts), redundant, ranks)
        assert sum(placement.loads(counts)) == pytest.approx(sum(counts))
    assert imbalance(found.loads(counts)) <= imbalance(usual.loads(counts)) + 1e-9
    assert found == balanced(counts, redundant, ranks), "the same on all ranks"


def best_possible(counts: Sequence[int], redundant: int, ranks: int) -> float:
    """The smallest largest load over all placements: tries every one."""
    per_rank = (len(counts) + redundant) // ranks
    total = [0] * len(counts)

    def fill(rank: int, held: list[tuple[int, ...]]) -> float:
        if rank == ranks:
            if not all(total):
                return float("inf")
            return max(sum(counts[e] / total[e] for e in experts) for experts in held)
        best = float("inf")
        for chosen in combinations(range(len(counts)), per_rank):
            if held and chosen < held[-1]:
                continue  # ranks are alike
            for e in chosen:
                total[e] += 1
            best = min(best, fill(rank + 1, [*held, chosen]))
            for e in chosen:
                total[e] -= 1
        return best

    return fill(0, [])


@pytest.mark.parametrize(
    ("num_experts", "redundant", "ranks", "bound"),
    [
        (6, 0, 2, 1.1),
        (6, 0, 3, 1.1),
        # [5, 0, 0, 5, 5]: a copy of a 5 takes the slot that would better hold a 0.
        (5, 1, 3, 1.5),
    ],
)
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_placements_are_near_the_best_possible(
    num_experts: int, redundant: int, ranks: int, bound: float, data: st.DataObject
) -> None:
    counts = data.draw(st.lists(st.integers(0, 50), min_size=num_experts, max_size=num_experts))
    found = max(balanced(counts, redundant, ranks).loads(counts))
    assert found <= best_possible(counts, redundant, ranks) * bound + 1e-9


def test_pairs_are_exchanged_where_that_helps() -> None:
    """The busiest first would give 8 and 6."""
    assert balanced([5, 1, 2, 3, 1, 2], 0, 2).loads([5, 1, 2, 3, 1, 2]) == [7, 7]


def test_in_order_is_contiguous_and_copies_the_next_ranks_first_experts() -> None:
    assert in_order(8, 0, 4).plain
    assert in_order(8, 4, 4).slots == (0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 0)
    assert in_order(8, 4, 4).copies()[2] == (2, 3)
    assert in_order(5, 1, 3).slots == (0, 1, 1, 2, 3, 4)
    sound(in_order(5, 1, 3), 5, 1, 3)


def test_experts_that_do_not_divide_are_refused_with_what_would() -> None:
    with pytest.raises(ConfigError, match=r"8 routed experts and 0 .* 3 ranks; 1 redundant"):
        in_order(8, 0, 3)
    with pytest.raises(ConfigError, match=r"8 routed experts and 2 .* 4 ranks; 4 redundant"):
        balanced([1] * 8, 2, 4)
    with pytest.raises(ConfigError, match=r"10 redundant experts are more .*; 8 put every"):
        in_order(8, 10, 2)


def test_layers_with_measured_routing_are_balanced_and_others_in_order() -> None:
    counts = [9, 5, 5, 1, 1, 1, 1, 1]
    options = ExpertOptions.of(ParallelConfig(dp=4, ep=4, redundant_experts=4), {3: counts})
    assert options.placement(3, 8, 4) == balanced(counts, 4, 4) != in_order(8, 4, 4)
    assert options.placement(2, 8, 4) == in_order(8, 4, 4)


def test_routing_of_another_number_of_experts_is_refused() -> None:
    options = ExpertOptions.of(ParallelConfig(dp=2, ep=2), {3: [5, 1] * 4})
    with pytest.raises(ConfigError, match="layer 3 has 16 experts and routing counts of 8; "):
        options.placement(3, 16, 2)


def test_no_load_at_all_is_balanced() -> None:
    assert imbalance([0.0, 0.0]) == 1.0
    assert balanced([0] * 8, 4, 4) == in_order(8, 4, 4)


EXPERTS, RANKS, TOKENS = 256, 8, 1 << 15
LIMIT = 1.2  # of max/mean load


@cache
def zipf_trace(top_k: int, seed: int) -> Tensor:
    """[TOKENS, top_k] distinct experts, drawn with probabilities 1 / rank; ranks are shuffled."""
    order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(7))
    logs = -torch.log(1.0 + order.float())
    uniform = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return (logs - torch.log(-torch.log(uniform))).topk(top_k).indices  # Gumbel top-k


def measured(placement: ExpertPlacement, trace: Tensor) -> float:
    """Max/mean of the (token, expert) pairs that the ranks get, by the slots that tokens go to."""

    class Rank(SingleComm):
        size = RANKS

    experts = RoutedExperts(4, 4, placement, ExpertRanks(SingleComm(), Rank()), None)
    slots = experts.slots(trace, offset=0)
    assert torch.equal(torch.tensor(placement.slots)[slots], trace), "copies of the same expert"
    loads = (slots // placement.per_rank).flatten().bincount(minlength=RANKS)
    return imbalance(loads.tolist())


@pytest.mark.parametrize("top_k", [1, 8])
def test_eight_redundant_experts_even_out_zipf_routing(top_k: int) -> None:
    """Placed by one half of the traffic, measured on the other half."""
    seen, later = zipf_trace(top_k, seed=0), zipf_trace(top_k, seed=1)
    counts = seen.flatten().bincount(minlength=EXPERTS).tolist()
    before = measured(in_order(EXPERTS, 0, RANKS), later)
    after = {
        redundant: measured(balanced(counts, redundant, RANKS), later)
        for redundant in (0, 8, 16, 32)
    }
    print(
        f"\nZipf(1.0), {EXPERTS} experts, top-{top_k}, ep {RANKS}, max/mean: {before:.3f} in order"
    )
    for redundant, found in after.items():
        print(f"  placed with {redundant} redundant experts: {found:.3f}")
    assert before > LIMIT
    assert all(found <= LIMIT for redundant, found in after.items() if redundant)
    if top_k == 1:
        assert after[0] > LIMIT, "the first expert alone is more than a rank's share"
