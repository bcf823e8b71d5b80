"""What a rank alone takes for the tokens that other ranks would send it."""

import pytest
import torch

from kllm.parallel.emulated import EmulatedComm
from kllm.parallel.expert_all_gather import AllGather
from kllm.parallel.expert_dispatch import DispatchStep, Routed
from kllm.parallel.link import Link

RANKS, PER_RANK, TOKENS, MOST, K = 4, 6, 5, 7, 3
LINK = Link(latency_s=0.0, bytes_per_s=1e12)


@pytest.mark.parametrize("rank", range(RANKS))
def test_foreign_tokens_want_experts_as_far_on_as_their_ranks(rank: int) -> None:
    slots = RANKS * PER_RANK
    generator = torch.Generator().manual_seed(rank)
    chosen = torch.stack([torch.randperm(slots, generator=generator)[:K] for _ in range(TOKENS)])
    tokens = Routed(torch.randn(TOKENS, 8), chosen, torch.rand(TOKENS, K))
    comm = EmulatedComm(LINK, size=RANKS, rank=rank, device=torch.device("cpu"))
    found = AllGather(comm, PER_RANK).send(tokens, DispatchStep(MOST, True)).arrive()

    arrived = found.slots.view(RANKS, MOST, K)
    assert (arrived[:, TOKENS:] == -1).all(), "padding is nobody's"
    assert torch.equal(arrived[rank, :TOKENS], chosen)
    for other in range(RANKS):
        for token in range(TOKENS):
            want = [(slot + (other - rank) * PER_RANK) % slots for slot in chosen[token].tolist()]
            assert arrived[other, token].tolist() == want
    mine = (found.slots >= found.first) & (found.slots < found.first + PER_RANK)
    assert int(mine.sum()) == TOKENS * K, "a rank is sent as much as it sends"
    # Each choice is one of this rank's experts exactly once, so that they differ as choices do.
    wanted = (found.slots[mine] - found.first).sort().values
    assert torch.equal(wanted, (chosen.flatten() % PER_RANK).sort().values)
