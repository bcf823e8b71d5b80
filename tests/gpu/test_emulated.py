"""Emulated transfers take their time on the device, beside computation, and fill their buffers."""

from collections.abc import Callable

import pytest
import torch

from kllm.hardware.chain import seconds_in_chain
from kllm.parallel.emulated import EmulatedComm
from kllm.parallel.link import Link

LINK = Link(latency_s=20e-6, bytes_per_s=50e9)
HEAD_START = 2_000_000  # cycles that the device spins while the host queues the action
FEW_PERCENT = 0.05  # the clock of the GPU moves between calibration and use


def device_seconds(action: Callable[[], object]) -> float:
    """Device time of an action, the least of several."""
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START)
        begin.record()
        action()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times)


@pytest.mark.parametrize("megabytes", [1, 16, 64])
def test_a_transfer_takes_the_time_of_the_link(cuda: torch.device, megabytes: int) -> None:
    comm = EmulatedComm(LINK, size=8, device=cuda)
    x = torch.ones(megabytes << 18, device=cuda)
    out = torch.empty_like(x)
    want = LINK.seconds(x.nbytes)
    got = device_seconds(lambda: comm.ring_shift(out, x).wait())
    # Ordering three streams by events costs some microseconds, more or less than in a graph.
    assert want * (1 - FEW_PERCENT) - 10e-6 <= got <= want * (1 + FEW_PERCENT) + 15e-6
    assert torch.equal(out, x)


def test_computation_hides_a_transfer(cuda: torch.device) -> None:
    comm = EmulatedComm(LINK, size=8, device=cuda)
    x = torch.ones(16 << 18, device=cuda)
    a = torch.randn(4096, 4096, device=cuda, dtype=torch.bfloat16)

    def compute() -> None:
        for _ in range(4):
            torch.mm(a, a)

    def both() -> None:
        handle = comm.all_reduce(x)
        compute()
        handle.wait()

    compute()
    alone = device_seconds(compute)
    transfer = LINK.seconds(2 * 7 / 8 * x.nbytes)
    together = device_seconds(both)
    assert together < alone + 0.6 * transfer
    assert together >= 0.95 * max(alone, transfer)


def test_the_exposed_part_is_measured_on_the_device(cuda: torch.device) -> None:
    comm = EmulatedComm(Link(latency_s=2e-3, bytes_per_s=1e12), size=8, device=cuda)
    x = torch.ones(1 << 10, device=cuda)
    comm.watched = True
    exposed = []
    for hidden_s in (0.0, 1e-3, 4e-3):
        compute = EmulatedComm(Link(latency_s=hidden_s, bytes_per_s=1e12), size=2, device=cuda)
        handle = comm.all_reduce(x)
        if hidden_s:
            compute.all_reduce(x).wait()  # keeps the current stream busy for as long
        handle.wait()
        torch.cuda.synchronize(cuda)
        exposed.append(comm.take_exposed_s())
    slack = 0.2e-3  # two events and a spin, each some tens of microseconds late
    assert abs(exposed[0] - 2e-3) < slack
    assert abs(exposed[1] - 1e-3) < slack
    assert exposed[2] < slack


def test_transfers_follow_each_other(cuda: torch.device) -> None:
    comm = EmulatedComm(LINK, size=2, device=cuda)
    x = torch.ones(4 << 18, device=cuda)
    outs = [torch.empty_like(x) for _ in range(3)]

    def three() -> None:
        for handle in [comm.ring_shift(out, x) for out in outs]:
            handle.wait()

    assert device_seconds(three) >= 3 * LINK.seconds(x.nbytes) * (1 - FEW_PERCENT)


def test_a_transfer_can_be_captured_in_a_graph(cuda: torch.device) -> None:
    comm = EmulatedComm(LINK, size=4, device=cuda)
    x = torch.ones(1 << 18, device=cuda)
    out = torch.empty(4 << 18, device=cuda)
    comm.all_gather(out, x).wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.all_gather(out, x).wait()
    x.fill_(3)
    seconds = device_seconds(graph.replay)
    assert torch.equal(out, torch.full_like(out, 3))
    assert seconds >= LINK.seconds(3 * x.nbytes) * (1 - FEW_PERCENT)


@pytest.mark.parametrize("micro", [30, 300])
def test_a_captured_step_is_as_much_longer_as_the_transfer_takes(
    cuda: torch.device, micro: int
) -> None:
    comm = EmulatedComm(Link(latency_s=micro * 1e-6, bytes_per_s=1e12), size=2, device=cuda)
    x = torch.ones(256, device=cuda)
    got = seconds_in_chain(lambda: comm.all_reduce(x).wait(), cuda)
    assert got == pytest.approx(micro * 1e-6, rel=FEW_PERCENT, abs=3e-6)
