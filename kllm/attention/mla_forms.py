"""The two forms of latent attention for the chunks of one prompt; see `kllm.attention.mla`."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kllm.attention.chunks import Chunk, rows_of, tokens_seen
from kllm.attention.context import ForwardContext
from kllm.attention.latent import LatentHeads
from kllm.attention.workspace import Rows, row_blocks


def absorbed(
    ctx: ForwardContext,
    q: Tensor,
    stored: Tensor,
    heads: LatentHeads,
    runs: Sequence[Chunk],
    chosen: Tensor | None,
) -> Tensor:
    """Attention of chunks of one prompt to its entries as they are.

    Args:
        q: [n, H, N + rope] of the chunks' tokens.
        stored: [S, R + rope], the entries that the last of them sees.
        chosen: [n, topk] entries that each attends to, -1: none; None: all it sees.

    Returns:
        [n, H, V].
    """
    out, first = Rows(len(q)), runs[0].rows.start
    widths = 2 * heads.keys.shape[2] + heads.rope  # absorbed query and weighted latent
    listing = 0 if chosen is not None else 8 * len(stored)
    for rows in row_blocks(len(q), 4 * q.shape[1] * widths + listing):
        if chosen is not None:
            idx = chosen[rows]
        else:
            seen = tokens_seen(runs, first + rows.stop - 1)
            every = torch.arange(seen, device=q.device, dtype=torch.int32)
            idx = every.masked_fill(every > _places(ctx, first, rows), -1)
        out.put(rows, heads.attend(q[rows], stored, idx))
    return out.finish()


def expanded(
    ctx: ForwardContext,
    q: Tensor,
    stored: Tensor,
    heads: LatentHeads,
    runs: Sequence[Chunk],
    chosen: Tensor | None,
) -> Tensor:
    """The same with keys and values that are made of all entries, for some heads at a time."""
    plain, rank = heads.keys.shape[1:]
    value = heads.values.shape[1]
    latent, rotary = stored[:, :rank], stored[:, rank:]
    out = q.new_empty(*q.shape[:2], value)
    for own in row_blocks(q.shape[1], 8 * len(stored) * (2 * plain + heads.rope + value)):
        shared = rotary.expand(own.stop - own.start, -1, -1)
        key = torch.cat((latent @ heads.keys[own].transpose(1, 2), shared), dim=2)  # [h, S, D]
        values = latent @ heads.values[own].transpose(1, 2)  # [h, S, V]
        query = q[:, own].transpose(0, 1)
        for rows, mask in _masks(ctx, runs, chosen):
            seen = tokens_seen(runs, runs[0].rows.start + rows.stop - 1)
            o = _sdpa(query[:, rows], key[:, :seen], values[:, :seen], heads.scale, mask)
            out[rows, own] = o.transpose(0, 1)
    return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """[h, n, D], [h, S, D], [h, S, V] -> [h, n, V]; causal from the first token without mask."""
    q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return o.squeeze(0)


def _masks(
    ctx: ForwardContext, runs: Sequence[Chunk], chosen: Tensor | None
) -> Iterator[tuple[slice, Tensor | None]]:
    """The chunks' rows with their masks: at once where a kernel needs no mask in memory."""
    own = rows_of(runs)
    count = own.stop - own.start
    if chosen is None and len(runs) == 1 and runs[0].start == 0:
        yield slice(0, count), None
    else:
        for rows in row_blocks(count, 16 * runs[-1].end):
            seen = tokens_seen(runs, own.start + rows.stop - 1)
            if chosen is not None:
                yield rows, _mask(chosen[rows], seen)
            else:
                every = torch.arange(seen, device=ctx.positions.device)
                yield rows, every <= _places(ctx, own.start, rows)


def _mask(chosen: Tensor, seen: int) -> Tensor:
    """[rows, seen] bool: which of the entries the rows have selected, of `chosen` [rows, topk]."""
    idx = chosen.long()
    mask = torch.zeros(len(idx), seen + 1, dtype=torch.bool, device=idx.device)
    mask.scatter_(1, torch.where(idx < 0, seen, idx), True)  # one more column takes the absent
    return mask[:, :seen]


def _places(ctx: ForwardContext, first: int, rows: slice) -> Tensor:
    """[rows, 1] int64 positions of the tokens from row `first` of the flat batch on."""
    return ctx.positions[first + rows.start : first + rows.stop].unsqueeze(1)
