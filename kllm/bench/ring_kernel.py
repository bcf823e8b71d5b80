"""How fast one dense step of ring attention is: one block of keys that every query sees.

The rate counts the two matrix products alone; the state that is read and written, and the pass
that adds a library's result to it, are part of the time.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kllm import kernels
from kllm.bench.timing import interleave, timed
from kllm.hardware.measured import Ceilings
from kllm.kernels import SoftmaxState, Span
from kllm.parallel.overlap import DenseHeads


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """A step of `queries` tokens over a block of `keys` entries."""

    queries: int
    keys: int
    heads: DenseHeads

    @property
    def flops(self) -> int:
        """Of scores and of weighted values; a multiply-add counts as two."""
        channels = self.heads.heads * (self.heads.dim + self.heads.value_dim)
        return 2 * self.queries * self.keys * channels


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRate:
    """What one kernel reached."""

    seconds: tuple[float, ...]  # of each repeat
    flops_per_s: float  # at the median
    share_of_matmul: float  # of the measured rate of a large product in the same dtype
    chosen: bool  # whether the engine takes this kernel here


def block_rates(
    shape: BlockShape, ceilings: Ceilings, *, dtype: str, device: str, repeats: int = 5
) -> dict[str, BlockRate]:
    """Time every kernel that can do the step, in alternation, on random data.

    Args:
        dtype: torch's name of the type of queries, keys and values.
        device: "cpu", "cuda" or "cuda:N", which `ceilings` were measured on.

    Returns:
        Kernel name ("flashinfer", "cudnn", "triton"; on a CPU "torch") to its rate.
    """
    chosen, steps = _steps(shape, getattr(torch, dtype), torch.device(device))
    sides = {name: partial(timed, step, device) for name, step in steps.items()}
    rates = {}
    for name, seconds in interleave(sides, repeats=repeats).items():
        reached = shape.flops / statistics.median(seconds)
        rates[name] = BlockRate(
            seconds=tuple(seconds),
            flops_per_s=reached,
            share_of_matmul=reached / ceilings.matmul(dtype),
            chosen=name == chosen,
        )
    return rates


def _steps(
    shape: BlockShape, dtype: torch.dtype, device: torch.device
) -> tuple[str, dict[str, Callable[[], None]]]:
    """The name of the kernel that the engine takes, and a call of each one that runs here."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    heads = shape.heads
    q = randn(shape.queries, heads.heads, heads.dim)
    k = randn(shape.keys, heads.kv_heads, heads.dim)
    v = randn(shape.keys, heads.kv_heads, heads.value_dim)
    state = SoftmaxState.empty(shape.queries, heads.heads, heads.value_dim, device)
    span, scale = Span(slice(0, shape.queries), shape.keys, shape.keys), heads.dim**-0.5
    if device.type == "cpu":
        return "torch", {"torch": partial(kernels.block_attention, state, q, k, v, [span], scale)}

    from kllm.kernels import block_attention_gpu, block_attention_triton  # they need Triton

    run = block_attention_triton.block_attention
    steps: dict[str, Callable[[], None]] = {"triton": partial(run, state, q, k, v, [span], scale)}
    chosen = "triton"
    for name in reversed(block_attention_gpu.libraries_for(q, k, v)):
        attend = block_attention_gpu.LIBRARIES[name]
        parts = block_attention_gpu.pieces(span)
        if parts:
            chosen = name
            add = block_attention_gpu.attend_pieces
            steps[name] = partial(add, attend, state, q, k, v, parts, scale)
    return chosen, steps
