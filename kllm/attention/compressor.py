"""Turning the rows of tokens into compressed entries (DeepSeek-V4, CSA and HCA).

Entry j of ratio m summarises the tokens [j m, (j + 1) m); with overlap also those of the
group before. It is made when its last token arrives, from rows of this step and rows kept in
a ring, and is visible to a query at t iff j < (t + 1) // m. Since the ring is addressed by
position and an entry is rewritten whenever its last token is, taking tokens back needs no undo.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kllm import kernels
from kllm.attention.chunks import Chunk, chunks
from kllm.attention.context import ForwardContext, all_to_device, once_a_step
from kllm.attention.ring_buffers import near_rows, read_near, window_slots, write_near


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
    slots: Tensor  # [G] int64 entry slots
    positions: Tensor  # [G] int64, first token of each group


@once_a_step
def finished_groups(ctx: ForwardContext, ratio: int) -> FinishedGroups:
    """The step's groups of `ratio`.

    On a GPU every decode counts as ending a group: knowing better would need a
    synchronisation. Its entry is written where the unfinished group's will be, invisible until
    the last token overwrites it.
    """
    device, count = ctx.positions.device, ctx.num_decodes
    decodes: Tensor | slice = slice(None)
    slots, starts = [], []
    if count:
        positions = ctx.positions[:count]
        if device.type == "cpu":
            decodes = ((positions + 1) % ratio == 0).nonzero().squeeze(1)
        slots.append(ctx.entry_slots(ratio)[:count][decodes])
        starts.append(positions[decodes] // ratio * ratio)
    if found := _ending(ctx, ratio):
        tokens = [np.arange(first, last) * ratio for _, first, last in found]
        places = [_places(ctx, run[0], own) for run, own in zip(found, tokens, strict=True)]
        requests = np.repeat([run.request for run, *_ in found], list(map(len, tokens)))
        arrays = np.concatenate(tokens), np.concatenate(places) // ratio, requests.astype(np.int64)
        start, place, request = all_to_device(arrays, device)
        per_page = ctx.pool.page_size // ratio
        pages = ctx.block_tables[request, place // per_page].long()
        slots.append(pages * per_page + place % per_page)
        starts.append(start)
    if not slots:
        none = torch.empty(0, dtype=torch.int64, device=device)
        return FinishedGroups(decodes, none, none)
    return FinishedGroups(decodes, torch.cat(slots), torch.cat(starts))


def _ending(ctx: ForwardContext, ratio: int) -> list[tuple[Chunk, int, int]]:
    """Chunks that end groups of `ratio`: chunk, first group, one past the last."""
    spans = [(chunk, chunk.start // ratio, chunk.end // ratio) for chunk in chunks(ctx)]
    return [span for span in spans if span[1] < span[2]]


def _places(ctx: ForwardContext, chunk: Chunk, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where this rank keeps tokens of a chunk in the request's pages."""
    if ctx.sequence is None:
        return tokens
    step = ctx.sequence.step
    return step.places(step.pieces[chunk.piece], tokens)


def pool_step(ctx: ForwardContext, layer: int, kind: Compression, rows: Tensor) -> Tensor:
    """Store the step's rows in the ring and pool the groups that end.

    Args:
        rows: [T, 2 C D] float32, values then gates (position bias added); C = 2 with overlap:
            channels for the next group's entry, then for the own group's.

    Returns:
        [G, D] float32, one row for each of `finished_groups`.
    """
    length = ctx.pool.rings(kind.tail, layer).shape[1]
    near = near_rows(ctx, length, kind.overlap * kind.ratio, kind.ratio)
    seen = read_near(ctx, near, kind.tail, layer, rows)
    write_near(ctx, near, kind.tail, layer, seen)
    parts = []
    if ctx.num_decodes:
        parts.append(_pool_decodes(ctx, layer, kind, finished_groups(ctx, kind.ratio).decodes))
    if _ending(ctx, kind.ratio):
        parts.append(_pool_chunks(group_lists(ctx, length, kind.ratio, kind.overlap), seen))
    if not parts:
        return rows.new_empty(0, rows.shape[1] // (2 * (1 + kind.overlap)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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


@dataclass(frozen=True, slots=True)
class GroupLists:
    """What the groups that a step's chunks end are made of: G of C * ratio rows each."""

    parts: int  # 2 C, of which a row of values and gates consists: [D] each
    rows: Tensor  # [2 * G * C * ratio] int64, near row * 2 C + part: values, then gates
    shape: tuple[int, int, int]  # (2, G, C * ratio)
    absent: Tensor | None  # [G, C * ratio, 1] bool rows before the first token; None: none


@once_a_step
def group_lists(ctx: ForwardContext, length: int, ratio: int, overlap: bool) -> GroupLists:
    """The rows of all groups that chunks end, read with one gather.

    Kept for the step: 16 C bytes a token of the chunks.

    Args:
        length: rows a ring of the state.
    """
    near = near_rows(ctx, length, overlap * ratio, ratio)
    lists, absent, channels = [], [], 1 + overlap
    for chunk, begin, places in zip(chunks(ctx), near.begins, near.places, strict=True):
        first, last = chunk.start // ratio, chunk.end // ratio
        tokens = np.arange((first - overlap) * ratio, last * ratio).reshape(-1, ratio)
        if first < last:
            at = places[np.maximum(tokens - begin, 0)]  # what is absent may be any row
            lists.append(np.hstack([at[c : c + last - first] for c in range(channels)]))
            early = tokens < 0
            absent.append(np.hstack([early[c : c + last - first] for c in range(channels)]))
    rows, hidden = np.concatenate(lists), np.concatenate(absent)  # [G, C ratio]
    part = np.repeat(np.arange(channels), ratio)
    rows = rows * 2 * channels + part + channels * np.arange(2).reshape(2, 1, 1)
    there, unseen = all_to_device([rows.reshape(-1), hidden], ctx.positions.device)
    return GroupLists(
        2 * channels, there, rows.shape, unseen.unsqueeze(2) if hidden.any() else None
    )


def _pool_chunks(lists: GroupLists, seen: Tensor) -> Tensor:
    parts = seen.view(len(seen) * lists.parts, -1).index_select(0, lists.rows)
    values, gates = parts.view(*lists.shape, -1)
    if lists.absent is not None:
        gates.masked_fill_(lists.absent, float("-inf"))
    return kernels.pool_rows(values, gates)


def _join(before: Tensor, own: Tensor) -> Tensor:
    """[G, m, 2 D] of the groups before and of the groups themselves -> [G, 2 m, D]."""
    dim = own.shape[2] // 2
    return torch.cat((before[:, :, :dim], own[:, :, dim:]), dim=1)
