"""Timing on machines that are never quiet: warm-up, alternation, repeats, failures kept.

Two things are compared by measuring them in turn, in an order that is reversed each round
(ABBA): what drifts slowly, such as clocks, heat and neighbours, then hits both alike.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from kllm.errors import CapacityError
from kllm.hardware import release_memory
from kllm.hardware.chain import gpu_event

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failed:
    """A point that this machine cannot hold."""

    reason: str


def out_of_memory(error: BaseException) -> str:
    """One sentence if `error` says that memory ran out, on the device or the host; else ""."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of device memory"
    # torch's CPU allocator has no class of its own for it.
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "out of host memory"
    return ""


def attempt(action: Callable[[], T]) -> T | Failed:
    """Run one point of a sweep; a lack of memory becomes `Failed`, so that the sweep goes on.

    Every other error is raised: it would be a fault of ours and not of the point.
    """
    try:
        return action()
    except CapacityError as error:
        return Failed(str(error))
    except (RuntimeError, MemoryError) as error:
        reason = out_of_memory(error)
        if not reason:
            raise
    release_memory()  # the failed point's blocks would count against the next one
    return Failed(reason)


def timed(action: Callable[[], object], device: str = "cpu") -> float:
    """Seconds that one call takes, until the device has finished it."""
    if not device.startswith("cuda"):
        start = time.perf_counter()
        action()
        return time.perf_counter() - start
    begin, end = gpu_event(), gpu_event()
    torch.cuda.synchronize(device)
    stream = torch.cuda.current_stream(torch.device(device))
    begin.record(stream)
    action()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def interleave(
    sides: Mapping[str, Callable[[], T]],
    *,
    repeats: int,
    warmup: int = 1,
) -> dict[str, list[T]]:
    """Run every side `repeats` times in alternation; value i of one pairs with value i of another.

    Args:
        sides: name to a call that measures once and returns its value.
        repeats: rounds; the order of the sides turns round after each one.
        warmup: rounds before, whose values are dropped.
    """
    names = list(sides)
    values: dict[str, list[T]] = {name: [] for name in names}
    for done in range(-warmup, repeats):
        order = names if done % 2 == 0 else names[::-1]
        for name in order:
            value = sides[name]()
            if done >= 0:
                values[name].append(value)
    return values
