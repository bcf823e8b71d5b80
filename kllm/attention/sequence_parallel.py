"""Context-parallel prefill: new entries shared by all-gather, full keys and values over a ring.

All-gather: every rank keeps all entries of a prompt. What a layer adds is gathered and written
before attention, and then each run of a chunk is a chunk like any other. Ring: see
`kllm.attention.ring`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kllm import kernels
from kllm.attention.base import AttentionBackend
from kllm.attention.context import ForwardContext, SequenceContext
from kllm.attention.ring import find_shards, ring_context, travelling, unpack_part
from kllm.cache.shards import held_entries, page_slots
from kllm.kernels import SoftmaxState

STATE = "kv"
DECODES = "decodes alone"  # in a step's shared values


def share_entries(ctx: ForwardContext, name: str, layer: int, entries: Tensor, ratio: int) -> None:
    """Write the step's new entries of prompts of all ranks; nothing to do in ring mode.

    Called on all ranks of the group, also on those that made none.

    Args:
        entries: [n, heads, channels] that this rank made, in the order of its chunks.
        ratio: tokens an entry.
    """
    if ctx.sequence is None or ctx.sequence.step.ring:
        return
    comm = ctx.sequence.comm
    slots = _new_slots(ctx, ctx.sequence, ratio)
    longest = max(len(part) for part in slots)
    if not longest:
        return
    stored = ctx.pool.pack(name, entries)
    if len(stored) < longest:
        padding = stored.new_zeros(longest - len(stored), *stored.shape[1:])
        stored = torch.cat((stored, padding))
    received = stored.new_empty(comm.size * longest, *stored.shape[1:])
    comm.all_gather(received, stored).wait()
    pages = ctx.pool.pages(name, layer)
    flat = pages.view(-1, *pages.shape[2:])
    for rank, part in enumerate(slots):
        if len(part):
            flat.index_copy_(0, part, received[rank * longest : rank * longest + len(part)])


def _new_slots(ctx: ForwardContext, sequence: SequenceContext, ratio: int) -> list[Tensor]:
    """Of each rank, the slots int64 of the entries that it makes in this step, in its order."""
    key = f"new slots {ratio}"
    if key not in ctx.shared:
        step, device = sequence.step, ctx.positions.device
        stripes, per_page = step.stripes.scaled(ratio), ctx.pool.page_size // ratio
        found = []
        for rank in range(stripes.ranks):
            parts = []
            for piece, table in zip(step.pieces, sequence.block_tables, strict=True):
                first = stripes.count(rank, piece.start // ratio)
                last = stripes.count(rank, piece.end // ratio)
                ids = held_entries(stripes, rank, first, last, device)
                parts.append(page_slots(table, ids, per_page))
            found.append(torch.cat(parts))
        ctx.shared[key] = found
    result: list[Tensor] = ctx.shared[key]
    return result


def decodes_alone(ctx: ForwardContext) -> ForwardContext | None:
    """The step without its prompts, made once; None if that leaves nothing."""
    n = ctx.num_decodes
    if n and DECODES not in ctx.shared:
        ctx.shared[DECODES] = replace(
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
    found: ForwardContext | None = ctx.shared.get(DECODES)
    return found


class SequenceAttention:
    """An attention backend whose prompts may be spread over the ranks of a group.

    Steps without such prompts are those of `backend`, as are the decodes of any step.
    """

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend

    def prepare(self, ctx: ForwardContext) -> None:
        """See `kllm.attention.base.AttentionBackend.prepare`."""
        alone = decodes_alone(ctx) if ring_context(ctx) else ctx
        if alone is not None:
            self.backend.prepare(alone)

    def attend(self, ctx: ForwardContext, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `kllm.attention.base.AttentionBackend.attend`."""
        if ctx.sequence is None:
            return self.backend.attend(ctx, layer, q, k, v)
        n = ctx.num_decodes
        entries = torch.cat((k[n:], v[n:]), dim=1)
        if not ctx.sequence.step.ring:
            share_entries(ctx, STATE, layer, entries, 1)
            return self.backend.attend(ctx, layer, q, k, v)
        ctx.pool.write(STATE, layer, ctx.entry_slots()[n:], entries)
        out = torch.empty_like(q)
        alone = decodes_alone(ctx)
        if alone is not None:
            out[:n] = self.backend.attend(alone, layer, q[:n], k[:n], v[:n])
        attend_travelling(ctx, layer, q, out)
        return out


def attend_travelling(ctx: ForwardContext, layer: int, q: Tensor, out: Tensor) -> None:
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
            spans = shards.spans(piece, source)
            if spans:
                stored = block[piece.parts[source]]
                key, value = unpack_part(ctx.pool, STATE, stored).chunk(2, dim=1)
                kernels.block_attention(state, q[piece.rows], key, value, spans, q.shape[2] ** -0.5)
    for piece, state in zip(shards.pieces, states, strict=True):
        if piece.runs:
            out[piece.rows] = kernels.finish_softmax(state, out.dtype)
