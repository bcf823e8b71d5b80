"""What this machine has, and the ceilings measured on it."""

from kllm.hardware.machine import (
    Gpu,
    Library,
    Machine,
    detect,
    fingerprint,
    free_gpu_bytes,
    sm_clocks_mhz,
)
from kllm.hardware.measured import (
    Ceilings,
    cached_ceilings,
    ceilings,
    mark_beaten,
    measure_ceilings,
)
from kllm.hardware.memory import release_memory

__all__ = [
    "Ceilings",
    "Gpu",
    "Library",
    "Machine",
    "cached_ceilings",
    "ceilings",
    "detect",
    "fingerprint",
    "free_gpu_bytes",
    "mark_beaten",
    "measure_ceilings",
    "release_memory",
    "sm_clocks_mhz",
]
