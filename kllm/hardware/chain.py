"""What an operation takes on a device in the midst of others, as in a captured step."""

import statistics
from collections.abc import Callable

import torch

LENGTH = 8  # operations of a chain
STREAMED_BYTES = 256 << 20  # more than caches hold
REPEATS, WARMUP = 7, 3
HEAD_START_CYCLES = 1 << 20  # the device spins for half a millisecond while the host queues work


def gpu_event() -> torch.cuda.Event:
    """An event that keeps its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def seconds_in_chain(call: Callable[[], object], device: torch.device) -> float:
    """Seconds by which `call` makes a captured chain of kernels that stream memory longer.

    They stand for those that read weights: what `call` uses is in no cache when it begins.
    Ordering its streams is in the time, and what the host does to queue it is not.

    Args:
        call: can be captured in a CUDA graph. If it waits for other ranks, they do the same.
    """
    seconds = _in_chain(call, device)
    torch.cuda.empty_cache()  # who sizes a KV pool next asks the device for its free memory
    return seconds


def _in_chain(call: Callable[[], object], device: torch.device) -> float:
    streamed = torch.zeros(STREAMED_BYTES, dtype=torch.uint8, device=device)

    def chain(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LENGTH):
                streamed.add_(1)
                work()
        return graph

    call()  # makes what cannot be made while capturing
    torch.cuda.synchronize(device)
    with_calls, without = chain(call), chain(lambda: None)
    times = [
        (_seconds_of(with_calls, call), _seconds_of(without, call)) for _ in range(WARMUP + REPEATS)
    ][WARMUP:]
    added = statistics.median(t for t, _ in times) - statistics.median(t for _, t in times)
    return max(0.0, added) / LENGTH


def _seconds_of(graph: torch.cuda.CUDAGraph, call: Callable[[], object]) -> float:
    begin, end = gpu_event(), gpu_event()
    torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
    call()  # ends on all ranks at the same time
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3
