"""Attention over paged keys and values with the Triton kernel: any GPU, any KV dtype."""

import numpy as np
import torch

from kllm.attention.context import ForwardContext
from kllm.kernels.paged_attention_triton import paged_attention, tile_queries

STATE = "kv"
TILES = "triton prefill tiles"


class TritonAttention:
    """Leading single-token requests run with split keys, the others in tiles of queries."""

    def prepare(self, ctx: ForwardContext) -> None:
        """Nothing: the kernel reads block tables and lengths on the device."""

    def attend(
        self,
        ctx: ForwardContext,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """See `kllm.attention.base.AttentionBackend.attend`."""
        ctx.pool.write(STATE, layer, ctx.entry_slots(1), torch.cat((k, v), dim=1))
        pages, fp8 = ctx.pool.pages(STATE, layer), ctx.pool.kv_dtype == "fp8"
        n, batch = ctx.num_decodes, len(ctx.query_lens_host)
        parts = []
        if n:
            longest = int(ctx.context_lens_host[:n].max())
            parts.append(
                paged_attention(q[:n], pages, ctx.block_tables, ctx.context_lens, longest, fp8=fp8)
            )
        if n < batch:
            parts.append(
                paged_attention(
                    q[n:],
                    pages,
                    ctx.block_tables[n:],
                    ctx.context_lens[n:],
                    int(ctx.context_lens_host[n:].max()),
                    self._starts(ctx),
                    self._tiles(ctx, q.shape[1] // k.shape[1], q.dtype),
                    fp8=fp8,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _starts(self, ctx: ForwardContext) -> torch.Tensor:
        """[prefills + 1] int32: where each prefill's tokens start, counted without decodes."""
        return ctx.cu_seqlens[ctx.num_decodes :] - ctx.num_decodes

    def _tiles(self, ctx: ForwardContext, group: int, dtype: torch.dtype) -> torch.Tensor:
        """[N, 2] int32 (request, first query) of the prefills' tiles; once a step."""
        found = ctx.shared.get(TILES)
        if found is None:
            size = tile_queries(group, dtype)
            tiles = [
                (request, first)
                for request, length in enumerate(ctx.query_lens_host[ctx.num_decodes :].tolist())
                for first in range(0, length, size)
            ]
            host = torch.from_numpy(np.array(tiles, np.int32))
            if ctx.token_ids.is_cuda:
                host = host.pin_memory()
            found = host.to(ctx.token_ids.device, non_blocking=True)
            ctx.shared[TILES] = found
        result: torch.Tensor = found
        return result
