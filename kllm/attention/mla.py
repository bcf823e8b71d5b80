"""Multi-head latent attention, over all cached entries or over selected ones (MLA, DSA).

A cached entry is one token's latent, of which the keys and values of all heads are projections,
and one rotary key that all heads share. Attention has two forms with equal results:

* absorbed: the key projection is applied to the query and the value projection to the output,
  so that all heads attend to the entries as they lie (one multi-query attention);
* expanded: keys and values of every head are made from the entries.

Requests that run one token (decodes) are always absorbed, as tensors whose shapes depend on the
batch only, so that a CUDA graph can hold them. Longer ones (chunks) go prompt by prompt, in the
form that costs less, in blocks that bound the work space. So do the stretches of a prompt that
context-parallel ranks share, unless they run as a ring (`kllm.attention.mla_ring`).

Sources: DeepSeek-V2 (MLA), DeepSeek-V3.2 (DSA); layers that reuse the selection of another
layer: GLM-5.2 model card.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kllm.attention.chunks import Chunk, prompts, rows_of, tokens_seen
from kllm.attention.context import ForwardContext, once_a_step
from kllm.attention.gathered import gather_prompts, gathers, store_entries
from kllm.attention.indexing import (
    SCORE_BYTES,
    IndexQuery,
    best_entries,
    best_slots,
    read_entries,
    request_slots,
    stored_keys,
    visible_entries,
    visible_slots,
)
from kllm.attention.latent import LatentHeads, LatentSoftmax, expanding_pays
from kllm.attention.mla_forms import absorbed, expanded
from kllm.attention.mla_ring import attend_travelling_latents
from kllm.attention.ring import causal_span, find_shards, ring_context, sharded_context
from kllm.attention.ring_selection import select_travelling
from kllm.attention.workspace import Rows, row_blocks

LATENT = "latent"  # paged state: latent, then rotary key
INDEX_KEY = "index_key"  # paged state of the indexer


@dataclass(frozen=True, slots=True)
class Selection:
    """The entries that each token of a step attends to; None stands for all it can see."""

    topk: int
    decodes: Tensor | None  # [decodes, topk] int64 slots; -1: no entry
    # Of each of the step's `prompts` [rows, topk] int32 positions, -1: none; the rows are those of
    # its last chunks, from the first on that sees more than `topk` entries.
    prompts: tuple[Tensor | None, ...]

    def tensors(self) -> list[Tensor]:
        """What another rank needs to have the same selection; see `selection_shapes`."""
        return [part for part in (self.decodes, *self.prompts) if part is not None]

    @classmethod
    def received(cls, ctx: ForwardContext, topk: int, tensors: Sequence[Tensor]) -> "Selection":
        """The selection of the same step whose `tensors` these are."""
        parts = iter(tensors)
        decodes = next(parts) if _decodes_select(ctx, topk) else None
        chosen = (next(parts) if _selecting(runs, topk) else None for runs in prompts(ctx))
        return cls(topk, decodes, tuple(chosen))


def _selecting(runs: Sequence[Chunk], topk: int) -> list[Chunk]:
    """The chunks of a prompt, its last ones, that see more than `topk` entries."""
    return [run for run in runs if run.end > topk]


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
        some = _selecting(runs, index.topk)
        keys = _entries(ctx, index.state, layer, runs[-1], gathered) if some else None
        parts.append(None if keys is None else _select_rows(ctx, some, index, keys))
    return Selection(index.topk, decodes, tuple(parts))


def _select_travelling(
    ctx: ForwardContext, layer: int, index: IndexQuery
) -> tuple[Tensor | None, ...]:
    """What each prompt selects where its index keys lie on several ranks."""
    shards, parts = find_shards(ctx, 1), []
    for piece, ids in zip(shards.pieces, select_travelling(ctx, layer, shards, index), strict=True):
        if piece.runs:
            some = _selecting(piece.runs, index.topk)
            first = rows_of(some).start - piece.rows.start
            parts.append(ids[first:] if some and ids is not None else None)
    return tuple(parts)


def select_all(ctx: ForwardContext, topk: int) -> Selection:
    """What `select` answers where no token sees more than `topk` entries."""
    return Selection(topk, None, (None,) * len(prompts(ctx)))


def select_newest(ctx: ForwardContext, topk: int) -> Selection:
    """The newest entries instead of the best ones: what needs no index keys."""
    back = torch.arange(topk, device=ctx.positions.device)
    decodes = None
    if _decodes_select(ctx, topk):
        places = ctx.positions[: ctx.num_decodes].unsqueeze(1) - back
        seen, page = places.clamp_min(0), ctx.pool.page_size
        pages = ctx.block_tables[: ctx.num_decodes].gather(1, seen // page).long()
        decodes = (pages * page + seen % page).masked_fill(places < 0, -1)
    parts: list[Tensor | None] = []
    for runs in prompts(ctx):
        rows = rows_of(_selecting(runs, topk))
        places = ctx.positions[rows].unsqueeze(1) - back
        parts.append(places.clamp_min(-1).int() if len(places) else None)
    return Selection(topk, decodes, tuple(parts))


def selection_shapes(ctx: ForwardContext, topk: int) -> list[tuple[tuple[int, int], torch.dtype]]:
    """Shapes and dtypes of `Selection.tensors` of the step, known on the host."""
    decodes = _decodes_select(ctx, topk)
    found = [((ctx.num_decodes, topk), torch.int64)] if decodes else []
    rows = [rows_of(_selecting(runs, topk)) for runs in prompts(ctx)]
    found += [((own.stop - own.start, topk), torch.int32) for own in rows if own.stop > own.start]
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
    out = Rows(len(q))
    if ctx.num_decodes:
        count = slice(0, ctx.num_decodes)
        slots = selection.decodes if selection else None
        out.put(count, _attend_decodes(ctx, layer, q[count], heads, slots))
    selected = selection.prompts if selection else (None,) * len(prompts(ctx))
    if ring_context(ctx):
        attend_travelling_latents(ctx, layer, LATENT, q, heads, selected, out)
        return out.finish()
    gathered = gather_prompts(ctx, LATENT, layer) if gathers(ctx) else None
    for runs, ids in zip(prompts(ctx), selected, strict=True):
        stored = _entries(ctx, LATENT, layer, runs[-1], gathered)
        _attend_runs(ctx, q, stored, heads, runs, ids, out)
    return out.finish()


def _attend_runs(
    ctx: ForwardContext,
    q: Tensor,
    stored: Tensor,
    heads: LatentHeads,
    runs: Sequence[Chunk],
    ids: Tensor | None,
    out: Rows,
) -> None:
    """Attention of the chunks of one prompt to its entries `stored`; fills their rows of `out`.

    `ids` says what the last of them select, see `Selection`; None: nothing. Those that see all of
    the prompt come first, and keys and values are made once for all of them.
    """
    topk = None if ids is None else ids.shape[1]
    some = [] if topk is None else _selecting(runs, topk)
    dense = runs[: len(runs) - len(some)]
    if dense and (q.is_cuda or len(dense) > 1):
        rows, end = rows_of(dense), dense[-1].end
        softmax = LatentSoftmax(heads, q[rows], expanding_pays(heads, dense, end))
        softmax.add(stored[:end], [causal_span(run, rows.start) for run in dense])
        out.put(rows, softmax.finish())
        dense = []
    for group, chosen, most in ((dense, None, None), (some, ids, topk)):
        if group:
            rows, end = rows_of(group), group[-1].end
            form = expanded if expanding_pays(heads, group, end, most) else absorbed
            out.put(rows, form(ctx, q[rows], stored[:end], heads, group, chosen))


@once_a_step
def _decode_slots(ctx: ForwardContext) -> Tensor:
    """[decodes, longest context] int64 slots; -1: not visible."""
    longest = int(ctx.context_lens_host[: ctx.num_decodes].max())
    return visible_slots(ctx, 1)[:, :longest].contiguous()


def _entries(
    ctx: ForwardContext, name: str, layer: int, last: Chunk, gathered: list[Tensor] | None
) -> Tensor:
    """[context, channels]: all entries that the last chunk of a request sees."""
    if gathered is None or last.piece < 0:
        return _read(ctx, name, layer, last)
    return gathered[last.piece].squeeze(1)


def _read(ctx: ForwardContext, name: str, layer: int, chunk: Chunk) -> Tensor:
    """[context, channels]: all entries of a chunk's request, its own included."""
    slots = request_slots(ctx, chunk.request, chunk.end, 1)
    # Packed entries pass through float32 when they are unpacked: in blocks, to bound that.
    parts = row_blocks(len(slots), 8 * ctx.pool.pages(name, layer).shape[-1])
    if ctx.pool.kv_dtype != "fp8" or len(parts) == 1:
        return read_entries(ctx.pool, name, layer, slots)
    return torch.cat([read_entries(ctx.pool, name, layer, slots[rows]) for rows in parts])


