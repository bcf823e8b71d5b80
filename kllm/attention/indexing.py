"""Choosing cached entries for each query, and listing them for the attention kernels.

Shared by DeepSeek-V4's compressed attention and by DSA: a lightning indexer scores the keys of
entries (DeepSeek-V3.2), and a query attends to the entries that score best.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kllm import kernels
from kllm.attention.context import ForwardContext, once_a_step
from kllm.attention.workspace import row_blocks
from kllm.cache.pool import KVPool
from kllm.cache.shards import page_slots

SCORE_BYTES = 8  # a score, and what choosing among the scores takes beside it


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """What the step's tokens ask the indexer."""

    state: str  # paged state of the index keys
    q: Tensor  # [T, index heads, index dim]
    weights: Tensor  # [T, index heads] float32, scale factors included
    topk: int  # entries a token attends to


def stored_keys(pool: KVPool, name: str, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """A segment for `kernels.sparse_attention` of single-head entries in the pool.

    Args:
        slots: [T, n] int64 entry slots; -1: none.
    """
    if pool.kv_dtype != "fp8":
        return pool.pages(name, layer).flatten(0, -2), slots
    rows = pool.read(name, layer, slots.clamp_min(0)).flatten(0, -2)  # [T n, D]
    idx = torch.arange(slots.numel(), device=slots.device).view_as(slots)
    return rows, idx.masked_fill(slots < 0, -1)


def read_entries(pool: KVPool, name: str, layer: int, slots: Tensor) -> Tensor:
    """[n, D]: single-head entries of a paged state in the compute dtype, by slots [n] int64."""
    return pool.unpack(name, pool.pages(name, layer).flatten(0, -2).index_select(0, slots))


@once_a_step
def request_slots(ctx: ForwardContext, request: int, count: int, ratio: int) -> Tensor:
    """[count] int64: slots of one request's first entries of `ratio`, by place in its pages.

    Kept for the step: 8 bytes an entry, once for all layers.
    """
    places = torch.arange(count, device=ctx.positions.device)
    return page_slots(ctx.block_tables[request], places, ctx.pool.page_size // ratio)


@once_a_step
def visible_entries(ctx: ForwardContext, ratio: int, first: int, stop: int) -> Tensor:
    """[stop - first] int32: how many entries of its request each of these tokens sees.

    A tensor of its own: Triton compiles a kernel anew where a slice is aligned otherwise.
    """
    tokens = ctx.positions[first:stop] + 1
    return (tokens // ratio if ratio > 1 else tokens).int()


@once_a_step
def visible_slots(ctx: ForwardContext, ratio: int) -> Tensor:
    """[decodes, entries of the widest block table] int64 slots; -1: not visible yet."""
    per_page = ctx.pool.page_size // ratio
    device = ctx.positions.device
    pages = ctx.block_tables[: ctx.num_decodes].long().unsqueeze(2)
    slots = (pages * per_page + torch.arange(per_page, device=device)).flatten(1)
    visible = (ctx.positions[: ctx.num_decodes] + 1) // ratio
    hidden = torch.arange(slots.shape[1], device=device) >= visible.unsqueeze(1)
    return slots.masked_fill(hidden, -1)


def best_slots(ctx: ForwardContext, layer: int, slots: Tensor, index: IndexQuery) -> Tensor:
    """[decodes, topk]: the slots that each decode's indexer scores best, -1 where fewer."""
    best = []
    for rows in row_blocks(len(slots), 4 * slots.shape[1] * index.q.shape[2]):
        keys, own = stored_keys(ctx.pool, index.state, layer, slots[rows])
        scores = kernels.index_scores(index.q[rows], index.weights[rows], keys, own)
        best.append(slots[rows].gather(1, kernels.top_entries(scores, index.topk)[1]))
    return torch.cat(best)


def best_entries(index: IndexQuery, rows: slice, keys: Tensor, visible: Tensor) -> Tensor:
    """The entries that some tokens of the step select; as many as there are, if fewer than topk.

    Args:
        keys: [n, index dim], of the entries in order.
        visible: [rows] int32, how many of the entries each token sees.

    Returns:
        [rows, min(topk, n)] int32; -1: none.
    """
    scores = kernels.index_scores(index.q[rows], index.weights[rows], keys, None, visible)
    best = kernels.top_entries(scores, index.topk)[1].int()
    return best.masked_fill_(best >= visible.unsqueeze(1), -1)
