"""How long a step of a stage alone takes, on a host, a device and a link that only count time."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kllm.engine.pipeline import WARM_UP_STEPS, SlicedStage
from kllm.models.base import Stage
from kllm.parallel.emulated import EmulatedComm
from kllm.parallel.link import Link
from kllm.parallel.single import Done


class Machine:
    """A host that queues work on a device, and a link; time passes where the work says so."""

    def __init__(self) -> None:
        self.now = 100.0  # on the host
        self.done = 0.0  # when the device has done what is queued

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def queue(self, host_s: float, device_s: float) -> None:
        """Work of many parts: the device begins with the first of them."""
        self.done = max(self.done, self.now) + device_s
        self.now += host_s
        self.done = max(self.done, self.now)

    def transfer(self, seconds: float, fill: object, *buffers: Tensor) -> Done:
        self.done = max(self.done, self.now) + seconds
        return Done()

    def mark(self) -> float:
        return max(self.done, self.now)

    def between(self, begin: float, end: float) -> float:
        self.now = max(self.now, end)
        return end - begin


class Work:
    """The first of several stages; each of its micro-batches takes so long."""

    def __init__(self, machine: Machine, host_s: float, device_s: float) -> None:
        self.machine, self.takes = machine, (host_s, device_s)
        self.stage = Stage(0, 1, 2)

    def prepare(self, ctx: object) -> None:
        pass

    def __call__(self, ctx: object, received: list[Tensor]) -> Tensor:
        self.machine.queue(*self.takes)
        return torch.zeros(1)

    def boundary(self, ctx: object, state: Tensor) -> list[Tensor]:
        return [state]

    receive_buffers = stand_in = None


def batch(*, static: bool = False, decode_only: bool = True, tokens: int = 8) -> Any:
    """All that a slice asks of a micro-batch's context."""
    return SimpleNamespace(static=static, decode_only=decode_only, token_ids=[0] * tokens)


PLAIN, CAPTURED = batch(), batch(static=True)


def stage_on(machine: Machine, size: int, rank: int = 0) -> SlicedStage:
    """One of `size` stages, linked by transfers that take no time."""
    link = Link(latency_s=0.0, bytes_per_s=1e30)
    comm = EmulatedComm(link, size=size, rank=rank, device=torch.device("cpu"), wire=machine)
    return SlicedStage(comm, machine.clock, machine.sleep)


@pytest.mark.parametrize(
    ("micro", "stages", "host_s", "device_s", "want_s"),
    [
        (1, 2, 1.0, 5.0, 2 * 5),
        (2, 2, 1.0, 5.0, 3 * 5),
        (4, 4, 1.0, 5.0, 7 * 5),
        (1, 2, 5.0, 2.0, 5 + 2),  # hosts queue at the same time, devices work one after the other
        (1, 4, 5.0, 2.0, 5 + 3 * 2),
    ],
)
def test_a_slice_takes_the_time_of_all_stages(
    micro: int, stages: int, host_s: float, device_s: float, want_s: float
) -> None:
    machine = Machine()
    stage = stage_on(machine, stages)
    model: Any = Work(machine, host_s, device_s)
    took = []
    for _ in range(WARM_UP_STEPS + 5):
        begin = machine.now
        assert stage.run(model, [PLAIN] * micro) is None
        took.append(machine.now - begin)
    assert took[WARM_UP_STEPS:] == pytest.approx([want_s] * 5)


def test_prompts_take_as_long_as_their_tokens() -> None:
    """Those of a stage before are told by what its last prompts took, token by token."""
    machine = Machine()
    stage = stage_on(machine, 3)
    took = []
    # A far shorter step does not tell: its time is not that of its tokens.
    for tokens in (100,) * (WARM_UP_STEPS + 3) + (2, 70, 120):
        begin = machine.now
        model: Any = Work(machine, 0.01, max(0.5, tokens / 100))
        stage.run(model, [batch(decode_only=False, tokens=tokens)] * 2)
        took.append(machine.now - begin)
    assert took[-4:] == pytest.approx([4.0, 2.0, 2.8, 4.8])


