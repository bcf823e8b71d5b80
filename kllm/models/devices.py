"""What `auto` means for device and dtype."""

import psutil
import torch

from kllm import hardware
from kllm.errors import CapacityError, ConfigError

# A CPU engine shares its memory with everything else on the machine, and touches all of it at
# the start: it gets this much unless the config says more.
CPU_KV_BYTES = 1 << 30
SMALL_NETWORK_BYTES = 32 << 20
THREADS = torch.get_num_threads()  # before anything here changed it


def choose_device(name: str) -> torch.device:
    """The device that `EngineConfig.device` asks for.

    Raises:
        ConfigError: for a name that is no device kLLM runs on.
        CapacityError: when this machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ConfigError(f"unknown device '{name}'; known: auto, cpu, cuda, cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    number = int(index or 0)
    if number >= count:
        raise CapacityError(f"device '{name}' is not there: this machine has {count} CUDA devices")
    return torch.device("cuda", number)


def choose_dtype(name: str, device: torch.device) -> str:
    """The dtype that `EngineConfig.dtype` asks for: auto is float32 on a CPU, else bfloat16."""
    if name != "auto":
        return name
    return "float32" if device.type == "cpu" else "bfloat16"


def free_bytes(device: torch.device) -> int:
    """Memory that new tensors on `device` can take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What the allocator holds and no tensor uses is free to us as well.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + held)
    return int(psutil.virtual_memory().available)


def free_on_ranks(device: torch.device, ranks: int) -> int:
    """Memory that each of `ranks` ranks of this machine can take, one on each GPU from the first.

    That of the fullest of their GPUs, or an equal part of what is free for ranks on a CPU. Of
    ranks on other machines nothing is known here.

    Args:
        device: of this process, the first rank's.
    """
    free = free_bytes(device)
    if ranks == 1:
        return free
    if device.type != "cuda":
        return free // ranks
    # Of its own device this process knows better: what it holds and does not use is free.
    others = hardware.free_gpu_bytes()[1:ranks]
    return min([free, *(there for there in others if there is not None)])


def kv_share(device: torch.device, fraction: float, reserved: int) -> float:
    """Bytes for KV: `fraction` of what is free once `reserved` bytes are taken, on a CPU capped."""
    share = max(0.0, fraction * (free_bytes(device) - reserved))
    return share if device.type == "cuda" else min(share, CPU_KV_BYTES)


def fit_threads(weight_bytes: int) -> None:
    """Give a network on a CPU one thread if it is small, all of them otherwise.

    The steps of a small network are too short to divide: a second thread gains nothing, and costs
    a factor of ten as soon as something else runs, because threads that wait for each other spin.
    """
    torch.set_num_threads(1 if weight_bytes < SMALL_NETWORK_BYTES else THREADS)
