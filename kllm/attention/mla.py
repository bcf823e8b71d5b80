"""Multi-head latent attention, over all cached entries or over selected ones (MLA, DSA).

A cached entry is one token's latent, of which the keys and values of all heads are projections,
and one rotary key that all heads share. Attention has two forms with equal results:

* absorbed: the key projection is applied to the query and the value projection to the output,
  so that all heads attend to the entries as they lie (one multi-query attention);
* expanded: keys and values of every head are made from the entries.

Requests that run one token (decodes) are always absorbed, as tensors whose shapes depend on the
batch only, so that a CUDA graph can hold them. Longer ones (chunks) go one by one, in the form
that costs less, in blocks that bound the work space. Prompts that context-parallel ranks share
are chunks too, unless they run as a ring (`kllm.attention.mla_ring`).

Sources: DeepSeek-V2 (MLA), DeepSeek-V3.2 (DSA); layers that reuse the selection of another
layer: GLM-5.2 model card.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kllm.attention.chunks import Chunk, chunks, prompts
from kllm.attention.compressor import request_slots
from kllm.attention.context import ForwardContext, once_a_step
from kllm.attention.gathered import gather_prompts, gathers, store_entries
from kllm.attention.indexing import (
    SCORE_BYTES,
    IndexQuery,
    best_entries,
    best_slots,
    stored_keys,
    visible_slots,
)
from kllm.attention.latent import LatentHeads, LatentSoftmax, expanding_pays
from kllm.attention.mla_ring import attend_travelling_latents
from kllm.attention.ring import causal_span, find_shards, ring_context, sharded_context
from kllm.attention.ring_selection import select_travelling
from kllm.attention.workspace import row_blocks

LATENT = "latent"  # paged state: latent, then rotary key
INDEX_KEY = "index_key"  # paged state of the indexer


@dataclass(frozen=True, slots=True)
class Selection:
    """The entries that each token of a step attends to; None stands for all it can see."""

    topk: int
    decodes: Tensor | None  # [decodes, topk] int64 slots; -1: no entry
    chunks: tuple[Tensor | None, ...]  # of each chunk [rows, topk] int32 positions; -1: none

    def tensors(self) -> list[Tensor]:
        """What another rank needs to have the same selection; see `selection_shapes`."""
        return [part for part in (self.decodes, *self.chunks) if part is not None]

    @classmethod
    def received(cls, ctx: ForwardContext, topk: int, tensors: Sequence[Tensor]) -> "Selection":
        """The selection of the same step whose `tensors` these are."""
        parts = iter(tensors)
        decodes = next(parts) if _decodes_select(ctx, topk) else None
        return cls(topk, decodes, tuple(next(parts) if c.end > topk else None for c in chunks(ctx)))


def must_select(ctx: ForwardContext, topk: int) -> bool:
    """Whether any token may see more than `topk` entries, on any rank of sharded prompts."""
    return _shards_select(ctx, topk) or bool((ctx.context_lens_host > topk).any())


def _shards_select(ctx: ForwardContext, topk: int) -> bool:
    """Whether a token of sharded prompts sees more than `topk` entries: the same on all ranks."""
    sequence = sharded_context(ctx)
    return sequence is not None and any(piece.end > topk for piece in sequence.step.pieces)


def select(ctx: ForwardContext, layer: int, index: IndexQuery) -> Selection:
    """The entries that the indexer scores best; the step's index keys must be stored already."""
    decodes = None
    if _decodes_select(ctx, index.topk):
        decodes = best_slots(ctx, layer, _decode_slots(ctx), index)
    if ring_context(ctx):
        return Selection(index.topk, decodes, _select_travelling(ctx, layer, index))
    parts: list[Tensor | None] = []
    gathered = None
    # A rank may be here for its decodes alone: what is exchanged rests on what all ranks know.
    if gathers(ctx) and _shards_select(ctx, index.topk):
        gathered = gather_prompts(ctx, index.state, layer)
    for runs in prompts(ctx):
        if runs[-1].end <= index.topk:
            parts += [None] * len(runs)
            continue
        keys = _entries(ctx, index.state, layer, runs[-1], gathered)
        parts += [_select_chunk(run, index, keys[: run.end]) for run in runs]
    return Selection(index.topk, decodes, tuple(parts))


