"""Full keys and values (GQA, MHA) of prompts that context-parallel ranks share.

Replicated prompts: the new keys and values of all ranks are stored first, and then the model's
backend attends to each run of a chunk as to any chunk. Sharded ones: the backend has the decodes
only, and keys and values travel (`kllm.attention.ring`) or are gathered.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kllm import kernels
from kllm.attention.base import AttentionBackend
from kllm.attention.context import ForwardContext, once_a_step
from kllm.attention.gathered import gather_prompts, gathers, store_entries
from kllm.attention.ring import (
    causal_span,
    find_shards,
    sharded_context,
    travelling,
    unpack_part,
)
from kllm.kernels import SoftmaxState

STATE = "kv"


@once_a_step
def decodes_alone(ctx: ForwardContext) -> ForwardContext | None:
    """The step without its prompts; None if that leaves nothing."""
    n = ctx.num_decodes
    if not n:
        return None
    return replace(
        ctx,
        query_lens_host=ctx.query_lens_host[:n],
        context_lens_host=ctx.context_lens_host[:n],
        token_ids=ctx.token_ids[:n],
        positions=ctx.positions[:n],
        request_index=ctx.request_index[:n],
        cu_seqlens=ctx.cu_seqlens[: n + 1],
        context_lens=ctx.context_lens[:n],
        block_tables=ctx.block_tables[:n],
        rows=ctx.rows[:n],
        places=ctx.places[:n],
        sequence=None,
        shared={},
    )


class SequenceAttention:
    """An attention backend whose prompts may be spread over the ranks of a group.

    Steps without such prompts are those of `backend`, as are the decodes of any step.
    """

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend

    def prepare(self, ctx: ForwardContext) -> None:
        """See `kllm.attention.base.AttentionBackend.prepare`."""
        alone = decodes_alone(ctx) if sharded_context(ctx) else ctx
        if alone is not None:
            self.backend.prepare(alone)

    def attend(self, ctx: ForwardContext, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `kllm.attention.base.AttentionBackend.attend`."""
        if ctx.sequence is None:
            return self.backend.attend(ctx, layer, q, k, v)
        store_entries(ctx, STATE, layer, ctx.entry_slots(1), torch.cat((k, v), dim=1))
        if not ctx.sequence.step.sharded:
            return self.backend.attend(ctx, layer, q, k, v)
        n = ctx.num_decodes
        out = torch.empty_like(q)
        alone = decodes_alone(ctx)
        if alone is not None:
            out[:n] = self.backend.attend(alone, layer, q[:n], k[:n], v[:n])
        attend = attend_gathered_kv if gathers(ctx) else attend_travelling_kv
        attend(ctx, layer, q, out)
        return out


def attend_travelling_kv(ctx: ForwardContext, layer: int, q: Tensor, out: Tensor) -> None:
    """Attention of the step's prompts while keys and values travel; fills their rows of `out`.

    Args:
        q, out: [T, H, D]; the softmax scale is D^-0.5.
    """
    shards = find_shards(ctx, 1)
    states = [
        SoftmaxState.empty(piece.rows.stop - piece.rows.start, q.shape[1], q.shape[2], q.device)
        for piece in shards.pieces
    ]
    for source, block in travelling(ctx, STATE, layer, shards):
        for piece, state in zip(shards.pieces, states, strict=True):
            spans = piece.spans[source]
            if spans:
                stored = block[piece.parts[source]]
                key, value = unpack_part(ctx.pool, STATE, stored).chunk(2, dim=1)
                kernels.block_attention(state, q[piece.rows], key, value, spans, q.shape[2] ** -0.5)
    for piece, state in zip(shards.pieces, states, strict=True):
        if piece.runs:
            out[piece.rows] = kernels.finish_softmax(state, out.dtype)


def attend_gathered_kv(ctx: ForwardContext, layer: int, q: Tensor, out: Tensor) -> None:
    """The same with the keys and values of whole prompts, gathered from all ranks."""
    prompts = gather_prompts(ctx, STATE, layer)
    for piece, entries in zip(find_shards(ctx, 1).pieces, prompts, strict=True):
        if piece.runs:
            rows = piece.rows.stop - piece.rows.start
            state = SoftmaxState.empty(rows, q.shape[1], q.shape[2], q.device)
            spans = [causal_span(run, piece.rows.start) for run in piece.runs]
            key, value = entries.chunk(2, dim=1)
            kernels.block_attention(state, q[piece.rows], key, value, spans, q.shape[2] ** -0.5)
            out[piece.rows] = kernels.finish_softmax(state, out.dtype)
