"""Bandwidth and latency between the ranks of this machine, by collective and size.

One process a rank: over NCCL between all GPUs, over gloo between processes on a CPU. Calls are
timed several in a row behind a first one that lets all ranks begin together, so that a time is
that of the link and not of the host that asks for it; on GPUs as parts of a captured chain of
kernels, as in a decode step.
"""

import multiprocessing.connection
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from kllm.errors import CapacityError, WorkerError, ending
from kllm.hardware.chain import HEAD_START_CYCLES, REPEATS, WARMUP, gpu_event, seconds_in_chain

# Bytes that a rank sends, 4 KiB to 256 MiB; to 4 MiB between processes, whose links are slow.
GPU_SIZES = tuple(1 << n for n in range(12, 29, 2))
CPU_SIZES = tuple(1 << n for n in range(12, 23, 2))
CPU_RANKS = 2  # processes on a CPU share its cores: more of them measure the cores
INNER = 5  # calls in a row
TIMEOUT_S = 90.0
ELEMENT = torch.float32

Points = tuple[tuple[float, float], ...]
# torch 2.13 gave both a new name and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCeilings:
    """Times of collectives among `ranks` ranks."""

    ranks: int
    backend: str  # "nccl" or "gloo"
    # Collective, as `Communicator` names it, to (bytes that a rank sends, seconds), rising. Bytes
    # are those of the ring algorithms.
    curves: Mapping[str, Points]

    @property
    def latency_s(self) -> float:
        """Time of the smallest transfer to a neighbour."""
        return self.curves["ring_shift"][0][1]

    @property
    def bytes_per_s(self) -> float:
        """One direction of one link, from the largest transfer to a neighbour."""
        return self.largest("ring_shift")

    def largest(self, collective: str) -> float:
        """Bytes a second that a rank sends in the largest call measured."""
        sent, seconds = self.curves[collective][-1]
        return sent / seconds

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "LinkCeilings":
        """What `dataclasses.asdict` and JSON made of one.

        Raises:
            KeyError, TypeError, ValueError: when it is something else.
        """
        curves = {
            name: tuple((float(sent), float(seconds)) for sent, seconds in points)
            for name, points in data["curves"].items()
        }
        if any(not curves[name] for name in COLLECTIVES):
            raise ValueError("a collective without measurements")
        return cls(ranks=int(data["ranks"]), backend=str(data["backend"]), curves=curves)


def measure_links(kind: str = "cuda", sizes: tuple[int, ...] = ()) -> LinkCeilings:
    """Measure over all GPUs of this machine, or between processes on its CPU.

    Args:
        kind: "cuda" or "cpu".
        sizes: bytes that a rank sends; by default those of the kind.

    Raises:
        CapacityError: there is one GPU only.
        WorkerError: a rank died or did not answer in time.
    """
    gpu = kind == "cuda"
    ranks = torch.cuda.device_count() if gpu else CPU_RANKS
    if ranks < 2:
        raise CapacityError(
            f"links are measured between GPUs and this machine has {ranks}; name a preset link, "
            "or measure on a machine with two"
        )
    curves = in_processes(kind, ranks, _measure, sizes or (GPU_SIZES if gpu else CPU_SIZES))
    return LinkCeilings(ranks=ranks, backend="nccl" if gpu else "gloo", curves=curves)


