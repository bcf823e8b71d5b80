"""The attention backends of families that cache full keys and values (GQA, MHA).

MLA/DSA and DeepSeek-V4's compressed attention have modules of their own in this package:
they choose kernels, not backends.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from kllm.attention.context import ForwardContext
from kllm.registry import Registry


class AttentionBackend(Protocol):
    """Causal attention over paged keys and values.

    The paged state is called "kv": [P, page_size, 2 * K, D], keys in the first K heads.
    """

    def prepare(self, ctx: ForwardContext) -> None:
        """Called once a step, before the first layer."""

    def attend(self, ctx: ForwardContext, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store this step's keys and values, then attend causally to all of each request's.

        Args:
            q: [T, H, D], scaled by nothing yet; the softmax scale is D^-0.5.
            k, v: [T, K, D].

        Returns:
            [T, H, D].
        """


def _torch() -> AttentionBackend:
    from kllm.attention.torch_ref import TorchAttention

    return TorchAttention()


def _flashinfer() -> AttentionBackend:
    from kllm.attention.flashinfer import FlashInferAttention

    return FlashInferAttention()


def _triton() -> AttentionBackend:
    from kllm.attention.triton_paged import TritonAttention

    return TritonAttention()


ATTENTION: Registry[Callable[[], AttentionBackend]] = Registry(
    "attention backend", {"torch": _torch, "flashinfer": _flashinfer, "triton": _triton}
)
