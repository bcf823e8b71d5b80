"""The machine's measured ceilings: what no kernel on it can pass.

Floors of step times divide by these figures and not by data sheets, so that "achieved over
floor" says how much is left to win on this very machine. They are cached in `env.home()`, one
file for each machine and set of libraries.

Other processes only ever make a figure too low. So each is the best of several rounds, and those
of a busy moment, told by the load or by a run that was faster (`mark_beaten`), are measured again
in the next calm one; the better of both stays.
"""

import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kllm import env
from kllm.errors import DataError
from kllm.hardware.chain import gpu_event
from kllm.hardware.links import LinkCeilings, Points, measure_links
from kllm.hardware.machine import detect, fingerprint
from kllm.hardware.memory import release_memory

VERSION = 3  # of the cached file; raise it when a measurement changes its meaning
# Buffers have to be far larger than the last cache level; a matrix large enough that its edges
# do not matter, and small enough that two CPU cores finish in a fraction of a second.
CPU_BUFFER_BYTES, GPU_BUFFER_BYTES = 256 << 20, 4 << 30
CPU_MATRIX, GPU_MATRIX = 1536, 8192
PROBE_MATRIX = 512  # tells whether the full matrix would take too long
LONGEST_S = 0.6  # of a product of full matrices
ROUNDS = 3  # of all measurements, so that those of a figure lie seconds apart
BUDGET_S = 0.2  # for the repeats of one measurement in one round
MIN_REPEATS, MAX_REPEATS = 1, 30  # in one round
FP8_CAPABILITY = (8, 9)
BUSY = 0.3  # processes that want to run, for each core: above it a CPU's figures may be too low


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Measured ceilings of one device of the machine."""

    device: str  # "cpu" or "cuda"
    copy_bytes_per_s: float  # bytes read plus bytes written
    read_bytes_per_s: float
    matmul_flops_per_s: dict[str, float]  # dtype name (and "fp8") to rate, random data
    launch_s: float  # shortest time of one operation: a kernel launch, or a call on the CPU
    links: LinkCeilings | None = None  # of two GPUs or more, or of processes if asked for
    measured_at: str | None = None  # ISO 8601, UTC; None: unknown
    load: float | None = None  # of each core in the minute before; None: unknown
    beaten: bool = False  # a run was faster than they allow

    @property
    def doubtful(self) -> bool:
        """Whether they may be too low."""
        return self.beaten or not _calm(self.load, self.device)

    def matmul(self, dtype: str) -> float:
        """FLOP/s of a dtype; one that was not measured runs at the float32 rate."""
        return self.matmul_flops_per_s.get(dtype, self.matmul_flops_per_s["float32"])


def ceilings(device: str = "auto", *, fresh: bool = False, links: bool = False) -> Ceilings:
    """Ceilings of this machine, read from the cache, or measured where those may be too low.

    Args:
        device: "cpu", "cuda" or "cuda:N"; "auto": the GPU if there is one.
        fresh: measure again and replace what is cached.
        links: on a CPU, those between processes as well; on GPUs they are there in any case.

    Raises:
        DataError: the cache folder cannot be written.
        CapacityError: links are wanted and there is one GPU.
        WorkerError: the links cannot be measured.
    """
    kind = _kind(device)
    cached = _read(_path(kind))
    links = links or (cached is not None and cached.links is not None)
    if cached is None or fresh or (cached.doubtful and _calm(load_at_start(), kind)):
        found = measure_ceilings(device if kind == "cuda" and device != "auto" else kind)
    else:
        found = cached
    if links and found.links is None:
        found = replace(found, links=measure_links(kind))
    if found is cached:
        return found
    if cached is not None and not fresh:
        found = best_of(cached, found)
    _write(_path(kind), asdict(found))
    return found


def cached_ceilings(device: str = "auto") -> Ceilings | None:
    """What `ceilings` measured before on this machine, if it did."""
    return _read(_path(_kind(device)))


def mark_beaten(found: Ceilings) -> str:
    """Have ceilings that a run has beaten measured again, by the next process in a calm moment.

    Returns:
        What to say of the run.
    """
    if cached_ceilings(found.device) == found:  # else they have been measured again meanwhile
        with suppress(DataError):  # a cache that cannot be written must not cost the run its result
            _write(_path(found.device), asdict(replace(found, beaten=True)))
    when = f"of {found.measured_at}" if found.measured_at else "in the cache"
    return (
        f"This run was faster than the measured ceilings {when} allow, so they are too low (a busy "
        "moment, perhaps); the next run in a calm moment measures them again, as `kllm doctor "
        "--fresh` does."
    )


def best_of(one: Ceilings, other: Ceilings) -> Ceilings:
    """The better figure of two measurements of a device each; date and load are `other`'s."""
    rates = dict(other.matmul_flops_per_s)
    for name, rate in one.matmul_flops_per_s.items():
        rates[name] = max(rate, rates.get(name, 0.0))
    return replace(
        other,
        copy_bytes_per_s=max(one.copy_bytes_per_s, other.copy_bytes_per_s),
        read_bytes_per_s=max(one.read_bytes_per_s, other.read_bytes_per_s),
        matmul_flops_per_s=rates,
        launch_s=min(one.launch_s, other.launch_s),
        links=_best_links(one.links, other.links),
    )


