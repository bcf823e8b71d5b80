"""All-gather context parallelism: each rank keeps all entries of the prompts, at their positions.

Every layer's new entries are exchanged once, as they are stored. A stretch of a piece then
attends like any chunk, because all that it sees lies in the pages of its request.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kllm.attention.context import ForwardContext, SequenceContext, to_device


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
    """Store the step's new entries of a paged state, with all-gather those of all ranks.

    Called on all ranks of a context-parallel group.

    Args:
        slots: [n] int64 of `entries`.
        entries: [n, heads, channels], first those of decodes, then of chunks in their order.
        ratio: tokens an entry; a chunk makes the entries whose last token is its own.
    """
    stored = ctx.pool.pack(name, entries)
    if ctx.sequence is not None and not ctx.sequence.step.ring:
        exchange = _find_exchange(ctx, ctx.sequence, ratio)
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


def _find_exchange(ctx: ForwardContext, sequence: SequenceContext, ratio: int) -> _Exchange:
    key = f"exchange {ratio}"
    if key not in ctx.shared:
        step, per_page = sequence.step, ctx.pool.page_size // ratio
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
        slots = sequence.block_tables[which, flat // per_page].long() * per_page + flat % per_page
        own = counts[step.rank]
        ctx.shared[key] = _Exchange(own, most, to_device(order, device), slots)
    found: _Exchange = ctx.shared[key]
    return found
