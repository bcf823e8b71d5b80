"""GPUs that layouts are computed for where none is present: memory, rate and link. No torch."""

from dataclasses import dataclass

from kllm.parallel.link import LINKS, Link
from kllm.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPreset:
    """A maker's figures of one GPU."""

    memory_bytes: float
    memory_bytes_per_s: float
    matmul_flops: float  # bfloat16, dense, per second
    link: str  # to the GPUs of the same host: a key of LINKS

    @property
    def peers(self) -> Link:
        """The link to the other GPUs of the host."""
        return LINKS[self.link]


# NVIDIA's data sheets of H100 SXM, H200 SXM, HGX B200 and HGX B300, per GPU. Published matmul rates
# with sparsity are halved.
GPUS = Registry(
    "GPU",
    {
        "h100": GpuPreset(
            memory_bytes=80e9, memory_bytes_per_s=3.35e12, matmul_flops=989e12, link="nvlink4"
        ),
        "h200": GpuPreset(
            memory_bytes=141e9, memory_bytes_per_s=4.8e12, matmul_flops=989e12, link="nvlink4"
        ),
        "b200": GpuPreset(
            memory_bytes=180e9, memory_bytes_per_s=8e12, matmul_flops=2250e12, link="nvlink5"
        ),
        "b300": GpuPreset(
            memory_bytes=288e9, memory_bytes_per_s=8e12, matmul_flops=2250e12, link="nvlink5"
        ),
    },
)