def _best_links(one: LinkCeilings | None, other: LinkCeilings | None) -> LinkCeilings | None:
    if one is None or other is None:
        return other or one
    best: dict[str, Points] = {}
    for name, points in other.curves.items():
        before = dict(one.curves[name])  # the same ranks: the file is that of one machine
        best[name] = tuple(
            (sent, min(seconds, before.get(sent, seconds))) for sent, seconds in points
        )
    return replace(other, curves=best)


def _calm(load: float | None, kind: str) -> bool:
    # The load is that of the cores: it says nothing of who else uses a GPU.
    return kind == "cuda" or (load is not None and load <= BUSY)


@cache
def load_at_start() -> float | None:
    """Processes that wanted to run, for each core, in the minute before this was first asked.

    It stays what it was: later ones would count the work of this process, and ceilings would
    change within a run. None: the system does not say.
    """
    try:
        return os.getloadavg()[0] / detect().cores
    except OSError:
        return None


def _kind(device: str) -> str:
    if device != "auto":
        return torch.device(device).type
    return "cuda" if torch.cuda.is_available() else "cpu"


def _path(kind: str) -> Path:
    return env.home() / f"ceilings-{kind}-{_machine_key()}.json"


def measure_ceilings(device: str) -> Ceilings:
    """Measure on `device` ("cpu", "cuda", "cuda:N"); some seconds."""
    target = torch.device(device)
    gpu = target.type == "cuda"
    buffer_bytes = GPU_BUFFER_BYTES if gpu else CPU_BUFFER_BYTES
    if gpu:  # leave room for whoever else holds memory here
        buffer_bytes = min(buffer_bytes, torch.cuda.mem_get_info(target)[0] // 4)
    best = reduce(best_of, [_round(target, buffer_bytes) for _ in range(ROUNDS)])
    release_memory()  # other processes run next: those of the links, workers, ranks
    links = measure_links() if gpu and torch.cuda.device_count() > 1 else None
    return replace(best, links=links)


def _round(target: torch.device, buffer_bytes: int) -> Ceilings:
    copy, read = _bandwidth(target, buffer_bytes)
    side = GPU_MATRIX if target.type == "cuda" else CPU_MATRIX
    one = torch.zeros(1, device=target)
    return Ceilings(
        device=target.type,
        copy_bytes_per_s=copy,
        read_bytes_per_s=read,
        matmul_flops_per_s={name: _matmul_rate(target, name, side) for name in _dtypes(target)},
        launch_s=_seconds(lambda: one.add_(1), target, inner=200),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        load=load_at_start(),
    )


def _bandwidth(device: torch.device, nbytes: int) -> tuple[float, float]:
    """(copy, read) in bytes/s."""
    rows, columns = nbytes // (4 * 16384), 16384
    source = torch.ones(rows, columns, dtype=torch.float32, device=device)
    size = source.numel() * 4
    vector = torch.ones(columns, dtype=torch.float32, device=device)
    # A sum and a matrix times vector only read; which of them is faster depends on the library.
    reads = (lambda: source.sum(), lambda: source @ vector)
    read = max(size / _seconds(action, device) for action in reads)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device), read


