"""Moving a request's KV and a rank's weights from one process to another, each with its device.

Two ways: a send and a receive of the collectives' library (NCCL, or gloo on a CPU), and a copy out
of memory that the other process has shared (CUDA IPC, or shared memory on a CPU).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kllm.hardware.links import in_processes, seconds_of_call

MOST_BYTES = {"cuda": 2 << 30, "cpu": 16 << 20}  # of a buffer; more of them take as much longer
LIBRARIES = {"NIXL": "nixl", "Mooncake": "mooncake"}


@dataclass(frozen=True, slots=True)
class Moved:
    """One buffer moved one way."""

    what: str
    way: str
    nbytes: int
    seconds: float


def measure_transfers(kind: str, sizes: Mapping[str, int]) -> list[Moved]:
    """Move buffers of these bytes between two processes.

    Args:
        kind: "cuda" or "cpu".
        sizes: what, to its bytes; cut to MOST_BYTES.

    Raises:
        WorkerError: a process died or did not answer in time.
    """
    most = MOST_BYTES[kind]
    wanted = {what: max(1, min(size, most)) for what, size in sizes.items()}
    channel = mp.get_context("spawn").SimpleQueue()
    found = in_processes(kind, 2, _transfers, wanted, channel)
    return [Moved(*row) for row in found]


def missing_libraries() -> str:
    """One sentence about the libraries that move KV and are not installed; "" if all are."""
    absent = [name for name, module in LIBRARIES.items() if find_spec(module) is None]
    if not absent:
        return ""
    return f"Not installed, so not measured: transfers by {' and '.join(absent)}."


def _transfers(
    rank: int, ranks: int, device: torch.device, sizes: Mapping[str, int], channel: Any
) -> list[tuple[str, str, int, float]]:
    """Rank 1 has the buffers, rank 0 wants them and looks at the clock."""
    here = rank == 0
    found = []
    for what, size in sizes.items():
        x = torch.ones(size, dtype=torch.uint8, device=device)

        def message(x: torch.Tensor = x) -> None:
            if here:
                dist.recv(x, 1)
            else:
                dist.send(x, 0)

        way = "NCCL send" if device.type == "cuda" else "gloo send"
        found.append((what, way, size, seconds_of_call(message, device)))
        way = "CUDA IPC copy" if device.type == "cuda" else "shared memory copy"
        if here:
            foreign = channel.get()

            def copy(x: torch.Tensor = x, foreign: torch.Tensor = foreign) -> None:
                x.copy_(foreign)

            found.append((what, way, size, seconds_of_call(copy, device)))
            del foreign, copy
        else:
            channel.put(x)
            seconds_of_call(lambda: None, device)  # as many barriers as the other rank
        dist.barrier()  # a buffer has to outlive its use by the other
    return found
