# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Causal attention over paged keys and values (GQA), for decode steps and for prefill chunks.

A program owns a tile of query rows of one request and one KV head: the query tokens of the
tile times the heads that share the KV head, so that each key is read once for the group. It
walks the request's keys with an online softmax (Milakov and Gimelshein 2018). Decode tiles
are few, so their keys are also split over programs and the partial results merged after
(split-KV, "flash-decoding"). Page indices are read from the block table inside the kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kllm.kernels.merge_triton import LOG2_E, choose_splits, merge_splits

BLOCK_KEYS = 64
NARROW_BLOCK_KEYS = 16  # where wider blocks spill: float32 products, and unaligned FP8 entries
MIN_SPLIT_KEYS = 256


@triton.jit
def _load_entries(ptr, slots, mask, entry_stride, DIM: tl.constexpr, FP8: tl.constexpr, dtype):
    """[keys, DIM] of one head. An FP8 entry is DIM e4m3 values and their float32 scale."""
    cols = tl.arange(0, DIM)[None, :]
    rows = ptr + slots[:, None] * entry_stride
    if not FP8:
        return tl.load(rows + cols, mask[:, None], other=0.0)
    values = tl.load((rows + cols).to(tl.pointer_type(tl.float8e4nv)), mask[:, None], other=0.0)
    scales = tl.load((rows + DIM).to(tl.pointer_type(tl.float32)), mask[:, None], other=0.0)
    return (values.to(tl.float32) * scales).to(dtype)


@triton.jit(do_not_specialize=["num_tokens", "table_stride", "splits"])
def _attend(
    q_ptr,
    pages_ptr,
    tables_ptr,
    context_lens_ptr,
    cu_seqlens_ptr,
    tiles_ptr,
    out_ptr,
    lse_ptr,
    num_tokens,
    scale_log2,
    q_stride_t,
    q_stride_h,
    table_stride,
    entry_stride,
    head_stride,
    splits,
    KV_HEADS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTIAL: tl.constexpr,
    DECODE: tl.constexpr,
    FP8: tl.constexpr,
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if DECODE:
        request, first, token0, query_len = tile, 0, tile, 1
    else:
        request = tl.load(tiles_ptr + tile * 2)
        first = tl.load(tiles_ptr + tile * 2 + 1)
        token0 = tl.load(cu_seqlens_ptr + request)
        query_len = tl.load(cu_seqlens_ptr + request + 1) - token0
    context = tl.load(context_lens_ptr + request)

    row = tl.arange(0, ROWS)
    query = first + row // HEAD_BLOCK
    in_group = row % HEAD_BLOCK
    valid = (query < query_len) & (in_group < HEADS_PER_KV)
    token = (token0 + query).to(tl.int64)
    head = kv_head * HEADS_PER_KV + in_group
    position = context - query_len + query
    dims = tl.arange(0, DIM)
    q_rows = q_ptr + token[:, None] * q_stride_t + head[:, None] * q_stride_h
    q = tl.load(q_rows + dims[None, :], valid[:, None], other=0.0)

    # Keys past the tile's last query are invisible to all of it.
    last = tl.minimum(first + ROWS // HEAD_BLOCK, query_len)
    limit = context - query_len + last
    share = tl.cdiv(tl.cdiv(limit, splits), KEYS) * KEYS
    begin = split * share
    end = tl.minimum(begin + share, limit)

    table = tables_ptr + request.to(tl.int64) * table_stride
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    head_stride = tl.multiple_of(head_stride, 4)  # in bytes for FP8 entries: DIM and a float32
    keys_ptr = pages_ptr + kv_head * head_stride
    values_ptr = pages_ptr + (KV_HEADS + kv_head) * head_stride
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        seen = key < end
        page = tl.load(table + key // PAGE, seen, other=0)
        slot = page.to(tl.int64) * PAGE + key % PAGE
        k = _load_entries(keys_ptr, slot, seen, entry_stride, DIM, FP8, q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        s = tl.where(seen[None, :] & (key[None, :] <= position[:, None]), s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, axis=1))
        # A row that has seen no key yet keeps a peak of -inf; 0 stands in to avoid inf - inf.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(p, axis=1)
        v = _load_entries(values_ptr, slot, seen, entry_stride, DIM, FP8, q.dtype)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        peak = new_peak

    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    line = (split * num_tokens + token) * (KV_HEADS * HEADS_PER_KV) + head
    target = out_ptr + line[:, None] * DIM + dims[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), valid[:, None])
    if PARTIAL:
        tl.store(lse_ptr + line, peak + tl.log2(total), valid)


def paged_attention(
    q: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context: int,
    cu_seqlens: Tensor | None = None,
    tiles: Tensor | None = None,
    fp8: bool = False,
) -> Tensor:
    """Causal attention of each request's newest tokens to all of its keys.

    Args:
        q: [T, H, D]; D a power of two, at least 16. Scores are scaled by D^-0.5.
        pages: [P, page size, 2 K, D], keys in the first K heads; with `fp8`, uint8 entries of
            D e4m3 values and one float32 scale.
        block_tables: [B, width] int32.
        context_lens: [B] int32, keys of each request, its newest tokens included.
        max_context: upper bound of `context_lens`, known on the host.
        cu_seqlens: [B + 1] int32, where each request's tokens start; None: one token each.
        tiles: [N, 2] int32, (request, first query) of each tile of `tile_queries` queries;
            needed with `cu_seqlens`.

    Returns:
        [T, H, D] in the dtype of `q`.
    """
    tokens, heads, dim = q.shape
    kv_heads = pages.shape[2] // 2
    group = heads // kv_heads
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    decode = tiles is None
    head_block = triton.next_power_of_2(group)
    rows = max(16, head_block) if decode else tile_rows(group, q.dtype)
    num_tiles = tokens if tiles is None else tiles.shape[0]
    splits = 1
    if decode:
        splits = choose_splits(num_tiles * kv_heads, max_context, MIN_SPLIT_KEYS, q.device)
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty(splits, *out.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(splits, tokens, heads, dtype=torch.float32, device=q.device)
    _attend[(num_tiles, kv_heads, splits)](
        q,
        pages,
        block_tables,
        context_lens,
        context_lens if cu_seqlens is None else cu_seqlens,
        context_lens if tiles is None else tiles,
        partial,
        lse,
        tokens,
        dim**-0.5 * LOG2_E,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        pages.stride(1),
        pages.stride(2),
        splits,
        KV_HEADS=kv_heads,
        HEADS_PER_KV=group,
        HEAD_BLOCK=head_block,
        DIM=dim,
        PAGE=pages.shape[1],
        ROWS=rows,
        KEYS=NARROW_BLOCK_KEYS if fp8 or q.dtype == torch.float32 else BLOCK_KEYS,
        PARTIAL=splits > 1,
        DECODE=decode,
        FP8=fp8,
        num_warps=4 if rows <= 64 else 8,
        num_stages=2 if q.dtype == torch.float32 else 3,
    )
    if splits > 1:
        merge_splits(partial, lse, out)
    return out


def tile_rows(group: int, dtype: torch.dtype) -> int:
    """Rows of a prefill tile when `group` query heads share a KV head."""
    # Products of float32 tiles live in registers, not in the matrix units.
    heads: int = triton.next_power_of_2(group)
    return max(128 if dtype != torch.float32 else 16, heads)


def tile_queries(group: int, dtype: torch.dtype) -> int:
    """Query tokens of a prefill tile when `group` query heads share a KV head."""
    heads: int = triton.next_power_of_2(group)
    return tile_rows(group, dtype) // heads
