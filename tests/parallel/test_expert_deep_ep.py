"""The adapter speaks to DeepEP as its documentation asks: with a fake of it, between threads."""

import sys

import pytest
import torch

from kllm import env
from kllm.config import ParallelConfig
from kllm.errors import WorkerError
from kllm.parallel import expert_deep_ep
from kllm.parallel.communicator import Communicator
from kllm.parallel.expert_backends import capturable
from kllm.parallel.expert_deep_ep import LOW_LATENCY_SIZES, DeepEP
from kllm.parallel.expert_dispatch import Dispatcher, DispatchStep
from kllm.parallel.single import SingleComm
from tests.parallel import fake_deep_ep
from tests.parallel.expert_tokens import COUNTS, DIM, PER_RANK, RANKS, K, check_sums, routed
from tests.parallel.threads import run_ranks


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deep_ep)  # type: ignore[arg-type]
    monkeypatch.setattr(expert_deep_ep, "_buffers", {})


def deep_ep(comm: Communicator) -> Dispatcher:
    comm.group = comm  # type: ignore[attr-defined]
    return DeepEP(comm, PER_RANK, DIM)


@pytest.mark.parametrize(
    "counts", [COUNTS, (17, 1, 1, 64), (0, 0, 1, 0), (0, 0, 0, 0), (257, 3, 0, 1)]
)
@pytest.mark.parametrize("ids", [torch.int64, torch.int32], ids=str)
def test_every_token_gets_the_sum_over_its_experts(
    counts: tuple[int, ...], ids: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_deep_ep, "topk_idx_t", ids)
    check_sums(deep_ep, torch.bfloat16, (True, False, True, True), counts)


def test_experts_get_no_more_rows_than_can_have_come() -> None:
    """The library gives a decode room for the most that an expert can get, for each expert."""

    def work(comm: Communicator) -> tuple[int, int]:
        tokens = routed(comm.rank, torch.bfloat16)
        trip = deep_ep(comm).send(tokens, DispatchStep(max(COUNTS), True))
        arrived = trip.arrive()
        own = (arrived.slots >= 0) & (arrived.slots < PER_RANK)
        assert arrived.x[own.squeeze(1)].isfinite().all()
        return len(arrived.x), int(own.sum())

    found = run_ranks(RANKS, work)
    assert {rows for rows, _ in found} == {RANKS * max(COUNTS) * min(K, PER_RANK)}
    assert sum(own for _, own in found) == sum(COUNTS) * K


@pytest.mark.parametrize(
    ("most", "size"), [(0, 16), (1, 16), (16, 16), (17, 64), (64, 64), (65, 256), (256, 256)]
)
def test_a_decode_is_given_room_for_its_tokens(
    most: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = []

    class Seen(fake_deep_ep.Buffer):
        def low_latency_dispatch(self, *args: object, **more: object) -> tuple[object, ...]:
            rooms.append(args[2])
            return super().low_latency_dispatch(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(fake_deep_ep, "Buffer", Seen)

    def work(comm: Communicator) -> None:
        deep_ep(comm).send(routed(comm.rank, torch.bfloat16, 0), DispatchStep(most, True))

    run_ranks(RANKS, work)
    assert rooms == [size] * RANKS


@pytest.mark.parametrize("then", LOW_LATENCY_SIZES)
@pytest.mark.parametrize("before", LOW_LATENCY_SIZES)
def test_a_dispatch_keeps_clear_of_a_combine_of_another_size(before: int, then: int) -> None:
    """In areas of shared memory as DeepEP lays them out, in tokens times experts."""

    def apart(one: tuple[int, int], other: tuple[int, int]) -> bool:
        return one[1] <= other[0] or other[1] <= one[0]

    read, unsent = (3 * before, 4 * before), (before, 2 * before)
    written = (2 * then, 3 * then)
    assert apart(written, read)
    assert apart(written, unsent)
    ranks_with_network = min(size for size in expert_deep_ep.GROUP_SIZES if size > 8)
    assert apart((0, -(-then // ranks_with_network)), unsent)


def test_layers_share_a_buffer_until_it_is_given_back() -> None:
    comm = run_ranks(1, lambda comm: comm)[0]
    first, second = deep_ep(comm)._buffer, deep_ep(comm)._buffer  # type: ignore[attr-defined]
    assert first is second
    expert_deep_ep.release()
    assert first.destroyed
    expert_deep_ep.release()  # nothing is left
    third = deep_ep(comm)._buffer  # type: ignore[attr-defined]
    assert third is not first
    assert not third.destroyed


def test_counts_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(fake_deep_ep.Buffer):
        def low_latency_dispatch(self, *args: object, **more: object) -> tuple[object, ...]:
            x, counts, *rest = super().low_latency_dispatch(*args, **more)  # type: ignore
            return x, counts + 1, *rest

    monkeypatch.setattr(fake_deep_ep, "Buffer", Wrong)

    def work(comm: Communicator) -> None:
        step = DispatchStep(max(COUNTS), True)
        deep_ep(comm).send(routed(comm.rank, torch.bfloat16), step)

    with pytest.raises(WorkerError, match="48 tokens were sent to experts and 60 arrived"):
        run_ranks(RANKS, work)


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize(
    ("layout", "batch", "without", "with_it"),
    [
        (ParallelConfig(tp=2), 999, True, True),
        (ParallelConfig(tp=2, ep=2), 999, True, True),  # every rank has all tokens
        (ParallelConfig(tp=2, ep=2, ep_backend="deep_ep"), 512, True, True),
        (ParallelConfig(tp=2, ep=2, ep_backend="deep_ep"), 513, False, False),
        (ParallelConfig(dp=2, ep=2), 256, True, True),
        (ParallelConfig(dp=2, ep=2), 257, True, False),
        (ParallelConfig(dp=2, ep=2, ep_backend="all_gather"), 257, True, True),
        (ParallelConfig(dp=2, ep=2, ep_backend="all_to_all"), 1, False, False),
        (ParallelConfig(tp=2, ep=2, ep_backend="all_to_all"), 1, False, False),
    ],
    ids=str,
)
def test_exchanges_that_the_host_waits_for_are_not_captured(
    layout: ParallelConfig,
    batch: int,
    without: bool,
    with_it: bool,
    installed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expert_deep_ep, "installed", lambda: installed)
    assert capturable(layout, batch) == (with_it if installed else without)


def test_a_library_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_deep_ep, "installed", lambda: True)
    assert expert_deep_ep.unusable() is None
    monkeypatch.delattr(fake_deep_ep, "topk_idx_t")
    assert expert_deep_ep.unusable() == "deep_ep is older than 1.2; install a newer DeepEP"
    monkeypatch.setitem(sys.modules, "deep_ep", None)  # what `import` then raises
    assert str(expert_deep_ep.unusable()).startswith("deep_ep cannot be imported (")

    def breaks(name: str) -> None:
        raise RuntimeError("boom\nand more")

    monkeypatch.setattr(expert_deep_ep, "import_module", breaks)
    assert "(RuntimeError: boom)" in str(expert_deep_ep.unusable())
    # A machine without a GPU does not import what may end its process.
    why = expert_deep_ep.problem(SingleComm(), 4096, 8, torch.device("cpu"), torch.bfloat16)
    assert str(why).startswith("deep_ep moves tokens between GPUs")
