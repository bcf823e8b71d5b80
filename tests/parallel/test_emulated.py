"""The emulated communicator takes its time, fills its buffers and counts what it sends."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kllm.layers.linear import RowLinear
from kllm.models import MODELS
from kllm.models.base import Groups, default_device_and_dtype
from kllm.models.random import fill_random
from kllm.parallel.communicator import Communicator
from kllm.parallel.emulated import EmulatedComm, HostWire
from kllm.parallel.link import Link
from kllm.parallel.single import SingleComm
from tests.models.harness import Harness

CPU = torch.device("cpu")
LINK = Link(latency_s=1.0, bytes_per_s=4.0)  # one float32 a second


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def emulated(size: int, clock: Clock | None = None, rank: int = 0) -> EmulatedComm:
    clock = clock or Clock()
    wire = HostWire(clock, clock.sleep)
    return EmulatedComm(LINK, size=size, rank=rank, device=CPU, wire=wire)


def rows(*values: float) -> Tensor:
    return torch.tensor(values).unsqueeze(1)


# Each collective with buffers of its own: (name, call, floats a rank of four sends).
CALLS: list[tuple[str, Callable[[Communicator], object], float]] = [
    ("all_reduce", lambda c: c.all_reduce(torch.ones(8)), 12),
    ("all_gather", lambda c: c.all_gather(torch.empty(8, 1), torch.ones(2, 1)), 6),
    ("reduce_scatter", lambda c: c.reduce_scatter(torch.empty(2, 1), torch.ones(8, 1)), 6),
    ("ring_shift", lambda c: c.ring_shift(torch.empty(5), torch.ones(5)), 5),
    (
        "all_to_all",
        lambda c: c.all_to_all(torch.empty(6, 1), torch.ones(9, 1), [1, 2, 3, 0], [4, 0, 3, 2]),
        5,
    ),
]


@pytest.mark.parametrize(("name", "call", "floats"), CALLS, ids=[name for name, _, _ in CALLS])
def test_a_collective_takes_latency_and_bytes_over_bandwidth(
    name: str, call: Callable[[Communicator], object], floats: float
) -> None:
    clock = Clock()
    comm = emulated(4, clock)
    handle = call(comm)
    assert clock.now == 100.0, "the call itself must not block"
    handle.wait()  # type: ignore[attr-defined]
    assert clock.now == pytest.approx(100 + LINK.latency_s + floats)
    assert comm.calls == {name: 1}
    assert comm.sent_bytes == 4 * floats
    assert comm.busy_s == pytest.approx(LINK.latency_s + floats)


@pytest.mark.parametrize(("name", "call", "floats"), CALLS, ids=[name for name, _, _ in CALLS])
def test_a_collective_takes_the_time_that_was_measured_for_it(
    name: str, call: Callable[[Communicator], object], floats: float
) -> None:
    clock = Clock()
    comm = emulated(4, clock)
    # Straight lines through the origin: twice as long as the bytes of this collective alone.
    curves = {each: ((1.0, 7.0), (1e6, 7e6)) for each, _, _ in CALLS}
    comm.link = replace(LINK, curves=curves | {name: ((1.0, 2.0), (1e6, 2e6))})
    call(comm).wait()  # type: ignore[attr-defined]
    assert clock.now == pytest.approx(100 + 2 * 4 * floats)


def test_what_arrives_counts_when_more_arrives_than_leaves() -> None:
    comm = emulated(2)
    comm.all_to_all(torch.empty(9, 1), torch.ones(3, 1), [2, 7], [2, 1])
    assert comm.sent_bytes == 4 * 7


def test_transfers_follow_each_other_on_the_link() -> None:
    clock = Clock()
    comm = emulated(2, clock)
    first = comm.ring_shift(torch.empty(2), torch.ones(2))
    second = comm.ring_shift(torch.empty(3), torch.ones(3))
    second.wait()
    assert clock.now == pytest.approx(100 + 3 + 4)
    first.wait()
    assert clock.now == pytest.approx(107), "it ended before the second one began"


def test_computation_hides_a_transfer() -> None:
    clock = Clock()
    handle = emulated(2, clock).ring_shift(torch.empty(2), torch.ones(2))
    clock.sleep(50)
    handle.wait()
    assert clock.now == 150


def test_the_part_of_a_transfer_that_is_waited_for_is_exposed() -> None:
    clock = Clock()
    comm = emulated(2, clock)
    comm.ring_shift(torch.empty(2), torch.ones(2)).wait()
    assert comm.take_exposed_s() == 0, "not watched"
    comm.watched = True
    for computing in (1.0, 2.5, 50.0):
        handle = comm.ring_shift(torch.empty(2), torch.ones(2))
        clock.sleep(computing)
        handle.wait()
    assert comm.take_exposed_s() == pytest.approx((3 - 1) + (3 - 2.5) + 0)
    assert comm.take_exposed_s() == 0, "each moment counts once"
    comm.link = Link(latency_s=7.0, bytes_per_s=4.0)
    comm.ring_shift(torch.empty(2), torch.ones(2)).wait()
    assert comm.take_exposed_s() == pytest.approx(9)


def test_receive_buffers_are_filled_from_local_data() -> None:
    comm = emulated(2, rank=1)
    x = rows(1, 2)
    comm.all_reduce(x).wait()
    assert torch.equal(x, rows(1, 2))
    gathered = torch.full((4, 1), torch.nan)
    comm.all_gather(gathered, x).wait()
    assert torch.equal(gathered, rows(1, 2, 1, 2))
    part = torch.full((1, 1), torch.nan)
    comm.reduce_scatter(part, x).wait()
    assert torch.equal(part, rows(2))
    shifted = torch.full((2, 1), torch.nan)
    comm.ring_shift(shifted, x).wait()
    assert torch.equal(shifted, x)
    received = torch.full((5, 1), torch.nan)
    comm.all_to_all(received, x, [2, 3], [1, 1]).wait()
    assert torch.equal(received, rows(1, 2, 1, 2, 1))
    fewer = torch.full((1, 1), torch.nan)
    comm.all_to_all(fewer, x, [1, 0], [1, 1]).wait()
    assert torch.equal(fewer, rows(1))
    comm.all_to_all(received, x[:0], [2, 3], [0, 0]).wait()
    assert torch.equal(received, torch.zeros(5, 1))
    comm.all_to_all(received[:0], x, [0, 0], [1, 1]).wait()


def test_a_group_of_one_sends_nothing() -> None:
    clock = Clock()
    comm, single = emulated(1, clock), SingleComm()
    x = rows(1, 2, 3)
    for each in (comm, single):
        out = torch.empty_like(x)
        each.all_to_all(out, x, [3], [3]).wait()
        assert torch.equal(out, x)
    comm.all_reduce(x).wait()
    assert (clock.now, comm.sent_bytes, comm.busy_s) == (100.0, 0.0, 0.0)


def test_layers_run_a_share_of_a_larger_layout() -> None:
    """A row-split layer holds its share of the weights and waits for its all-reduce."""
    clock = Clock()
    comm = emulated(4, clock)
    layer = RowLinear(16, 3, comm)
    layer.weight.fill_(0.5)
    y = layer(torch.ones(2, 4))
    assert layer.weight.shape == (3, 4)
    assert torch.equal(y, torch.full((2, 3), 2.0)), "its own partial sum"
    assert clock.now == pytest.approx(100 + LINK.seconds(2 * 3 / 4 * y.nbytes))


def test_the_real_clock_is_waited_for() -> None:
    comm = EmulatedComm(Link(latency_s=2e-3, bytes_per_s=1e12), size=2, device=CPU)
    begin = comm.mark()
    comm.all_reduce(torch.ones(1)).wait()
    assert comm.between(begin, comm.mark()) >= 2e-3


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v4", "glm_moe_dsa"])
def test_a_network_runs_as_one_rank_of_two(model_type: str) -> None:
    """Every shape of a rank's share fits, prefill and decode, and the bytes sent are counted."""
    family: Any = MODELS[model_type]()
    config = replace(family.tiny_config(), vocab_size=98)
    attn, ffn, vocab, ep = (emulated(2, rank=1) for _ in range(4))
    with default_device_and_dtype(CPU, torch.float32):
        model = family.build(config, Groups(attn, ffn, vocab, ep, SingleComm(), SingleComm()))
    fill_random(model, family, seed=0)
    model.freeze()
    harness = Harness(model.eval())
    prefill = harness.step({0: list(range(3, 20))})[0]
    decode = harness.step({0: [5]})[0]
    assert prefill.shape == (17, config.vocab_size)
    assert decode.isfinite().all()
    # All tokens of both steps are embedded, and their logits gathered.
    embedded = 18 * config.hidden_size * 4
    logits = 18 * config.vocab_size * 4
    assert vocab.calls == {"all_reduce": 2, "all_gather": 2}
    assert vocab.sent_bytes == embedded + logits / 2
    assert attn.calls["all_reduce"] == 2 * config.num_hidden_layers
