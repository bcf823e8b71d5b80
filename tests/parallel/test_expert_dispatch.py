"""Tokens reach the ranks of their experts once, and the answers are added up where they began."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kllm import env
from kllm.errors import WorkerError
from kllm.parallel.communicator import Communicator
from kllm.parallel.emulated import EmulatedComm
from kllm.parallel.expert_all_gather import AllGather
from kllm.parallel.expert_all_to_all import AllToAll
from kllm.parallel.expert_dispatch import (
    Dispatcher,
    DispatchStep,
    Routed,
    check_conservation,
    checks_counts,
    pack_routing,
    unpack_routing,
)
from kllm.parallel.link import Link
from tests.parallel.expert_tokens import (
    COUNTS,
    PER_RANK,
    RANKS,
    K,
    check_sums,
    routed,
)
from tests.parallel.threads import run_ranks

BACKENDS: dict[str, Callable[[Communicator], Dispatcher]] = {
    "all_to_all": lambda comm: AllToAll(comm, PER_RANK),
    "all_gather": lambda comm: AllGather(comm, PER_RANK),
}


@pytest.fixture(autouse=True)
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)


@pytest.mark.parametrize("decode_only", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_every_token_gets_the_sum_over_its_experts(name: str, decode_only: bool) -> None:
    check_sums(BACKENDS[name], torch.float32, (False, decode_only))


def test_exact_exchange_sends_a_token_to_a_rank_once_and_in_order() -> None:
    def work(comm: Communicator) -> Routed:
        return AllToAll(comm, PER_RANK).send(routed(comm.rank), DispatchStep(0, False)).arrive()

    for rank, got in enumerate(run_ranks(RANKS, work)):
        sent = [routed(source) for source in range(RANKS)]
        wanted = [(tokens.slots // PER_RANK == rank).any(dim=1) for tokens in sent]
        pairs = zip(sent, wanted, strict=True)
        assert torch.equal(got.x, torch.cat([tokens.x[mask] for tokens, mask in pairs]))
        assert got.pairs == int((got.slots >= 0).sum())
        assert got.slots.max() < PER_RANK


def test_padding_is_no_work_for_any_expert() -> None:
    def work(comm: Communicator) -> int:
        step = DispatchStep(max(COUNTS), True)
        got = AllGather(comm, PER_RANK).send(routed(comm.rank), step).arrive()
        local = got.slots - got.first
        return int(((local >= 0) & (local < PER_RANK)).sum())

    assert sum(run_ranks(RANKS, work)) == sum(COUNTS) * K


@pytest.mark.parametrize("name", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("rank", range(RANKS))
def test_slots_stay_valid_where_rows_come_back_to_their_sender(name: str, rank: int) -> None:
    link = Link(latency_s=0.0, bytes_per_s=1e15)
    comm = EmulatedComm(link, size=RANKS, rank=rank, device=torch.device("cpu"))
    tokens = routed(2)
    trip = BACKENDS[name](comm).send(tokens, DispatchStep(max(COUNTS), False))
    got = trip.arrive()
    local = got.slots - got.first
    own = (local >= 0) & (local < PER_RANK)
    assert own.any()
    assert got.pairs in (None, int(own.sum()))
    assert trip.combine(got.x).shape == tokens.x.shape


def test_routing_travels_bit_by_bit() -> None:
    slots = torch.tensor([[-1, 0, 300], [7, -1, 2**30]])
    weights = torch.tensor([[0.1, -0.0, 1e-42], [float("inf"), 3.4e38, 1.0]])
    got_slots, got_weights = unpack_routing(pack_routing(slots, weights))
    assert torch.equal(got_slots, slots)
    assert torch.equal(got_weights.view(torch.int32), weights.view(torch.int32))


def test_lost_tokens_are_reported_on_every_rank() -> None:
    def work(comm: Communicator) -> str:
        received = 4 if comm.rank == 1 else 5
        try:
            check_conservation(comm, 5, received, torch.device("cpu"))
        except WorkerError as error:
            return str(error)
        return ""

    for message in run_ranks(3, work):
        assert message.startswith("15 tokens were sent to experts and 14 arrived")


def test_an_exchange_that_loses_counts_is_noticed() -> None:
    """A transport that delivers a wrong count fails before rows are read."""

    class Lossy(EmulatedComm):
        def all_to_all(
            self, out: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int]
        ) -> object:
            handle = super().all_to_all(out, x, out_splits, in_splits)
            if out.shape[1] == 2:  # rows and pairs to come
                out[0, 0] -= 1
            return handle

    link = Link(latency_s=0.0, bytes_per_s=1e15)
    comm = Lossy(link, size=RANKS, device=torch.device("cpu"))
    with pytest.raises(WorkerError, match="lost or made some"):
        AllToAll(comm, PER_RANK).send(routed(2), DispatchStep(0, False))


@pytest.mark.parametrize("capturing", [False, True])
def test_a_captured_step_does_not_wait_for_counts(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert checks_counts(torch.device("cuda")) != capturing
    assert checks_counts(torch.device("cpu"))
    monkeypatch.setattr(env, "debug", lambda: False)
    assert not checks_counts(torch.device("cuda"))
