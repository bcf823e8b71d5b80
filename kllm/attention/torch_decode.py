"""Decodes of the torch backend: requests with contexts of like length attend in one call.

Their pages are gathered side by side, as many for each request as the longest of its group has,
and one SDPA call masks what is too much. Query heads that share keys stand in the place of
queries, so that keys and values are not repeated. A request alone in its group, whose pages are
neighbours in the pool, is read where it lies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from kllm.attention.context import ForwardContext, once_a_step, to_device

GATHERED_BYTES = 8 << 20  # a group's pages: bounds what a step takes, and stays in the caches
MOST_PADDING = 2  # longest by shortest of a group


@dataclass(frozen=True, slots=True)
class _Group:
    """n requests of the step that attend together, to S places each."""

    rows: Tensor | None  # [n] int64, which requests; None: all decodes
    count: int  # n
    span: slice | None  # the slots of an only request whose pages are neighbours
    pages: Tensor | None  # [n * S / page size] int64 of other requests
    bias: Tensor | None  # [n, 1, 1, S] -inf behind a request's context; None: nothing is behind


def attend_decodes(ctx: ForwardContext, name: str, layer: int, q: Tensor, out: Tensor) -> None:
    """Attention of the step's decodes, whose own entries are stored already; fills `out`.

    Args:
        name: of the paged state: keys in the first half of its heads, then values.
        q, out: [decodes, H, D]; the softmax scale is D^-0.5.
    """
    pages = ctx.pool.pages(name, layer)  # [P, page, 2 K, D or bytes]
    kv_heads = pages.shape[2] // 2
    for group in _find_groups(ctx, pages[0].numel() * pages.element_size()):
        found = pages if group.pages is None else pages.index_select(0, group.pages)
        stored = found.view(group.count, -1, *pages.shape[2:])  # [n, S, 2 K, ...]
        if group.span is not None:
            stored = stored[:, group.span]
        kv = ctx.pool.unpack(name, stored).transpose(1, 2)  # [n, 2 K, S, D]
        own = q if group.rows is None else q.index_select(0, group.rows)
        o = F.scaled_dot_product_attention(
            own.view(group.count, kv_heads, -1, q.shape[2]),
            kv[:, :kv_heads],
            kv[:, kv_heads:],
            attn_mask=group.bias,
        )
        if group.rows is None:
            out.view(o.shape).copy_(o)
        else:
            out.index_copy_(0, group.rows, o.reshape(own.shape))


def group_requests(pages: NDArray[np.int64], most: int) -> list[list[int]]:
    """Which requests attend together.

    Args:
        pages: [n] of each request, at least one.
        most: pages that a group may have, padding included, unless it is one request.

    Returns:
        Groups of requests, each in rising order. The longest of a group has at most
        `MOST_PADDING` times the pages of the shortest.
    """
    groups: list[list[int]] = []
    longest = 0
    for request in np.argsort(-pages, kind="stable").tolist():
        length = int(pages[request])
        fits = groups and length * MOST_PADDING >= longest
        if fits and (len(groups[-1]) + 1) * longest <= most:
            groups[-1].append(request)
        else:
            groups.append([request])
            longest = length
    return [sorted(group) for group in groups]


@once_a_step
def _find_groups(ctx: ForwardContext, page_bytes: int) -> Sequence[_Group]:
    return list(_make_groups(ctx, GATHERED_BYTES // page_bytes))


def _make_groups(ctx: ForwardContext, most: int) -> Iterator[_Group]:
    n, size, device = ctx.num_decodes, ctx.pool.page_size, ctx.positions.device
    tables = ctx.block_tables[:n].cpu().numpy().astype(np.int64)
    lengths = ctx.context_lens_host[:n].astype(np.int64)
    pages = -(-lengths // size)
    for members in group_requests(pages, most):
        rows = None if len(members) == n else to_device(np.array(members), device)
        longest = int(pages[members].max())
        table = tables[members, :longest]
        if len(members) == 1 and (np.diff(table) == 1).all():
            first = int(table[0, 0]) * size
            yield _Group(rows, 1, slice(first, first + int(lengths[members[0]])), None, None)
            continue
        # Padding is a request's own first page: what it must not see is not even read.
        table = np.where(np.arange(longest) < pages[members, None], table, table[:, :1])
        behind = np.arange(longest * size) >= lengths[members, None]
        bias = None
        if behind.any():
            hidden = to_device(behind, device)[:, None, None]
            bias = torch.zeros(hidden.shape, dtype=ctx.pool.compute_dtype, device=device)
            bias.masked_fill_(hidden, float("-inf"))
        yield _Group(rows, len(members), None, to_device(table.reshape(-1), device), bias)
