"""Turning the rows of tokens into compressed entries (DeepSeek-V4, CSA and HCA).

Entry j of ratio m summarises the tokens [j m, (j + 1) m); with overlap also those of the
group before. It is made when its last token arrives, from rows of this step and rows kept in
a ring, and is visible to a query at t iff j < (t + 1) // m. Since the ring is addressed by
position and an entry is rewritten whenever its last token is, taking tokens back needs no undo.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kllm import kernels
from kllm.attention.chunks import Chunk, chunks
from kllm.attention.context import ForwardContext, once_a_step
from kllm.attention.ring_buffers import (
    Tails,
    gather_tails,
    read_older,
    window_slots,
    write_ring,
)


@dataclass(frozen=True, slots=True)
class Compression:
    """One kind of compressed state."""

    state: str  # paged state of the entries
    tail: str  # ring state of the rows, [K | gates]
    ratio: int  # tokens an entry
    overlap: bool  # whether an entry also reads the group before, in channels of its own

    @property
    def span(self) -> int:
        """Rows an entry is made of."""
        return self.ratio * (2 if self.overlap else 1)


@dataclass(frozen=True, slots=True)
class FinishedGroups:
    """The groups of one ratio that end in this step: G of decodes, then of chunks."""

    decodes: Tensor | slice  # which decodes
    spans: tuple[tuple[Chunk, int, int], ...]  # chunk, first group, one past the last
    slots: Tensor  # [G] int64 entry slots
    positions: Tensor  # [G] int64, first token of each group


@once_a_step
def finished_groups(ctx: ForwardContext, ratio: int) -> FinishedGroups:
    """The step's groups of `ratio`.

    On a GPU every decode counts as ending a group: knowing better would need a
    synchronisation. Its entry is written where the unfinished group's will be, invisible until
    the last token overwrites it.
    """
    device = ctx.positions.device
    positions = ctx.positions[: ctx.num_decodes]
    decodes: Tensor | slice = slice(None)
    if device.type == "cpu":
        decodes = ((positions + 1) % ratio == 0).nonzero().squeeze(1)
    slots = [ctx.entry_slots(ratio)[: ctx.num_decodes][decodes]]
    starts = [positions[decodes] // ratio * ratio]
    spans = []
    for chunk in chunks(ctx):
        first, last = chunk.start // ratio, chunk.end // ratio
        if first < last:
            spans.append((chunk, first, last))
            place = _place(ctx, chunk, first * ratio) // ratio
            slots.append(request_slots(ctx, chunk.request, place, place + last - first, ratio))
            starts.append(torch.arange(first, last, device=device) * ratio)
    return FinishedGroups(decodes, tuple(spans), torch.cat(slots), torch.cat(starts))


def _place(ctx: ForwardContext, chunk: Chunk, position: int) -> int:
    """Where this rank keeps a position of a chunk in the request's pages."""
    if ctx.sequence is None:
        return position
    step = ctx.sequence.step
    return int(step.places(step.pieces[chunk.piece], np.array([position]))[0])


def request_slots(ctx: ForwardContext, request: int, first: int, last: int, ratio: int) -> Tensor:
    """[last - first] int64: slots of one request's entries of `ratio`, by place in its pages."""
    per_page = ctx.pool.page_size // ratio
    entries = torch.arange(first, last, device=ctx.positions.device)
    pages = ctx.block_tables[request, entries // per_page].long()
    return pages * per_page + entries % per_page


def pool_step(ctx: ForwardContext, layer: int, kind: Compression, rows: Tensor) -> Tensor:
    """Store the step's rows in the ring and pool the groups that end.

    Args:
        rows: [T, 2 C D] float32, values then gates (position bias added); C = 2 with overlap:
            channels for the next group's entry, then for the own group's.

    Returns:
        [G, D] float32, one row for each of `finished_groups`.
    """
    groups = finished_groups(ctx, kind.ratio)
    # Chunks first: they need ring rows that their own newest rows are about to replace.
    tails = gather_tails(ctx, kind.tail, layer, rows, kind.overlap * kind.ratio)
    parts = [_pool_chunk(ctx, layer, kind, rows, tails, *span) for span in groups.spans]
    write_ring(ctx, kind.tail, layer, rows, tails)
    return torch.cat([_pool_decodes(ctx, layer, kind, groups.decodes), *parts])


def _pool_decodes(
    ctx: ForwardContext, layer: int, kind: Compression, decodes: Tensor | slice
) -> Tensor:
    length = ctx.pool.rings(kind.tail, layer).shape[1]
    slots = window_slots(ctx, length, kind.span)[decodes]  # [G, span]
    values, gates = ctx.pool.read(kind.tail, layer, slots.clamp_min(0)).chunk(2, dim=2)
    gates = gates.masked_fill((slots < 0).unsqueeze(2), float("-inf"))
    if kind.overlap:
        values = _join(values[:, : kind.ratio], values[:, kind.ratio :])
        gates = _join(gates[:, : kind.ratio], gates[:, kind.ratio :])
    return kernels.pool_rows(values, gates)


def _pool_chunk(
    ctx: ForwardContext,
    layer: int,
    kind: Compression,
    rows: Tensor,
    tails: Tails | None,
    chunk: Chunk,
    first: int,
    last: int,
) -> Tensor:
    ratio = kind.ratio
    begin = max(first - kind.overlap, 0) * ratio  # the oldest token needed
    span = rows[chunk.rows][max(begin - chunk.start, 0) : last * ratio - chunk.start]
    if begin < chunk.start:
        older = read_older(ctx, kind.tail, layer, chunk, begin, tails)
        span = torch.cat((older, span))
    values, gates = span.view(-1, ratio, span.shape[1]).chunk(2, dim=2)
    if kind.overlap:
        if first == 0:  # nothing comes before the first group
            values = torch.cat((torch.zeros_like(values[:1]), values))
            gates = torch.cat((torch.full_like(gates[:1], float("-inf")), gates))
        values, gates = _join(values[:-1], values[1:]), _join(gates[:-1], gates[1:])
    return kernels.pool_rows(values, gates)


def _join(before: Tensor, own: Tensor) -> Tensor:
    """[G, m, 2 D] of the groups before and of the groups themselves -> [G, 2 m, D]."""
    dim = own.shape[2] // 2
    return torch.cat((before[:, :, :dim], own[:, :, dim:]), dim=1)
