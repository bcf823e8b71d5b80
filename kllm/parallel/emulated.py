"""A communicator whose peers are not there: the time of the transfers is, the foreign data is not.

One device runs one rank's share of a larger layout. Each collective occupies the stated link for
its time (`Link.seconds`) and really writes its receive buffer, from local data: shapes,
memory and timing are those of the layout, values are not.

* all_reduce gives back the rank's own partial sum;
* all_gather repeats the rank's own part for every rank;
* reduce_scatter gives the rank its part of its own input;
* all_to_all and ring_shift receive local rows in place of foreign ones;
* receive leaves what its buffer holds.

Collectives of one communicator follow each other on its link, and run beside computation. How much
of them computation does not hide can be watched: the time for which `wait` holds up the caller.
"""

import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from kllm.hardware.chain import seconds_in_chain
from kllm.parallel.communicator import Handle
from kllm.parallel.link import (
    Link,
    all_gather_bytes,
    all_reduce_bytes,
    reduce_scatter_bytes,
)

SPIN_S = 2e-4  # the operating system wakes a sleeper this much late; the rest is waited busily
CALIBRATION_CYCLES = (1 << 16, 1 << 22)  # tens of microseconds, a few milliseconds


class Wire(Protocol):
    """What makes a transfer take its time on one kind of device."""

    def transfer(self, seconds: float, fill: Callable[[], object], *buffers: Tensor) -> Handle:
        """Occupy the link for `seconds` and run `fill`, which writes the receive buffer.

        `buffers` stay alive until the handle has been waited for.
        """

    def mark(self) -> Any:
        """This moment: of the host, or of the current stream once it gets here."""

    def between(self, begin: Any, end: Any) -> float:
        """Seconds between two marks, once the device has passed both."""


class EmulatedComm:
    """One rank of a group of which it is the only one present.

    Args:
        link: what every transfer goes over.
        size, rank: of the group, and which of its ranks this is.
        wire: how time passes; by default that of `device`.

    `calls` counts collectives by name, `sent_bytes` and `busy_s` what they put on the link. While
    `watched`, the times of waiting for them are kept (`take_exposed_s`). All of these, and `link`,
    may be set between steps.
    """

    def __init__(
        self,
        link: Link,
        *,
        size: int,
        rank: int = 0,
        device: torch.device,
        wire: Wire | None = None,
    ) -> None:
        assert 0 <= rank < size
        self.link = link
        self.size = size
        self.rank = rank
        self.calls: Counter[str] = Counter()
        self.sent_bytes = 0.0
        self.busy_s = 0.0
        self.watched = False
        self._stalls: list[tuple[Any, Any]] = []
        self._wire = wire or (DeviceWire(device) if device.type == "cuda" else HostWire())

    def take_exposed_s(self) -> float:
        """Seconds of waiting since the last call."""
        found = sum(self._wire.between(begin, end) for begin, end in self._stalls)
        self._stalls.clear()
        return found

    def pause(self, seconds: float) -> None:
        """Hold up what comes next on the device as long as a transfer of so many seconds would."""
        self._wire.transfer(seconds, lambda: None).wait()

    def mark(self) -> Any:
        """This moment, as `Wire.mark`."""
        return self._wire.mark()

    def between(self, begin: Any, end: Any) -> float:
        """Seconds between two marks, once the device has passed both."""
        return self._wire.between(begin, end)

    def all_reduce(self, x: Tensor) -> Handle:
        """`x` is left as it is: this rank's partial sum."""
        sent = all_reduce_bytes(x.nbytes, self.size)
        # Multiplied by one, because a real all-reduce reads and writes the whole buffer.
        return self._transfer("all_reduce", sent, lambda: x.mul_(1), x)

    def all_gather(self, out: Tensor, x: Tensor) -> Handle:
        """Every rank's part of `out` [size * n, ...] is this rank's `x` [n, ...]."""
        parts = out.view(self.size, *x.shape)
        sent = all_gather_bytes(out.nbytes, self.size)
        return self._transfer("all_gather", sent, lambda: parts.copy_(x.expand_as(parts)), out, x)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Handle:
        """`out` [n, ...] is this rank's part of its own `x` [size * n, ...]."""
        part = x.view(self.size, *out.shape)[self.rank]
        sent = reduce_scatter_bytes(x.nbytes, self.size)
        return self._transfer("reduce_scatter", sent, lambda: out.copy_(part), out, x)

    def all_to_all(
        self, out: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int]
    ) -> Handle:
        """`out` takes the rows of `x` over and over, zeros if there are none.

        The link is occupied by what leaves this rank or by what arrives, whichever is more.
        """
        assert sum(out_splits) == len(out)
        assert sum(in_splits) == len(x)
        row = out[:1].nbytes if len(out) else x[:1].nbytes
        leaving = len(x) - in_splits[self.rank]
        arriving = len(out) - out_splits[self.rank]
        sent = float(max(leaving, arriving) * row)
        return self._transfer("all_to_all", sent, lambda: _repeat_rows(out, x), out, x)

    def ring_shift(self, out: Tensor, x: Tensor) -> Handle:
        """`out` is this rank's own `x`."""
        sent = float(x.nbytes) if self.size > 1 else 0.0
        return self._transfer("ring_shift", sent, lambda: out.copy_(x), out, x)

    def send(self, x: Tensor, to: int) -> Handle:
        """The link is occupied; nothing arrives anywhere."""
        return self._transfer("send", float(x.nbytes), lambda: None, x)

    def receive(self, out: Tensor, source: int) -> Handle:
        """`out` is written with what it holds, which the caller has filled."""
        return self._transfer("receive", float(out.nbytes), lambda: out.mul_(1), out)

    def _transfer(
        self, name: str, sent: float, fill: Callable[[], object], *buffers: Tensor
    ) -> Handle:
        seconds = self.link.seconds(sent, name) if self.size > 1 else 0.0
        self.calls[name] += 1
        self.sent_bytes += sent
        self.busy_s += seconds
        handle = self._wire.transfer(seconds, fill, *buffers)
        return _WatchedHandle(handle, self._wire, self._stalls) if self.watched else handle


