"""Moving a request's KV and a rank's weights from one process to another, each with its device.

Two ways need torch alone: a send and a receive of the collectives' library (NCCL, or gloo on a
CPU), and a copy out of memory that the other process has shared (CUDA IPC, or shared memory on a
CPU). The others are those of libraries that move KV between engines, where they load.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kllm.bench.fidelity_mooncake import Mooncake
from kllm.bench.fidelity_nixl import Nixl
from kllm.bench.fidelity_pair import Open, seconds_between
from kllm.bench.fidelity_sides import FidelityLoad
from kllm.bench.record import Record
from kllm.config import ParallelConfig
from kllm.errors import DependencyError, KllmError, one_line
from kllm.hardware.links import in_processes, seconds_of_call
from kllm.models.load import ResolvedModel, rank_bytes

MOST_BYTES = {"cuda": 2 << 30, "cpu": 16 << 20}  # of a buffer; more of them take as much longer
ONE_WAY = (
    "The link's bandwidth is that of a shift from rank to rank, with both directions in use; what "
    "is moved one way only can be faster than that."
)
UNITS = {"mib": "MiB", "ms": "ms", "gbytes_per_s": "GB/s"}


@dataclass(frozen=True, slots=True)
class Moved:
    """One buffer moved one way."""

    what: str
    way: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A library that moves buffers, and what it moves them over."""

    library: str
    module: str  # that Python imports
    package: str  # that pip installs
    over: str
    kinds: Sequence[str]  # of devices between which it moves
    open_end: Open


WAYS = (
    Way(
        library="NIXL",
        module="nixl",
        package="nixl",
        over="UCX",
        kinds=("cuda", "cpu"),
        open_end=Nixl,
    ),
    Way(
        library="Mooncake",
        module="mooncake",
        package="mooncake-transfer-engine",
        over="NVLink",
        kinds=("cuda",),
        open_end=partial(Mooncake, "nvlink_intra"),
    ),
    Way(
        library="Mooncake",
        module="mooncake",
        package="mooncake-transfer-engine",
        over="TCP",
        kinds=("cuda", "cpu"),
        open_end=partial(Mooncake, "tcp"),
    ),
)


def buffers_of(resolved: ResolvedModel, load: FidelityLoad, world: int) -> dict[str, int]:
    """What engines hand to each other, to its bytes: KV to decode with, weights to start with.

    Args:
        world: ranks that have the weights cut by heads and columns.
    """
    spec = resolved.family.cache_spec(resolved.config)
    entries = spec.bytes_per_token(resolved.kv_dtype) * (load.isl + load.osl)
    tensors = resolved.family.manifest(resolved.config)
    return {
        "a request's KV": int(entries + spec.bytes_per_request(resolved.kv_dtype, 0)),
        "a rank's weights": rank_bytes(tensors, ParallelConfig(tp=world), resolved.dtype),
    }


def add_transfers(
    record: Record, kind: str, sizes: Mapping[str, int], link_bytes_per_s: float
) -> None:
    """Record a row for each buffer and way, and a note for each library that moved nothing.

    Args:
        kind: "cuda" or "cpu".
        sizes: what, to its bytes.
        link_bytes_per_s: that a row's rate is set in relation to.
    """
    try:
        moved = measure_transfers(kind, sizes)
    except (KllmError, RuntimeError) as error:
        record.row("transfers", {"state": "failed", "reason": one_line(error)})
        moved = []
    by_library, notes = measure_libraries(kind, sizes)
    for one in (*moved, *by_library):
        rate = one.nbytes / one.seconds
        row: dict[str, Any] = {
            "what": one.what,
            "way": one.way,
            "fidelity": "real",
            "mib": one.nbytes / 2**20,
            "ms": one.seconds * 1e3,
            "gbytes_per_s": rate / 1e9,
            "achieved_over_link": rate / link_bytes_per_s,
            "state": "ok",
        }
        record.row("transfers", row, UNITS)
    record.notes += [ONE_WAY, *notes]


def measure_transfers(kind: str, sizes: Mapping[str, int]) -> list[Moved]:
    """Move buffers of these bytes between two processes by the ways that need torch alone.

    Args:
        kind: "cuda" or "cpu".
        sizes: what, to its bytes; cut to MOST_BYTES.

    Raises:
        WorkerError: a process died or did not answer in time.
    """
    channel = mp.get_context("spawn").SimpleQueue()
    found = in_processes(kind, 2, _transfers, _cut(kind, sizes), channel)
    return [Moved(*row) for row in found]


def measure_libraries(
    kind: str, sizes: Mapping[str, int], ways: Sequence[Way] = WAYS
) -> tuple[list[Moved], list[str]]:
    """Move buffers of these bytes between two processes by libraries for it.

    Args:
        kind: "cuda" or "cpu".
        sizes: what, to its bytes; cut to MOST_BYTES.
        ways: that are tried one after the other.

    Returns:
        What was moved, and a sentence for each library and reason that something was not.
    """
    wanted = _cut(kind, sizes)
    moved: list[Moved] = []
    failed: dict[tuple[str, str], list[str]] = {}  # (library, reason) to what it was to go over
    for way in ways:
        if kind not in way.kinds:
            continue
        try:
            if find_spec(way.module) is None:
                raise DependencyError(
                    f"no module {way.module} is installed (pip install {way.package})"
                )
            found = seconds_between(way.open_end, kind, list(wanted.values()))
        except (KllmError, RuntimeError) as error:
            failed.setdefault((way.library, one_line(error)), []).append(way.over)
            continue
        for (what, size), seconds in zip(wanted.items(), found, strict=True):
            moved.append(Moved(what, f"{way.library} over {way.over}", size, seconds))
    notes = [
        f"Transfers by {library} over {' and '.join(over)} were not measured: {reason}."
        for (library, reason), over in failed.items()
    ]
    return moved, notes


def _cut(kind: str, sizes: Mapping[str, int]) -> dict[str, int]:
    return {what: max(1, min(size, MOST_BYTES[kind])) for what, size in sizes.items()}


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