def _select_travelling(
    ctx: ForwardContext, layer: int, index: IndexQuery
) -> tuple[Tensor | None, ...]:
    """What each chunk selects where a prompt's index keys lie on several ranks."""
    shards, parts = find_shards(ctx, 1), []
    for piece, ids in zip(shards.pieces, select_travelling(ctx, layer, shards, index), strict=True):
        for run in piece.runs:
            first = run.rows.start - piece.rows.start
            own = None if ids is None else ids[first : first + run.end - run.start]
            parts.append(own if run.end > index.topk else None)
    return tuple(parts)


def select_all(ctx: ForwardContext, topk: int) -> Selection:
    """What `select` answers where no token sees more than `topk` entries."""
    return Selection(topk, None, (None,) * len(chunks(ctx)))


def select_newest(ctx: ForwardContext, topk: int) -> Selection:
    """The newest entries instead of the best ones: what needs no index keys."""
    back = torch.arange(topk, device=ctx.positions.device)
    decodes = None
    if _decodes_select(ctx, topk):
        places = ctx.positions[: ctx.num_decodes].unsqueeze(1) - back
        seen, page = places.clamp_min(0), ctx.pool.page_size
        pages = ctx.block_tables[: ctx.num_decodes].gather(1, seen // page).long()
        decodes = (pages * page + seen % page).masked_fill(places < 0, -1)
    parts = []
    for chunk in chunks(ctx):
        places = _places(chunk, slice(0, chunk.end - chunk.start), back.device) - back
        parts.append(places.clamp_min(-1).int() if chunk.end > topk else None)
    return Selection(topk, decodes, tuple(parts))


def selection_shapes(ctx: ForwardContext, topk: int) -> list[tuple[tuple[int, int], torch.dtype]]:
    """Shapes and dtypes of `Selection.tensors` of the step, known on the host."""
    decodes = _decodes_select(ctx, topk)
    found = [((ctx.num_decodes, topk), torch.int64)] if decodes else []
    found += [((c.end - c.start, topk), torch.int32) for c in chunks(ctx) if c.end > topk]
    return found


def _decodes_select(ctx: ForwardContext, topk: int) -> bool:
    """Whether any decode sees more than `topk` entries."""
    return bool((ctx.context_lens_host[: ctx.num_decodes] > topk).any())


def attend(
    ctx: ForwardContext,
    layer: int,
    q: Tensor,
    entries: Tensor,
    heads: LatentHeads,
    selection: Selection | None,
) -> Tensor:
    """Store the step's entries, then attend causally.

    Args:
        q: [T, H, N + rope], rotated.
        entries: [T, R + rope], normed and rotated.
        selection: where attention is sparse; None: every token sees all before it.

    Returns:
        [T, H, V].
    """
    store_entries(ctx, LATENT, layer, ctx.entry_slots(1), entries.unsqueeze(1))
    out = q.new_empty(*q.shape[:2], heads.values.shape[1])
    if ctx.num_decodes:
        count = slice(0, ctx.num_decodes)
        slots = selection.decodes if selection else None
        out[count] = _attend_decodes(ctx, layer, q[count], heads, slots)
    selected = selection.chunks if selection else (None,) * len(chunks(ctx))
    if ring_context(ctx):
        attend_travelling_latents(ctx, layer, LATENT, q, heads, selected, out)
        return out
    chosen = {run.request: ids for run, ids in zip(chunks(ctx), selected, strict=True)}
    gathered = gather_prompts(ctx, LATENT, layer) if gathers(ctx) else None
    for runs in prompts(ctx):
        stored = _entries(ctx, LATENT, layer, runs[-1], gathered)
        _attend_runs(q, stored, heads, runs, chosen, out)
    return out


def _attend_runs(
    q: Tensor,
    stored: Tensor,
    heads: LatentHeads,
    runs: list[Chunk],
    chosen: dict[int, Tensor | None],
    out: Tensor,
) -> None:
    """Attention of stretches of one prompt to its entries `stored`; fills their rows of `out`.

    `chosen` says what each request of the step selects; None: all. Those that see all of the
    prompt come first, and keys and values are made once for all of them.
    """
    dense = [run for run in runs if chosen[run.request] is None]
    if dense and (q.is_cuda or len(dense) > 1):
        first, end = dense[0].rows.start, dense[-1].end
        rows = slice(first, dense[-1].rows.stop)
        softmax = LatentSoftmax(heads, q[rows], expanding_pays(heads, dense, end))
        softmax.add(stored[:end], [causal_span(run, first) for run in dense])
        out[rows] = softmax.finish()
        runs = runs[len(dense) :]
    for run in runs:
        ids = chosen[run.request]
        topk = None if ids is None else ids.shape[1]
        form = _expanded if expanding_pays(heads, [run], run.end, topk) else _absorbed
        out[run.rows] = form(q[run.rows], stored[: run.end], heads, run, ids)


@once_a_step
def _decode_slots(ctx: ForwardContext) -> Tensor:
    """[decodes, longest context] int64 slots; -1: not visible."""
    longest = int(ctx.context_lens_host[: ctx.num_decodes].max())
    return visible_slots(ctx, 1)[:, :longest].contiguous()


@once_a_step
def _context_slots(ctx: ForwardContext, request: int, end: int) -> Tensor:
    """[end] int64 slots of a request's entries up to a position."""
    return request_slots(ctx, request, 0, end, 1)


def _entries(
    ctx: ForwardContext, name: str, layer: int, last: Chunk, gathered: list[Tensor] | None
) -> Tensor:
    """[context, channels]: all entries that the last chunk of a request sees."""
    if gathered is None or last.piece < 0:
        return _read(ctx, name, layer, last)
    return gathered[last.piece].squeeze(1)


def _read(ctx: ForwardContext, name: str, layer: int, chunk: Chunk) -> Tensor:
    """[context, channels]: all entries of a chunk's request, its own included."""
    slots = _context_slots(ctx, chunk.request, chunk.end)
    # Packed entries pass through float32 when they are unpacked: in blocks, to bound that.
    parts = row_blocks(len(slots), 8 * ctx.pool.pages(name, layer).shape[-1])
    if ctx.pool.kv_dtype != "fp8" or len(parts) == 1:
        return ctx.pool.read(name, layer, slots).squeeze(1)
    return torch.cat([ctx.pool.read(name, layer, slots[rows]).squeeze(1) for rows in parts])


def _select_chunk(chunk: Chunk, index: IndexQuery, keys: Tensor) -> Tensor | None:
    """[rows, topk] int32 positions that a chunk selects, given the index keys of all it sees."""
    if chunk.end <= index.topk:
        return None
    count = chunk.end - chunk.start
    chosen = torch.full((count, index.topk), -1, dtype=torch.int32, device=keys.device)
    for rows in row_blocks(count, SCORE_BYTES * chunk.end):
        seen = chunk.start + rows.stop
        own = slice(chunk.rows.start + rows.start, chunk.rows.start + rows.stop)
        visible = _places(chunk, rows, keys.device).squeeze(1).int() + 1
        best = best_entries(index, own, keys[:seen], visible)
        chosen[rows, : best.shape[1]] = best
    return chosen


def _attend_decodes(
    ctx: ForwardContext, layer: int, q: Tensor, heads: LatentHeads, slots: Tensor | None
) -> Tensor:
    slots = _decode_slots(ctx) if slots is None else slots
    row_bytes = 0  # entries are read where they lie,
    if ctx.pool.kv_dtype == "fp8":  # but packed ones are unpacked first
        row_bytes = 4 * slots.shape[1] * (heads.keys.shape[2] + heads.rope)
    out = q.new_empty(*q.shape[:2], heads.values.shape[1])
    for rows in row_blocks(len(q), row_bytes):
        out[rows] = heads.attend(q[rows], *stored_keys(ctx.pool, LATENT, layer, slots[rows]))
    return out


def _absorbed(
    q: Tensor, stored: Tensor, heads: LatentHeads, chunk: Chunk, chosen: Tensor | None
) -> Tensor:
    """A chunk's attention to entries as they are: q [n, H, N + rope] -> [n, H, V]."""
    out = q.new_empty(*q.shape[:2], heads.values.shape[1])
    widths = 2 * heads.keys.shape[2] + heads.rope  # absorbed query and weighted latent
    listing = 0 if chosen is not None else 8 * chunk.end
    for rows in row_blocks(len(q), 4 * q.shape[1] * widths + listing):
        if chosen is not None:
            idx = chosen[rows]
        else:
            every = torch.arange(chunk.start + rows.stop, device=q.device, dtype=torch.int32)
            idx = torch.where(every <= _places(chunk, rows, q.device), every, -1)
        out[rows] = heads.attend(q[rows], stored, idx)
    return out


def _expanded(
    q: Tensor, stored: Tensor, heads: LatentHeads, chunk: Chunk, chosen: Tensor | None
) -> Tensor:
    """A chunk's attention with keys and values made for some heads at a time."""
    plain, rank = heads.keys.shape[1:]
    value = heads.values.shape[1]
    latent, rotary = stored[:, :rank], stored[:, rank:]
    out = q.new_empty(*q.shape[:2], value)
    for own in row_blocks(q.shape[1], 8 * chunk.end * (2 * plain + heads.rope + value)):
        shared = rotary.expand(own.stop - own.start, -1, -1)
        key = torch.cat((latent @ heads.keys[own].transpose(1, 2), shared), dim=2)  # [h, S, D]
        values = latent @ heads.values[own].transpose(1, 2)  # [h, S, V]
        query = q[:, own].transpose(0, 1)
        for rows, mask in _masks(chunk, chosen, q.device):
            seen = chunk.start + rows.stop
            o = _sdpa(query[:, rows], key[:, :seen], values[:, :seen], heads.scale, mask)
            out[rows, own] = o.transpose(0, 1)
    return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """[h, n, D], [h, S, D], [h, S, V] -> [h, n, V]; causal from the first token without mask."""
    q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return o.squeeze(0)


def _masks(
    chunk: Chunk, chosen: Tensor | None, device: torch.device
) -> Iterator[tuple[slice, Tensor | None]]:
    """A chunk's rows with their masks: in one piece where a kernel needs no mask in memory."""
    count = chunk.end - chunk.start
    if chosen is None and chunk.start == 0:
        yield slice(0, count), None
    else:
        for rows in row_blocks(count, 16 * chunk.end):
            yield rows, _mask(chunk, rows, chosen, device)


def _mask(chunk: Chunk, rows: slice, chosen: Tensor | None, device: torch.device) -> Tensor:
    """[rows, entries up to the last row's own] bool: what each row attends to."""
    seen = chunk.start + rows.stop
    if chosen is None:
        return torch.arange(seen, device=device) <= _places(chunk, rows, device)
    idx = chosen[rows].long()
    mask = torch.zeros(len(idx), seen + 1, dtype=torch.bool, device=device)
    mask.scatter_(1, torch.where(idx < 0, seen, idx), True)  # one more column takes the absent
    return mask[:, :seen]


def _places(chunk: Chunk, rows: slice, device: torch.device) -> Tensor:
    """[rows, 1] int64 positions of some of a chunk's tokens."""
    first = chunk.start + rows.start
    return torch.arange(first, chunk.start + rows.stop, device=device).unsqueeze(1)