def _dtypes(device: torch.device) -> list[str]:
    names = ["float32", "bfloat16", "float16"]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY:
        names.append("fp8")
    return names


def _matmul_rate(device: torch.device, dtype: str, side: int) -> float:
    """FLOP/s of a square product; random data, because zeros draw less power and run faster."""
    if device.type == "cpu":
        # A CPU without instructions for a dtype emulates it at a few GFLOP/s; a small matrix
        # shows that as well as a large one.
        probe_s = _seconds(_product(device, dtype, PROBE_MATRIX), device)
        if probe_s * (side / PROBE_MATRIX) ** 3 > LONGEST_S:
            return 2 * PROBE_MATRIX**3 / probe_s
    return 2 * side**3 / _seconds(_product(device, dtype, side), device)


def _product(device: torch.device, dtype: str, side: int) -> Callable[[], Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(side, side, generator=generator, device=device)
    b = torch.randn(side, side, generator=generator, device=device)
    if dtype != "fp8":
        left, right = (x.to(getattr(torch, dtype)) for x in (a, b))
        return lambda: left @ right
    one = torch.ones((), device=device)
    a8 = a.to(torch.float8_e4m3fn)
    b8 = b.to(torch.float8_e4m3fn).t()  # the library wants the second operand column-major
    return lambda: torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _seconds(action: Callable[[], object], device: torch.device, inner: int = 1) -> float:
    times = _times(action, device, inner)
    # A GPU is ours alone, and its first repeats run at clocks that it cannot hold: the median.
    # On a CPU other processes take their share, which only ever slows a repeat: the fastest.
    return statistics.median(times) if device.type == "cuda" else min(times)


def _times(action: Callable[[], object], device: torch.device, inner: int) -> list[float]:
    """Seconds of one call, repeated until BUDGET_S is used, after one call to warm up."""
    gpu = device.type == "cuda"
    action()
    times: list[float] = []
    deadline = time.perf_counter() + BUDGET_S
    while len(times) < MIN_REPEATS or (len(times) < MAX_REPEATS and time.perf_counter() < deadline):
        if gpu:
            begin, end = gpu_event(), gpu_event()
            stream = torch.cuda.current_stream(device)
            begin.record(stream)
            for _ in range(inner):
                action()
            end.record(stream)
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) / 1e3 / inner)
        else:
            start = time.perf_counter()
            for _ in range(inner):
                action()
            times.append((time.perf_counter() - start) / inner)
    return times


def _machine_key() -> str:
    # Threads are part of it: OMP_NUM_THREADS=1 halves what two cores reach.
    about = {"machine": fingerprint(), "threads": detect().threads, "version": VERSION}
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]


def _read(path: Path) -> Ceilings | None:
    try:
        data = json.loads(path.read_text())
        links = data.pop("links")
        return Ceilings(**data, links=LinkCeilings.from_json(links) if links else None)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # absent, torn or of an older version: measured again


def _write(path: Path, data: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(descriptor, "w") as file:
            json.dump(data, file, indent=1)
        Path(name).replace(path)
    except OSError as error:
        raise DataError(
            f"measured ceilings cannot be stored in {path.parent}: {error.strerror}; "
            f"set KLLM_HOME to a folder that can be written"
        ) from error