def _select_rows(
    ctx: ForwardContext, runs: Sequence[Chunk], index: IndexQuery, keys: Tensor
) -> Tensor:
    """[rows, topk] int32 positions that chunks of one prompt select among its index keys."""
    own, end = rows_of(runs), runs[-1].end
    chosen = Rows(own.stop - own.start)
    for block in row_blocks(own.stop - own.start, SCORE_BYTES * end):
        rows = slice(own.start + block.start, own.start + block.stop)
        seen = tokens_seen(runs, rows.stop - 1)
        visible = visible_entries(ctx, 1, rows.start, rows.stop)
        best = best_entries(index, rows, keys[:seen], visible)
        if best.shape[1] < index.topk:  # the block sees no more
            best = F.pad(best, (0, index.topk - best.shape[1]), value=-1)
        chosen.put(block, best)
    return chosen.finish()


def _attend_decodes(
    ctx: ForwardContext, layer: int, q: Tensor, heads: LatentHeads, slots: Tensor | None
) -> Tensor:
    slots = _decode_slots(ctx) if slots is None else slots
    row_bytes = 0  # entries are read where they lie,
    if ctx.pool.kv_dtype == "fp8":  # but packed ones are unpacked first
        row_bytes = 4 * slots.shape[1] * (heads.keys.shape[2] + heads.rope)
    out = Rows(len(q))
    for rows in row_blocks(len(q), row_bytes):
        segment = stored_keys(ctx.pool, LATENT, layer, slots[rows])
        out.put(rows, heads.attend(q[rows], *segment))
    return out.finish()
