"""Attention in plain torch: what the CPU runs, and the reference of the other backends.

Each prompt goes through one causal SDPA call; its cached prefix is read as a view where its pages
are neighbours in the pool, and gathered otherwise. Decodes are `kllm.attention.torch_decode`'s.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kllm.attention.context import ForwardContext
from kllm.attention.torch_decode import attend_decodes

STATE = "kv"


@dataclass(slots=True)
class _Segment:
    """One prompt's part of the step."""

    start: int  # its first query token
    queries: int
    context: int  # tokens in the cache after this step
    first_slot: int  # where a contiguous cache starts; -1: `slots` says where
    slots: Tensor | None
    mask: Tensor | None  # [queries, context] where a cached prefix makes causality oblique


class TorchAttention:
    """Causal attention over paged keys and values with `scaled_dot_product_attention`."""

    def prepare(self, ctx: ForwardContext) -> None:
        """Find each prompt's slots once, for all layers."""
        page = ctx.pool.page_size
        tables = ctx.block_tables.cpu().numpy()
        segments, start = [], ctx.num_decodes
        for b in range(ctx.num_decodes, len(ctx.query_lens_host)):
            queries, context = int(ctx.query_lens_host[b]), int(ctx.context_lens_host[b])
            pages = tables[b, : -(-context // page)]
            first, slots = -1, None
            if (np.diff(pages) == 1).all():
                first = int(pages[0]) * page
            else:
                offsets = np.arange(page)
                flat = (pages[:, None].astype(np.int64) * page + offsets).reshape(-1)[:context]
                slots = torch.from_numpy(flat).to(ctx.positions.device)
            mask = None
            if 1 < queries < context:
                columns = torch.arange(context, device=ctx.positions.device)
                mask = columns <= ctx.positions[start : start + queries, None]
            segments.append(_Segment(start, queries, context, first, slots, mask))
            start += queries
        ctx.shared["torch attention"] = segments

    def attend(self, ctx: ForwardContext, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `kllm.attention.base.AttentionBackend.attend`."""
        pages = ctx.pool.pages(STATE, layer)
        flat = pages.view(-1, *pages.shape[2:])  # [P * page, 2 K, D]
        stored = ctx.pool.pack(STATE, torch.cat((k, v), dim=1))  # [T, 2 K, D]
        flat.index_copy_(0, ctx.entry_slots(1), stored)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        n = ctx.num_decodes
        if n:
            attend_decodes(ctx, STATE, layer, q[:n], out[:n])
        for s in ctx.shared["torch attention"]:
            own = slice(s.start, s.start + s.queries)
            # Also of whole prompts what later steps will read, rounded alike: results do not
            # depend on the chunk size.
            if s.queries == s.context:
                cached = stored[own]
            elif s.slots is None:
                cached = flat[s.first_slot : s.first_slot + s.context]
            else:
                cached = flat.index_select(0, s.slots)
            key, value = ctx.pool.unpack(STATE, cached).transpose(0, 1).chunk(2)  # [K, S, D]
            o = F.scaled_dot_product_attention(
                q[own].transpose(0, 1).unsqueeze(0),
                key.unsqueeze(0),
                value.unsqueeze(0),
                attn_mask=s.mask,
                is_causal=s.queries == s.context and s.queries > 1,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            out[own] = o.squeeze(0).transpose(0, 1)
        return out
