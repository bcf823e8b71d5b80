"""Which kernel runs a step of ring attention on a GPU.

Libraries have faster dense attention for Hopper than Triton can express, but only over keys
that all queries see, or along a square diagonal. Large spans are cut into such pieces, whose
finished results are added to the softmax state by their log-sum-exp; the rest is Triton's. A
library's result comes in the dtype of the queries: its rounding is averaged over the blocks
like everything in a softmax, and does not grow with their number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import log

import torch
from torch import Tensor

from kllm.kernels import block_attention_triton, softmax_state_triton
from kllm.kernels.block_attention_reference import SoftmaxState, Span, joined

# (q [n, H, D], k [s, K, D], v [s, K, Dv], scale, causal) -> result [n, H, Dv] and natural
# log-sum-exp [n, H]. `causal` needs n = s: row i sees the keys up to i.
Attend = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]

# Below these a library's launch, and the pass over the state that adds its result, cost more
# than it wins.
MIN_QUERIES = 128
MIN_KEYS = 1024
FA3_DIMS = {(64, 64), (128, 128), (192, 128), (256, 256)}  # what FlashInfer's FA3 is compiled for


def flashinfer(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """FlashInfer's FlashAttention 3."""
    if (q.shape[2], v.shape[2]) not in FA3_DIMS:
        raise ValueError(f"FA3 has no heads of {q.shape[2]} and {v.shape[2]} channels")
    attend = import_module("flashinfer").single_prefill_with_kv_cache
    out, lse = attend(q, k, v, causal=causal, sm_scale=scale, backend="fa3", return_lse=True)
    return out, lse.mul_(log(2))  # it counts in powers of two


def cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """cuDNN's attention, as torch calls it; one KV head a query head."""
    if q.shape[1] != k.shape[1]:
        raise ValueError("torch checks grouped heads above this call and not in it")
    batch = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]  # [1, H, n, D]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *batch, None, compute_log_sumexp=True, is_causal=causal, scale=scale
    )
    return out[0].transpose(0, 1), lse.reshape(q.shape[1], q.shape[0]).t()


LIBRARIES: dict[str, Attend] = {"flashinfer": flashinfer, "cudnn": cudnn}  # the best first


@cache
def runs(
    name: str, dim: int, value_dim: int, group: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether a library attends to heads of these sizes here, and comes to Triton's result.

    Neither is known from versions alone: which sizes a library was built for, and in which base
    its logarithm is, have changed; and FlashInfer compiles when it is first called.

    Raises:
        torch.OutOfMemoryError: when there is no memory to try it; the next call tries again.
    """
    if torch.cuda.get_device_capability(device)[0] != 9 or dtype == torch.float32:
        return False
    if name == "flashinfer" and find_spec("flashinfer") is None:
        return False
    count = 256
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((count, group, dim), (count, 1, dim), (count, 1, value_dim))
    q, k, v = (
        torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes
    )
    for causal in (False, True):
        try:
            out, lse = LIBRARIES[name](q, k, v, dim**-0.5, causal)
        except torch.OutOfMemoryError:
            raise  # a RuntimeError too, but no reason to do without the library from now on
        except (RuntimeError, ValueError, ImportError, OSError):
            return False
        want = SoftmaxState.empty(count, group, value_dim, device)
        span = Span(slice(0, count), 1 if causal else count, count)
        block_attention_triton.block_attention(want, q, k, v, [span], dim**-0.5)
        near = torch.isclose(out.float(), want.o / want.l.unsqueeze(2), rtol=0.02, atol=0.02)
        same = torch.isclose(lse, want.m + want.l.log(), rtol=1e-3, atol=1e-3)
        if not bool(near.all() & same.all()):
            return False
    return True


def libraries_for(q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    """The libraries that run heads like these here, the one to take first."""
    group = q.shape[1] // k.shape[1]
    sizes = (q.shape[2], v.shape[2], group, q.dtype, q.device)
    return [name for name in LIBRARIES if runs(name, *sizes)]


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries that all see the same keys or, if `causal`, as many, each up to its own."""

    rows: slice
    keys: slice
    causal: bool


def pieces(span: Span) -> list[Piece] | None:
    """A span as pieces for a library; None: it is too small for one, or has steps of several keys.

    A diagonal is cut into the keys that all of its rows see, a square, and the rows past it
    that see every key.
    """
    keys = span.seen(span.count - 1) if span.count else 0
    if span.count < MIN_QUERIES or keys < MIN_KEYS:
        return None
    start = int(span.rows.start)
    if span.full:
        return [Piece(slice(start, start + span.count), slice(0, keys), False)]
    if span.step != 1:
        return None
    begin = max(0, 1 - span.first)  # the first row that sees a key
    before = max(0, span.first - 1)  # keys that it sees beside the square
    side = keys - before
    square = slice(start + begin, start + begin + side)
    found = [Piece(square, slice(before, keys), True)]
    if before:
        found.append(Piece(square, slice(0, before), False))
    if begin + side < span.count:
        rest = slice(square.stop, start + span.count)
        found.append(Piece(rest, slice(0, keys), False))
    return found


def attend_pieces(
    attend: Attend,
    state: SoftmaxState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: Sequence[Piece],
    scale: float,
) -> None:
    """Add what a library finds for each piece to the state, in place."""
    for part in parts:
        out, lse = attend(q[part.rows], k[part.keys], v[part.keys], scale, part.causal)
        softmax_state_triton.add_result(state.rows(part.rows), out, lse)


def block_attention(
    state: SoftmaxState, q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], scale: float
) -> None:
    """See `kllm.kernels.block_attention_reference.block_attention`."""
    rest = []
    for span in joined(spans):
        parts = pieces(span)
        names = libraries_for(q, k, v) if parts else []
        if parts and names:
            attend_pieces(LIBRARIES[names[0]], state, q, k, v, parts, scale)
        else:
            rest.append(span)
    block_attention_triton.block_attention(state, q, k, v, rest, scale)
