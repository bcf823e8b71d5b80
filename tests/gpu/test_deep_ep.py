"""DeepEP between two GPUs gives what gathering all tokens gives. Debug checks are on."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed import group

from kllm import kernels
from kllm.hardware.links import in_processes
from kllm.parallel import expert_deep_ep
from kllm.parallel.communicator import Communicator
from kllm.parallel.distributed import TorchComm
from kllm.parallel.expert_all_gather import AllGather
from kllm.parallel.expert_deep_ep import DeepEP
from kllm.parallel.expert_dispatch import Dispatcher, DispatchStep, Routed
from tests.gpu.cases import distance, randn
from tests.tolerances import MOE_DISTANCE

RANKS, PER_RANK, DIM, HIDDEN, K = 2, 16, 2048, 256, 8
Step = tuple[tuple[int, int], bool]  # tokens of each rank, whether it is a decode
# In this order, so that every size of low-latency exchange follows every other, and normal kernels
# come between them. An idle rank runs one token; a share of a batch may be empty.
STEPS: tuple[Step, ...] = (
    ((1, 1), True),
    ((4, 1), True),
    ((256, 1), True),
    ((37, 64), True),
    ((16, 3), True),
    ((1, 17), True),
    ((256, 256), True),
    ((5, 16), True),
    ((1, 0), True),
    ((300, 1), True),  # more than the low-latency kernels take
    ((2000, 1), False),
    ((1, 300), False),
    ((0, 40), False),
    ((1, 4), True),
)
REPLAYED = ((1, 1), (4, 1), (37, 64), (256, 1), (3, 3))  # sizes of captured decodes


@pytest.fixture(scope="module", autouse=True)
def checked_deep_ep(two_gpus: None) -> Iterator[None]:
    why = expert_deep_ep.unusable()
    if why is not None:
        pytest.skip(why)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KLLM_DEBUG", "1")  # the ranks inherit it
        yield


def tokens(rank: int, n: int, seed: int, device: torch.device) -> Routed:
    generator = torch.Generator().manual_seed(seed * RANKS + rank)
    weights, slots = torch.rand(n, RANKS * PER_RANK, generator=generator).topk(K)
    x = torch.randn(n, DIM, generator=generator).to(device, torch.bfloat16)
    weights = weights / weights.sum(dim=1, keepdim=True)
    return Routed(x, slots.to(device), weights.to(device))


class Ranks:
    """A rank's experts, and the two ways to reach those of the other."""

    def __init__(self, rank: int, device: torch.device) -> None:
        assert group.WORLD is not None
        self.comm: Communicator = TorchComm(group.WORLD, range(RANKS))
        self.rank, self.device = rank, device
        self.w13, self.w2 = (
            randn(*shape, dtype=torch.bfloat16, device=device, seed=seed + rank) * shape[2] ** -0.5
            for seed, shape in (
                (1000, (PER_RANK, 2 * HIDDEN, DIM)),
                (2000, (PER_RANK, DIM, HIDDEN)),
            )
        )
        self.gathered: Dispatcher = AllGather(self.comm, PER_RANK)
        self.exchanged: Dispatcher = DeepEP(self.comm, PER_RANK, DIM)

    def run(self, dispatcher: Dispatcher, sent: Routed, step: DispatchStep) -> Tensor:
        trip = dispatcher.send(sent, step)
        t = trip.arrive()
        y = kernels.moe(t.x, t.slots, t.weights, self.w13, self.w2, None, t.first, t.pairs)
        return trip.combine(y)

    def worst(self, found: Tensor, want: Tensor) -> float:
        """The distance on the rank where it is larger; NaN where that is not finite."""
        mine = torch.tensor([distance(found, want)], dtype=torch.float64, device=self.device)
        every = mine.new_empty(RANKS)
        self.comm.all_gather(every, mine).wait()
        return float(every.max())


def compare(rank: int, ranks: int, device: torch.device) -> list[float]:
    """The distance of each step."""
    here = Ranks(rank, device)
    found = []
    for seed, (counts, decode) in enumerate(STEPS):
        sent, step = tokens(rank, counts[rank], seed, device), DispatchStep(max(counts), decode)
        got = here.run(here.exchanged, sent, step)
        assert got.dtype == torch.bfloat16
        found.append(here.worst(got, here.run(here.gathered, sent, step)))
    expert_deep_ep.release()
    return found


def replay(rank: int, ranks: int, device: torch.device) -> list[float]:
    """The distance of captured decodes, replayed one size after the other with other tokens."""
    here = Ranks(rank, device)
    captured = [capture(here, counts) for counts in REPLAYED]
    found = []
    for seed in range(3):
        for (inputs, step, play), counts in zip(captured, REPLAYED, strict=True):
            sent = tokens(rank, counts[rank], 100 + seed, device)
            inputs.x.copy_(sent.x)
            inputs.slots.copy_(sent.slots)
            inputs.weights.copy_(sent.weights)
            found.append(here.worst(play(), here.run(here.gathered, sent, step)))
    del captured, play  # before the memory that they use
    expert_deep_ep.release()
    return found


def capture(
    here: Ranks, counts: tuple[int, int]
) -> tuple[Routed, DispatchStep, Callable[[], Tensor]]:
    inputs = tokens(here.rank, counts[here.rank], 99, here.device)
    step = DispatchStep(max(counts), True)
    side = torch.cuda.Stream(here.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(here.device))
    with torch.cuda.stream(side):
        here.run(here.exchanged, inputs, step)
    torch.cuda.current_stream(here.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = here.run(here.exchanged, inputs, step)

    def play() -> Tensor:
        graph.replay()
        return out

    return inputs, step, play


def give_back(rank: int, ranks: int, device: torch.device) -> list[tuple[float, int, int]]:
    """Of two layouts in a row: the distance, bytes of the buffer, bytes that came back."""
    rounds = []
    for _ in range(2):
        here = Ranks(rank, device)
        sent, step = tokens(rank, 4, 0, device), DispatchStep(4, True)
        want = here.run(here.gathered, sent, step)
        worst = here.worst(here.run(here.exchanged, sent, step), want)
        (buffer,) = expert_deep_ep._buffers.values()
        taken = buffer.num_nvl_bytes + buffer.num_rdma_bytes
        torch.cuda.synchronize(device)
        before, _ = torch.cuda.mem_get_info(device)
        expert_deep_ep.release()
        after, _ = torch.cuda.mem_get_info(device)
        rounds.append((worst, taken, after - before))
    return rounds


@pytest.fixture(scope="module")
def compared(checked_deep_ep: None) -> list[float]:
    found: list[float] = in_processes("cuda", RANKS, compare)
    return found


@pytest.mark.multi_gpu
@pytest.mark.parametrize("index", range(len(STEPS)), ids=[str(step) for step in STEPS])
def test_exchanged_tokens_get_what_gathered_ones_get(compared: list[float], index: int) -> None:
    assert compared[index] < MOE_DISTANCE


@pytest.mark.multi_gpu
def test_captured_decodes_of_several_sizes_take_turns() -> None:
    found = in_processes("cuda", RANKS, replay)
    assert len(found) == 3 * len(REPLAYED)
    assert all(each < MOE_DISTANCE for each in found), found


@pytest.mark.multi_gpu
def test_a_layout_after_another_has_a_buffer_of_its_own() -> None:
    for worst, taken, returned in in_processes("cuda", RANKS, give_back):
        assert worst < MOE_DISTANCE
        assert returned >= taken
