"""Attention over paged keys and values with FlashInfer (Ye et al. 2025).

FlashInfer plans a step on the host before it runs: `prepare` does that once for all layers.
Where the step is a captured CUDA graph, each batch size has a planner of its own whose
buffers stay in place, so that planning again before a replay is all a new step needs.
"""

import importlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kllm.attention.context import ForwardContext
from kllm.errors import ConfigError, DependencyError

STATE = "kv"
PLANNED = "flashinfer"
WORKSPACE_BYTES = 128 << 20  # the size FlashInfer recommends


def _library() -> Any:
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise DependencyError(
            f"attention backend 'flashinfer' cannot be imported ({error}); install it with "
            "`pip install kllm[gpu]` or choose --attention triton"
        ) from None


class FlashInferAttention:
    """Split-KV decode for the leading single-token requests, ragged prefill for the others.

    Args:
        query_heads: H of this rank.

    Raises:
        DependencyError: when FlashInfer cannot be imported.
    """

    def __init__(self, query_heads: int) -> None:
        self.library = _library()
        self.query_heads = query_heads
        self._workspace: Tensor | None = None
        self._eager: dict[str, Any] = {}  # wrappers of steps that run as they are
        self._static: dict[tuple[int, int], Any] = {}  # of captured steps, by batch and width
        self._copied: torch.cuda.Event | None = None  # once the device has the last plans

    def prepare(self, ctx: ForwardContext) -> None:
        """Plan the step's decodes and prefills.

        Raises:
            ConfigError: for KV dtypes that FlashInfer cannot read.
        """
        pool, n = ctx.pool, ctx.num_decodes
        if pool.kv_dtype in ("fp8", "float32"):
            raise ConfigError(
                f"attention backend 'flashinfer' cannot read {pool.kv_dtype} KV entries; "
                "choose --attention triton"
            )
        if self._copied is not None:
            # A planner writes to the host buffer that its last plan is copied from: the host may
            # be several micro-batches ahead of the device, but not past that copy.
            self._copied.synchronize()
        plans = {}
        if n:
            plans["decode"] = self._plan_decode(ctx)
        if n < len(ctx.query_lens_host):
            plans["prefill"] = self._plan_prefill(ctx)
        if ctx.block_tables.is_cuda:
            self._copied = torch.cuda.current_stream(ctx.block_tables.device).record_event()
        ctx.shared[PLANNED] = plans

    def attend(self, ctx: ForwardContext, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `kllm.attention.base.AttentionBackend.attend`."""
        ctx.pool.write(STATE, layer, ctx.entry_slots(1), torch.cat((k, v), dim=1))
        pages, heads = ctx.pool.pages(STATE, layer), k.shape[1]
        cache = pages[:, :, :heads], pages[:, :, heads:]  # views; both have the same strides
        plans, n = ctx.shared[PLANNED], ctx.num_decodes
        parts = []
        if "decode" in plans:
            parts.append(plans["decode"].run(q[:n], cache))
        if "prefill" in plans:
            parts.append(plans["prefill"].run(q[n:], cache))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _plan_decode(self, ctx: ForwardContext) -> Any:
        n = ctx.num_decodes
        indptr, last = page_spans(ctx.context_lens_host[:n], ctx.pool.page_size)
        wrapper = self._static_decode(ctx) if ctx.static else self._eager.get("decode")
        if wrapper is None:
            kv_heads = self._kv_shape(ctx)[0]
            wrapper = self._eager["decode"] = self.library.BatchDecodeWithPagedKVCacheWrapper(
                self._space(ctx), "NHD", use_tensor_cores=self._tensor_cores(kv_heads)
            )
        kv_heads, dim, dtype = self._kv_shape(ctx)
        wrapper.plan(
            torch.from_numpy(indptr),
            page_indices(ctx, 0, n, indptr),
            torch.from_numpy(last),
            self.query_heads,
            kv_heads,
            dim,
            ctx.pool.page_size,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        return wrapper

    def _static_decode(self, ctx: ForwardContext) -> Any:
        """The planner of captured steps of this batch size and block table width."""
        batch, width = ctx.block_tables.shape
        if (batch, width) not in self._static:
            device = ctx.block_tables.device

            def buffer(size: int) -> Tensor:
                return torch.zeros(size, dtype=torch.int32, device=device)

            self._static[batch, width] = self.library.BatchDecodeWithPagedKVCacheWrapper(
                self._space(ctx),
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=self._tensor_cores(self._kv_shape(ctx)[0]),
                paged_kv_indptr_buffer=buffer(batch + 1),
                paged_kv_indices_buffer=buffer(batch * width),
                paged_kv_last_page_len_buffer=buffer(batch),
            )
        return self._static[batch, width]

    def _plan_prefill(self, ctx: ForwardContext) -> Any:
        n, batch = ctx.num_decodes, len(ctx.query_lens_host)
        if "prefill" not in self._eager:
            self._eager["prefill"] = self.library.BatchPrefillWithPagedKVCacheWrapper(
                self._space(ctx), "NHD"
            )
        wrapper = self._eager["prefill"]
        indptr, last = page_spans(ctx.context_lens_host[n:], ctx.pool.page_size)
        starts = np.zeros(batch - n + 1, np.int32)
        np.cumsum(ctx.query_lens_host[n:], out=starts[1:])
        kv_heads, dim, dtype = self._kv_shape(ctx)
        wrapper.plan(
            torch.from_numpy(starts),
            torch.from_numpy(indptr),
            page_indices(ctx, n, batch, indptr),
            torch.from_numpy(last),
            self.query_heads,
            kv_heads,
            dim,
            ctx.pool.page_size,
            causal=True,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        return wrapper

    def _kv_shape(self, ctx: ForwardContext) -> tuple[int, int, torch.dtype]:
        """(K, D, dtype) of the pages."""
        layer = ctx.pool.spec.paged[0].layers[0]
        pages = ctx.pool.pages(STATE, layer)
        return pages.shape[2] // 2, pages.shape[3], pages.dtype

    def _tensor_cores(self, kv_heads: int) -> bool:
        # FlashInfer's guidance: groups of four query heads and more fill a matrix tile.
        return self.query_heads // kv_heads >= 4

    def _space(self, ctx: ForwardContext) -> Tensor:
        if self._workspace is None:
            device = ctx.block_tables.device
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspace


def page_spans(
    context_lens: NDArray[np.int32], page_size: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Where each request's pages start in a flat list [B + 1], and tokens in its last page [B]."""
    counts = -(-context_lens // page_size)
    indptr = np.zeros(len(context_lens) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr, (context_lens - (counts - 1) * page_size).astype(np.int32)


def page_indices(ctx: ForwardContext, first: int, last: int, indptr: NDArray[np.int32]) -> Tensor:
    """Flat page list int32 on the device of requests [first, last), read off the block tables."""
    width = ctx.block_tables.shape[1]
    counts = np.diff(indptr)
    row = np.repeat(np.arange(first, last, dtype=np.int64), counts)
    column = np.arange(indptr[-1], dtype=np.int64) - np.repeat(indptr[:-1], counts)
    flat = torch.from_numpy(row * width + column)
    if ctx.block_tables.is_cuda:
        flat = flat.pin_memory()
    return ctx.block_tables.flatten()[flat.to(ctx.block_tables.device, non_blocking=True)]
