"""What this machine has, and the ceilings measured on it."""

from kllm.hardware.machine import Gpu, Library, Machine, detect, fingerprint, sm_clocks_mhz
from kllm.hardware.measured import Ceilings, cached_ceilings, ceilings, measure_ceilings

__all__ = [
    "Ceilings",
    "Gpu",
    "Library",
    "Machine",
    "cached_ceilings",
    "ceilings",
    "detect",
    "fingerprint",
    "measure_ceilings",
    "sm_clocks_mhz",
]
