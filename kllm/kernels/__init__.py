"""Kernels: each has a plain torch reference and may have a Triton version.

The functions here choose by device: Triton where the tensors are on a GPU, otherwise the
reference. Nothing else in the engine knows which one ran.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from kllm.kernels import block_attention_reference, moe_grouped, reference
from kllm.kernels.block_attention_reference import SoftmaxState, Span, top_entries

__all__ = [
    "SoftmaxState",
    "Span",
    "add_rmsnorm",
    "block_attention",
    "finish_softmax",
    "hc_head",
    "hc_post",
    "hc_pre",
    "index_scores",
    "linear_fp32",
    "moe",
    "pool_rows",
    "rmsnorm",
    "rope",
    "sparse_attention",
    "sparse_block_attention",
    "split_lists",
    "swiglu",
    "top_entries",
]

P = ParamSpec("P")
R = TypeVar("R")

SMALL_BATCH = 64  # tokens up to which one expert's rows fit a tile of the Triton MoE


def _best(name: str, plain: Callable[P, R], x: Tensor) -> Callable[P, R]:
    """`plain`, or its twin in `<name>_triton` where `x` is on a GPU."""
    if not x.is_cuda:
        return plain
    twin: Callable[P, R] = getattr(import_module(f"kllm.kernels.{name}_triton"), plain.__name__)
    return twin


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kllm.kernels.reference.rmsnorm`."""
    return _best("rmsnorm", reference.rmsnorm, x)(x, weight, eps)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kllm.kernels.reference.add_rmsnorm`."""
    return _best("rmsnorm", reference.add_rmsnorm, x)(x, residual, weight, eps)


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = True,
    inverse: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See `kllm.kernels.reference.rope`."""
    best = _best("rope", reference.rope, x)
    return best(x, cos, sin, interleaved=interleaved, inverse=inverse, out=out)


def swiglu(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """See `kllm.kernels.reference.swiglu`."""
    return _best("swiglu", reference.swiglu, gate_up)(gate_up, limit)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """See `kllm.kernels.reference.linear_fp32`."""
    if x.is_cuda and x.dtype == weight.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return reference.linear_fp32(x, weight)


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float | None = None,
    first_expert: int = 0,
    pairs: int | None = None,
) -> Tensor:
    """See `kllm.kernels.reference.moe`; `pairs` as in `moe_grouped`."""
    if x.is_cuda and x.shape[0] > SMALL_BATCH and x.dtype == torch.bfloat16:
        return moe_grouped.moe(x, topk_ids, topk_weights, w13, w2, limit, first_expert, pairs)
    best = _best("moe", reference.moe, x) if x.shape[0] <= SMALL_BATCH else reference.moe
    return best(x, topk_ids, topk_weights, w13, w2, limit, first_expert)


def sparse_attention(
    q: Tensor,
    segments: Sequence[tuple[Tensor, Tensor]],
    scale: float,
    sink: Tensor | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """See `kllm.kernels.reference.sparse_attention`."""
    return _best("sparse_attention", reference.sparse_attention, q)(
        q, segments, scale, sink, value_dim
    )


def block_attention(
    state: SoftmaxState, q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], scale: float
) -> None:
    """See `kllm.kernels.block_attention_reference.block_attention`."""
    if q.is_cuda:
        chosen = import_module("kllm.kernels.block_attention_gpu").block_attention
    else:
        chosen = block_attention_reference.block_attention
    chosen(state, q, k, v, spans, scale)


def sparse_block_attention(
    state: SoftmaxState,
    q: Tensor,
    kv: Tensor,
    idx: Tensor,
    scale: float,
    value_dim: int | None = None,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> None:
    """See `kllm.kernels.block_attention_reference.sparse_block_attention`."""
    best = _best("sparse_block", block_attention_reference.sparse_block_attention, q)
    best(state, q, kv, idx, scale, value_dim, bounds)


def split_lists(lists: Tensor, size: int, parts: int) -> tuple[Tensor, Tensor]:
    """See `kllm.kernels.reference.split_lists`."""
    return _best("sparse_block", reference.split_lists, lists)(lists, size, parts)


def finish_softmax(state: SoftmaxState, dtype: torch.dtype, sink: Tensor | None = None) -> Tensor:
    """See `kllm.kernels.block_attention_reference.finish_softmax`."""
    best = _best("softmax_state", block_attention_reference.finish_softmax, state.o)
    return best(state, dtype, sink)


def index_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    slots: Tensor | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """See `kllm.kernels.reference.index_scores`."""
    return _best("indexer", reference.index_scores, q)(q, weights, keys, slots, visible)


def pool_rows(values: Tensor, gates: Tensor) -> Tensor:
    """See `kllm.kernels.reference.pool_rows`."""
    return reference.pool_rows(values, gates)


def hc_pre(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kllm.kernels.reference.hc_pre`."""
    return _best("hyper_connection", reference.hc_pre, streams)(
        streams, fn, base, scale, norm_eps=norm_eps, eps=eps, iterations=iterations
    )


def hc_post(out: Tensor, streams: Tensor, expand: Tensor, mix: Tensor) -> Tensor:
    """See `kllm.kernels.reference.hc_post`."""
    return _best("hyper_connection", reference.hc_post, streams)(out, streams, expand, mix)


def hc_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, eps: float
) -> Tensor:
    """See `kllm.kernels.reference.hc_head`."""
    return _best("hyper_connection", reference.hc_head, streams)(
        streams, fn, base, scale, norm_eps=norm_eps, eps=eps
    )
