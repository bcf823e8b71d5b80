"""Bandwidth and latency between the GPUs of this machine, over NCCL.

One process a GPU. A ring of sends (each rank sends to the next, all at once) and an all-gather
over all ranks, at several sizes; GPU events on rank 0.
"""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kllm.errors import WorkerError

SIZES = tuple(1 << n for n in (12, 16, 20, 24, 28))  # bytes a rank sends: 4 KiB to 256 MiB
REPEATS, WARMUP = 7, 3
TIMEOUT_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCeilings:
    """Transfers between GPUs, by bytes that each rank sends. Lists run along `sizes`."""

    ranks: int
    sizes: list[int]
    send_s: list[float]  # ring shift: every rank sends to the next and receives
    all_gather_s: list[float]  # every rank contributes `size` bytes

    @property
    def latency_s(self) -> float:
        """Time of the smallest transfer."""
        return self.send_s[0]

    @property
    def bytes_per_s(self) -> float:
        """One direction of one link, from the largest transfer."""
        return self.sizes[-1] / self.send_s[-1]


def measure_links() -> LinkCeilings:
    """Measure over all GPUs of this machine.

    Raises:
        WorkerError: a rank died or did not answer in time.
    """
    ranks = torch.cuda.device_count()
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        store = str(Path(folder) / "rendezvous")
        processes = [
            context.Process(target=_rank, args=(rank, ranks, store, queue), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIMEOUT_S)
        failed = [p for p in processes if p.exitcode != 0]
        for process in failed:
            process.kill()
        if failed:
            raise WorkerError(
                f"measuring the link between {ranks} GPUs failed: {len(failed)} of the processes "
                f"ended with {failed[0].exitcode}; set NCCL_DEBUG=WARN to see why"
            )
        send, gather = queue.get()
    return LinkCeilings(ranks=ranks, sizes=list(SIZES), send_s=send, all_gather_s=gather)


def _rank(rank: int, ranks: int, store: str, queue: Any) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        device_id=torch.device("cuda", rank),
    )
    sends, gathers = [], []
    for size in SIZES:
        mine = torch.ones(size, dtype=torch.uint8, device="cuda")
        theirs = torch.empty_like(mine)
        everyone = torch.empty(ranks * size, dtype=torch.uint8, device="cuda")

        def shift(mine: torch.Tensor = mine, theirs: torch.Tensor = theirs) -> None:
            operations = [
                dist.P2POp(dist.isend, mine, (rank + 1) % ranks),
                dist.P2POp(dist.irecv, theirs, (rank - 1) % ranks),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        def gather(mine: torch.Tensor = mine, everyone: torch.Tensor = everyone) -> None:
            dist.all_gather_into_tensor(everyone, mine)

        sends.append(_median_s(shift))
        gathers.append(_median_s(gather))
    if rank == 0:
        queue.put((sends, gathers))
    dist.barrier()
    dist.destroy_process_group()


def gpu_event() -> torch.cuda.Event:
    """An event that keeps its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _median_s(action: Callable[[], None]) -> float:
    times = []
    for repeat in range(WARMUP + REPEATS):
        begin, end = gpu_event(), gpu_event()
        begin.record()
        action()
        end.record()
        end.synchronize()
        if repeat >= WARMUP:
            times.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(times)
