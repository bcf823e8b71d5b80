"""Timing: order of alternation, dropped warm-up, failures that do not end a sweep."""

import pytest
import torch

from kllm.bench.timing import Failed, attempt, interleave, out_of_memory
from kllm.errors import CapacityError, ConfigError


def test_interleaving_reverses_its_order_each_round_and_drops_warm_up() -> None:
    calls: list[str] = []

    def side(name: str) -> int:
        calls.append(name)
        return len(calls)

    values = interleave({"a": lambda: side("a"), "b": lambda: side("b")}, repeats=4, warmup=1)
    assert "".join(calls) == "ba" + "abba" * 2
    assert values == {"a": [3, 6, 7, 10], "b": [4, 5, 8, 9]}


def test_interleaving_cancels_a_linear_drift() -> None:
    clock = iter(range(100))
    values = interleave({"a": lambda: next(clock), "b": lambda: next(clock)}, repeats=4, warmup=0)
    assert sum(values["a"]) == sum(values["b"])


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        CapacityError("needs 9 pages and 3 exist"),
    ],
)
def test_a_point_without_memory_is_marked_and_the_sweep_goes_on(error: Exception) -> None:
    def point(size: int) -> int:
        if size == 2:
            raise error
        return size

    results = [attempt(lambda size=size: point(size)) for size in (1, 2, 3)]
    assert (results[0], results[2]) == (1, 3)
    assert isinstance(results[1], Failed)
    assert results[1].reason


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ConfigError("bad"), KeyError(1)])
def test_other_errors_are_not_swallowed(error: Exception) -> None:
    def point() -> None:
        raise error

    with pytest.raises(type(error)):
        attempt(point)


def test_real_allocation_failure_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory(caught.value) == "out of host memory"