def in_processes(kind: str, ranks: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Run `work(rank, ranks, device, *arguments)` in joined processes; what rank 0 returned.

    Args:
        kind: "cuda" (a GPU for each rank) or "cpu".
        work: a function of a module.

    Raises:
        WorkerError: a rank died or did not answer in time.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        store = str(Path(folder) / "rendezvous")
        processes = [
            context.Process(
                target=_enter, args=(kind, rank, ranks, store, queue, work, arguments), daemon=True
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            _wait_for(processes, f"{work.__name__.strip('_')} between {ranks} ranks")
        finally:
            for process in processes:
                process.kill()
        return queue.get()


def _wait_for(processes: list[Any], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    alive = {process.sentinel: process for process in processes}
    while alive:
        left = deadline - time.monotonic()
        ended = multiprocessing.connection.wait(list(alive), timeout=max(0.0, left))
        for process in [alive.pop(sentinel) for sentinel in ended]:
            process.join()
            if process.exitcode:
                raise WorkerError(
                    f"{what} failed: a process {ending(process.exitcode)}; set NCCL_DEBUG=WARN to "
                    "see why"
                )
        if alive and left <= 0:
            raise WorkerError(
                f"{what} did not end within {TIMEOUT_S:.0f} s; set NCCL_DEBUG=WARN to see why"
            )


def _enter(
    kind: str,
    rank: int,
    ranks: int,
    store: str,
    queue: Any,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    gpu = kind == "cuda"
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # the ranks share this machine's cores
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=device if gpu else None,
    )
    found = work(rank, ranks, device, *arguments)
    if rank == 0:
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def _measure(
    rank: int, ranks: int, device: torch.device, sizes: tuple[int, ...]
) -> dict[str, Points]:
    return {
        name: tuple(_point(make, rank, ranks, device, size) for size in sizes)
        for name, make in COLLECTIVES.items()
    }


def _point(
    make: "Make", rank: int, ranks: int, device: torch.device, size: int
) -> tuple[float, float]:
    sent, call = make(rank, ranks, device, size)
    timed = seconds_in_chain if device.type == "cuda" else seconds_of_call
    return sent, timed(call, device)


Call = Callable[[], None]
# (rank, ranks, device, bytes to send) -> (bytes that are sent, what sends them)
Make = Callable[[int, int, torch.device, int], tuple[float, Call]]


def _elements(count: float, device: torch.device) -> Tensor:
    return torch.ones(max(1, int(count)), dtype=ELEMENT, device=device)


def _wait(work: dist.Work | None) -> None:
    assert work is not None  # this rank belongs to the group
    work.wait()


def _ring_shift(rank: int, ranks: int, device: torch.device, size: int) -> tuple[float, Call]:
    x = _elements(size / ELEMENT.itemsize, device)
    out = torch.empty_like(x)

    def call() -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, (rank + 1) % ranks),
                dist.P2POp(dist.irecv, out, (rank - 1) % ranks),
            ]
        )
        for work in works:
            work.wait()

    return x.nbytes, call


def _gather(rank: int, ranks: int, device: torch.device, size: int) -> tuple[float, Call]:
    x = _elements(size / ELEMENT.itemsize / (ranks - 1), device)
    out = _elements(ranks * len(x), device)
    return x.nbytes * (ranks - 1), lambda: _wait(_all_gather(out, x, async_op=True))


def _scatter(rank: int, ranks: int, device: torch.device, size: int) -> tuple[float, Call]:
    out = _elements(size / ELEMENT.itemsize / (ranks - 1), device)
    x = _elements(ranks * len(out), device)
    return out.nbytes * (ranks - 1), lambda: _wait(_reduce_scatter(out, x, async_op=True))


def _reduce(rank: int, ranks: int, device: torch.device, size: int) -> tuple[float, Call]:
    x = _elements(size / ELEMENT.itemsize * ranks / (2 * (ranks - 1)), device)
    sent = 2 * x.nbytes * (ranks - 1) / ranks
    # The largest, because sums of sums would leave the range of numbers.
    return sent, lambda: _wait(dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True))


def _exchange(rank: int, ranks: int, device: torch.device, size: int) -> tuple[float, Call]:
    part = max(1, int(size / ELEMENT.itemsize / (ranks - 1)))
    x = _elements(ranks * part, device)
    out = torch.empty_like(x)
    splits = [part] * ranks
    sent = float(x.nbytes) * (ranks - 1) / ranks
    return sent, lambda: _wait(dist.all_to_all_single(out, x, splits, splits, async_op=True))


COLLECTIVES: Mapping[str, Make] = {
    "ring_shift": _ring_shift,
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_reduce": _reduce,
    "all_to_all": _exchange,
}


def seconds_of_call(call: Call, device: torch.device) -> float:
    """Seconds of one call among several in a row; all ranks make the same calls."""
    times = [_in_a_row(call, device) / INNER for _ in range(WARMUP + REPEATS)][WARMUP:]
    # On a CPU other processes take their share, which only ever slows a repeat: the fastest.
    return min(times) if device.type == "cpu" else statistics.median(times)


def _in_a_row(call: Call, device: torch.device) -> float:
    if device.type == "cpu":
        dist.barrier()
        begin_s = time.perf_counter()
        for _ in range(INNER):
            call()
        return time.perf_counter() - begin_s
    begin, end = gpu_event(), gpu_event()
    torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
    call()  # ends on all ranks at the same time
    begin.record()
    for _ in range(INNER):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