class _WatchedHandle:
    """Keeps the two moments between which `wait` holds up the caller."""

    def __init__(self, handle: Handle, wire: Wire, stalls: list[tuple[Any, Any]]) -> None:
        self._handle, self._wire, self._stalls = handle, wire, stalls

    def wait(self) -> None:
        """As the handle itself."""
        begin = self._wire.mark()
        self._handle.wait()
        self._stalls.append((begin, self._wire.mark()))


def _repeat_rows(out: Tensor, x: Tensor) -> None:
    if not len(x):
        out.zero_()
    for start in range(0, len(out) if len(x) else 0, max(1, len(x))):
        part = out[start : start + len(x)]
        part.copy_(x[: len(part)])


class HostWire:
    """Transfers beside computation on a CPU: data at once, `wait` until the link would be done.

    Args:
        clock, sleep: seconds; replaced in tests.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self._clock = clock
        self._sleep = sleep or sleep_exactly
        self._free_at = 0.0

    def transfer(self, seconds: float, fill: Callable[[], object], *buffers: Tensor) -> Handle:
        """Queue behind the transfers under way."""
        self._free_at = max(self._free_at, self._clock()) + seconds
        fill()
        return _HostHandle(self._free_at, self._clock, self._sleep)

    def mark(self) -> float:
        """Now."""
        return self._clock()

    def between(self, begin: float, end: float) -> float:
        """Seconds from one mark to the other."""
        return end - begin


class _HostHandle:
    def __init__(
        self, done_at: float, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._done_at = done_at
        self._clock = clock
        self._sleep = sleep

    def wait(self) -> None:
        """Block until the transfer would be over."""
        left = self._done_at - self._clock()
        if left > 0:
            self._sleep(left)


def sleep_exactly(seconds: float) -> None:
    """Sleep, the end of it busily."""
    end = time.perf_counter() + seconds
    if seconds > SPIN_S:
        time.sleep(seconds - SPIN_S)
    while time.perf_counter() < end:
        pass


class DeviceWire:
    """Transfers beside computation on a GPU: a spinning kernel on a stream of its own.

    The receive buffer is written on a second stream at the same time, so a transfer takes its
    emulated time or that of the copy, whichever is longer, and not their sum.

    Args:
        calibration: seconds that a transfer of no length takes in a captured step, and cycles of
            a second; None: measured once for the device.
    """

    def __init__(
        self, device: torch.device, calibration: tuple[float, float] | None = None
    ) -> None:
        self._device = device
        self._spins = _stream(device)
        self._copies = _stream(device)
        self._overhead_s, self._cycles_per_s = calibration or _calibration(device)

    def transfer(self, seconds: float, fill: Callable[[], object], *buffers: Tensor) -> Handle:
        """Queue behind the transfers under way and behind what the current stream has to do."""
        current = torch.cuda.current_stream(self._device)
        cycles = int(max(0.0, seconds - self._overhead_s) * self._cycles_per_s)
        for stream in (self._spins, self._copies):
            stream.wait_stream(current)
        with torch.cuda.stream(self._spins):
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            fill()
        return _DeviceHandle(
            self._device, (self._spins.record_event(), self._copies.record_event()), buffers
        )

    def mark(self) -> torch.cuda.Event:
        """An event of the current stream that keeps its time."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds from one event to the other, once the device has passed both."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class _DeviceHandle:
    def __init__(
        self,
        device: torch.device,
        events: tuple[torch.cuda.Event, ...],
        buffers: tuple[Tensor, ...],
    ) -> None:
        self._device = device
        self._events = events
        # Freed before the copy has run, their memory could be given to another tensor.
        self._buffers = buffers

    def wait(self) -> None:
        """Order the current stream behind the transfer."""
        current = torch.cuda.current_stream(self._device)
        for event in self._events:
            current.wait_event(event)
        self._buffers = ()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@cache
def _calibration(device: torch.device) -> tuple[float, float]:
    """(seconds that a transfer of no length takes in a captured step, cycles of a second)."""
    short, long = (min(_time_spin(device, n) for _ in range(5)) for n in CALIBRATION_CYCLES)
    rate = (CALIBRATION_CYCLES[1] - CALIBRATION_CYCLES[0]) / (long - short)
    wire, x = DeviceWire(device, (0.0, rate)), torch.zeros(1, device=device)
    return seconds_in_chain(lambda: wire.transfer(0.0, lambda: x.mul_(1), x).wait(), device), rate


def _time_spin(device: torch.device, cycles: int) -> float:
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        # The device is kept busy while the host queues the rest, or its delays would count.
        torch.cuda._sleep(CALIBRATION_CYCLES[1])  # type: ignore[no-untyped-call]
        begin.record()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
