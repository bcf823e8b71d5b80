"""The attention backends of families that cache full keys and values (GQA, MHA).

MLA/DSA and DeepSeek-V4's compressed attention have modules of their own in this package:
they choose kernels, not backends.
"""

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from kllm.attention.context import ForwardContext
from kllm.registry import Registry

FLASHINFER_DIMS = (64, 128, 256)


class AttentionBackend(Protocol):
    """Causal attention over paged keys and values.

    The paged state is called "kv": [P, page_size, 2 * K, D], keys in the first K heads.
    """

    def prepare(self, ctx: ForwardContext) -> None:
        """Plan the step on the host; called once before it, outside of captured graphs."""

    def attend(self, ctx: ForwardContext, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store this step's keys and values, then attend causally to all of each request's.

        Args:
            q: [T, H, D], scaled by nothing yet; the softmax scale is D^-0.5.
            k, v: [T, K, D].

        Returns:
            [T, H, D].
        """


def _torch(query_heads: int) -> AttentionBackend:
    from kllm.attention.torch_ref import TorchAttention

    return TorchAttention()


def _flashinfer(query_heads: int) -> AttentionBackend:
    from kllm.attention.flashinfer import FlashInferAttention

    return FlashInferAttention(query_heads)


def _triton(query_heads: int) -> AttentionBackend:
    from kllm.attention.triton_paged import TritonAttention

    return TritonAttention()


ATTENTION: Registry[Callable[[int], AttentionBackend]] = Registry(
    "attention backend", {"torch": _torch, "flashinfer": _flashinfer, "triton": _triton}
)


def resolve_attention(name: str, device: torch.device, head_dim: int, kv_dtype: str) -> str:
    """The backend that "auto" stands for here; any other name is returned as it is.

    FlashInfer where it can run and reads such heads, Triton on other GPUs, torch on a CPU.
    """
    if name != "auto":
        return name
    if device.type != "cuda":
        return "torch"
    readable = head_dim in FLASHINFER_DIMS and kv_dtype in ("bfloat16", "float16")
    return "flashinfer" if readable and _flashinfer_runs() else "triton"


def _flashinfer_runs() -> bool:
    """Whether FlashInfer is installed with its kernels, or with the compiler to build them."""
    compiler = shutil.which("nvcc") or os.environ.get("CUDA_HOME")
    return bool(find_spec("flashinfer") and (compiler or find_spec("flashinfer_jit_cache")))
