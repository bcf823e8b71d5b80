"""Context parallelism that gathers: entries of all ranks come at once, and then a rank attends.

Replicated prompts: each rank keeps all entries, at their positions; a layer's new ones are
exchanged once, as they are stored, and a stretch of a piece attends like any chunk, because all
that it sees lies in the pages of its request. All-gather: each rank keeps those of its stripes,
and every layer gathers the entries of the whole prompt, cached ones too, for as long as it needs
them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kllm.attention.context import ForwardContext, once_a_step, to_device
from kllm.attention.ring import find_shards, unpack_part


@dataclass(frozen=True, slots=True)
class _Exchange:
    """The prompts' new entries of one ratio, of all ranks: N of them."""

    own: int  # how many this rank made
    most: int  # how many the rank made that made most
    order: Tensor  # [N] int64, where they stand among the [ranks * most] received ones
    slots: Tensor  # [N] int64, where this rank keeps them


def store_entries(
    ctx: ForwardContext, name: str, layer: int, slots: Tensor, entries: Tensor, ratio: int = 1
) -> None:
    """Store the step's new entries of a paged state; of replicated prompts those of all ranks.

    Called on all ranks of a context-parallel group.

    Args:
        slots: [n] int64 of `entries`.
        entries: [n, heads, channels], first those of decodes, then of chunks in their order.
        ratio: tokens an entry; a chunk makes the entries whose last token is its own.
    """
    stored = ctx.pool.pack(name, entries)
    if ctx.sequence is not None and not ctx.sequence.step.sharded:
        exchange = _find_exchange(ctx, ratio)
        if exchange.most:
            decodes = len(stored) - exchange.own
            sent = stored.new_empty(exchange.most, *stored.shape[1:])
            sent[: exchange.own] = stored[decodes:]
            received = sent.new_empty(ctx.sequence.comm.size * len(sent), *sent.shape[1:])
            ctx.sequence.comm.all_gather(received, sent).wait()
            stored = torch.cat((stored[:decodes], received[exchange.order]))
            slots = torch.cat((slots[:decodes], exchange.slots))
    pages = ctx.pool.pages(name, layer)
    pages.view(-1, *pages.shape[2:]).index_copy_(0, slots, stored)


@once_a_step
def _find_exchange(ctx: ForwardContext, ratio: int) -> _Exchange:
    assert ctx.sequence is not None
    step, tables = ctx.sequence.step, ctx.sequence.block_tables
    per_page = ctx.pool.page_size // ratio
    entries, pieces = [], []
    counts = [0] * step.stripes.ranks
    for rank in range(step.stripes.ranks):
        for i, piece in enumerate(step.pieces):
            for start, end in step.stripes.runs(rank, piece.start, piece.end):
                made = np.arange(start // ratio, end // ratio)
                entries.append(made)
                pieces.append(np.full(len(made), i))
                counts[rank] += len(made)
    most = max(counts)
    order = np.concatenate([rank * most + np.arange(n) for rank, n in enumerate(counts)])
    device = ctx.positions.device
    flat, which = (to_device(np.concatenate(x), device) for x in (entries, pieces))
    slots = tables[which, flat // per_page].long() * per_page + flat % per_page
    own = counts[step.rank]
    return _Exchange(own, most, to_device(order, device), slots)


def gathers(ctx: ForwardContext) -> bool:
    """Whether the step has prompts whose entries are gathered layer by layer."""
    return ctx.sequence is not None and ctx.sequence.step.kind == "all_gather"


def gather_prompts(ctx: ForwardContext, name: str, layer: int, ratio: int = 1) -> list[Tensor]:
    """All entries of each piece's request so far, [n, heads, channels] in order of position.

    Called on all ranks of the group, also on those without a stretch of the piece; the step's own
    entries must be in their pages already.

    Args:
        ratio: tokens an entry of the state.
    """
    assert ctx.sequence is not None
    comm, shards = ctx.sequence.comm, find_shards(ctx, ratio)
    pages = ctx.pool.pages(name, layer)
    own = pages.view(-1, *pages.shape[2:]).index_select(0, shards.slots)
    received = own.new_empty(comm.size * len(own), *own.shape[1:])
    if len(own):  # else no rank has an entry yet
        comm.all_gather(received, own).wait()
    order = _order(ctx, ratio, len(own), received.device)
    entries = unpack_part(ctx.pool, name, received.index_select(0, order))
    return list(torch.split(entries, [piece.end // ratio for piece in shards.pieces]))


@once_a_step
def _order(ctx: ForwardContext, ratio: int, block: int, device: torch.device) -> Tensor:
    """[N] int64: where all pieces' entries stand among the ranks' blocks of `block` each.

    Kept for the step: 8 bytes an entry, once for all layers.
    """
    shards = find_shards(ctx, ratio)
    stripes, starts = shards.entries, []
    for piece in shards.pieces:
        first = np.arange(0, piece.end // ratio, stripes.tokens)  # of each stripe
        ranks = stripes.rank_of(first)
        parts = np.array([rank * block + part.start for rank, part in enumerate(piece.parts)])
        starts.append(parts[ranks] + stripes.local(first))
    # The entries of a stripe stand side by side on the rank that holds it.
    within = torch.arange(stripes.tokens, device=device)
    places = to_device(np.concatenate(starts), device).unsqueeze(1) + within
    counts, filled = [piece.end // ratio for piece in shards.pieces], 0
    found = []
    for count, own in zip(counts, starts, strict=True):
        found.append(places[filled : filled + len(own)].flatten()[:count])
        filled += len(own)
    return torch.cat(found)