def test_a_host_that_is_held_up_does_not_hold_up_the_device_longer_each_time() -> None:
    """Queues are finite, and layers may ask the device: the host then waits as well."""
    machine = Machine()
    stage = stage_on(machine, 2)

    class Waits(Work):
        def __call__(self, ctx: object, received: list[Tensor]) -> Tensor:
            machine.now = max(machine.now, machine.done)
            return super().__call__(ctx, received)

    model: Any = Waits(machine, 5.0, 2.0)
    took = []
    for _ in range(20):
        begin = machine.now
        stage.run(model, [PLAIN])
        took.append(machine.now - begin)
    assert max(took) <= 2 * 5.0


def test_a_slice_tells_captured_steps_from_others() -> None:
    """A host that only launches a graph does not say how long it needs for all kernels."""
    machine = Machine()
    stage = stage_on(machine, 2)
    kinds = {"plain": (PLAIN, 5.0), "captured": (CAPTURED, 0.5)}
    took: dict[str, list[float]] = {"plain": [], "captured": []}
    for _ in range(WARM_UP_STEPS + 5):
        for kind, (ctx, host_s) in kinds.items():
            model: Any = Work(machine, host_s, 2.0)
            begin = machine.now
            stage.run(model, [ctx])
            took[kind].append(machine.now - begin)
    assert took["plain"][WARM_UP_STEPS:] == pytest.approx([5.0 + 2.0] * 5)
    # All of a captured step is queued before the device begins it.
    assert took["captured"][WARM_UP_STEPS:] == pytest.approx([0.5 + 2 * 2.0] * 5)


class Last(Work):
    """The last of two stages, whose input has to be made up."""

    def __init__(self, machine: Machine, host_s: float, device_s: float) -> None:
        super().__init__(machine, host_s, device_s)
        self.stage = Stage(1, 2, 2)

    def stand_in(self, ctx: object) -> list[Tensor]:
        self.machine.queue(0.1, 0.05)
        return [torch.zeros(1)]


@pytest.mark.parametrize("ctx", [PLAIN, CAPTURED])
def test_making_up_a_stages_input_takes_no_time_of_the_layout(ctx: Any) -> None:
    machine = Machine()
    stage = stage_on(machine, 2, rank=1)
    model: Any = Last(machine, 1.0, 5.0)
    for _ in range(WARM_UP_STEPS + 5):
        begin = machine.now
        assert stage.run(model, [ctx]) is not None
        machine.now = machine.mark()  # tokens are read
        extra_s = 1.0 if ctx is CAPTURED else 0.0
        assert machine.now - begin == pytest.approx(2 * 5.0 + extra_s)


def test_what_follows_the_last_stage_is_queued_while_the_device_waits() -> None:
    machine = Machine()
    stage = stage_on(machine, 2, rank=1)
    model: Any = Last(machine, 0.5, 2.0)
    took = []
    for _ in range(WARM_UP_STEPS + 5):
        begin = machine.now
        stage.run(model, [CAPTURED])
        machine.queue(1.5, 0.25)  # logits and sampling, mostly launches
        machine.now = machine.mark()
        took.append(machine.now - begin)
    assert took[WARM_UP_STEPS + 1 :] == pytest.approx([0.5 + 2 * 2.0 + 0.25] * 4)


def test_a_stages_time_is_that_of_the_step_before() -> None:
    machine = Machine()
    stage = stage_on(machine, 3, rank=0)
    took = []
    for device_s in (2.0,) * (WARM_UP_STEPS + 3) + (4.0,) * 2:
        begin = machine.now
        model: Any = Work(machine, 0.5, device_s)
        stage.run(model, [CAPTURED])
        took.append(machine.now - begin)
    assert took[-3:] == pytest.approx([0.5 + 3 * 2.0, 0.5 + 2 * 2.0 + 4.0, 0.5 + 3 * 4.0])
