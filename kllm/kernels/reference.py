"""Plain torch twins of the kernels: what the CPU runs, and what the tests compare with."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w * x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32.

    Args:
        x: [..., D].
        weight: [D].
    """
    # Five operations where `F.rms_norm` takes seven on a CPU, where a decode waits for each.
    wide = x.float()
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(_number(eps, x.device), size, size, value=1 / x.shape[-1]).rsqrt_()
    return wide.mul(scale).mul_(weight.float()).to(x.dtype)


@cache
def _number(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rmsnorm(x + residual), x + residual), both [..., D] in the dtype of `x`."""
    total = x + residual
    return rmsnorm(total, weight, eps), total


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    inverse: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate channel pairs by the angles of their positions (Su et al. 2021), in float32.

    Args:
        x: [T, ..., R], the rotated channels only.
        cos, sin: [T, R / 2] float32.
        interleaved: pairs are (2i, 2i + 1); otherwise (i, i + R / 2).
        inverse: rotate by the negative angles.
        out: where the result goes, possibly `x` itself; None: a new tensor like `x`.
    """
    middle = (1,) * (x.dim() - 2)
    cos = cos.view(cos.shape[0], *middle, cos.shape[1])
    sin = sin.view(sin.shape[0], *middle, sin.shape[1])
    if inverse:
        sin = -sin
    if interleaved:
        even, odd = torch.unflatten(x.float(), -1, (-1, 2)).unbind(-1)
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    else:
        low, high = x.float().chunk(2, dim=-1)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    return turned.to(x.dtype) if out is None else out.copy_(turned)


def swiglu(gate_up: Tensor, limit: float | None) -> Tensor:
    """silu(gate) * up of [..., 2 I] -> [..., I], gate half first.

    With `limit` L the gate is clamped from above and `up` to [-L, L] (DeepSeek-V4).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T of [T, in] and [out, in] -> [T, out] float32, not rounded to the dtype of `x`."""
    return F.linear(x.float(), weight.float())


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float | None,
    first_expert: int,
) -> Tensor:
    """What the experts [first_expert, first_expert + E) add to each token.

    Args:
        x: [T, d].
        topk_ids: [T, k] int64, the experts of each token; those outside the range add nothing.
        topk_weights: [T, k] float32.
        w13: [E, 2 I, d], gate rows first.
        w2: [E, d, I].
        limit: clamp of `swiglu`; None: no clamp.

    Returns:
        [T, d] in the dtype of `x`, summed over the k experts in float32.
    """
    num_experts, k = w13.shape[0], topk_ids.shape[1]
    local = (topk_ids - first_expert).flatten()
    local = local.masked_fill((local < 0) | (local >= num_experts), num_experts)
    order = local.argsort(stable=True)  # [T k], grouped by expert, foreign ones last
    tokens, weights = order // k, topk_weights.flatten()[order].unsqueeze(1)
    y = x.new_zeros(x.shape, dtype=torch.float32)
    start = 0
    for expert, count in enumerate(local.bincount(minlength=num_experts + 1)[:-1].tolist()):
        if count:
            rows = slice(start, start + count)
            hidden = swiglu(F.linear(x[tokens[rows]], w13[expert]), limit)
            y.index_add_(0, tokens[rows], F.linear(hidden, w2[expert]).float() * weights[rows])
            start += count
    return y.to(x.dtype)


WORKSPACE_BYTES = 1 << 28  # for intermediates that would grow with tokens times context


def sparse_attention(
    q: Tensor,
    segments: Sequence[tuple[Tensor, Tensor]],
    scale: float,
    sink: Tensor | None,
    value_dim: int | None,
) -> Tensor:
    """Multi-query attention of each token over the listed keys, one softmax in float32.

    Args:
        q: [T, H, D].
        segments: (kv [N, D], idx [T, n] int32 or int64) pairs: the rows of `kv` that each
            query attends to; -1 stands for no row.
        scale: multiplies the scores.
        sink: [H] logits that only enter the softmax's denominator; None: no sink.
        value_dim: values are the first so many channels of the keys; None: all.

    Returns:
        [T, H, value_dim] in the dtype of `q`; zeros for a query without keys.
    """
    num_tokens, heads, dim = q.shape
    value_dim = value_dim or dim
    keys_each = sum(idx.shape[1] for _, idx in segments)
    block = max(1, WORKSPACE_BYTES // (4 * max(keys_each, 1) * (dim + 2 * heads)))
    out = q.new_empty(num_tokens, heads, value_dim)
    for start in range(0, num_tokens, block):
        rows = slice(start, start + block)
        lists = [(kv, idx[rows]) for kv, idx in segments]
        keys = torch.cat([kv[idx.clamp_min(0)].float() for kv, idx in lists], dim=1)  # [c, n, D]
        absent = torch.cat([idx < 0 for _, idx in lists], dim=1).unsqueeze(1)  # [c, 1, n]
        scores = (q[rows].float() @ keys.transpose(1, 2)).mul_(scale)
        scores.masked_fill_(absent, float("-inf"))  # [c, H, n]
        top = scores.amax(dim=-1, keepdim=True)
        if sink is not None:
            top = torch.maximum(top, sink.float().view(1, heads, 1))
        top = top.masked_fill(top == float("-inf"), 0.0)
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        if sink is not None:
            total = total + (sink.float().view(1, heads, 1) - top).exp()
        mixed = weights @ keys[..., :value_dim]
        out[rows] = (mixed / total.masked_fill(total == 0, 1.0)).to(q.dtype)
    return out


def index_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    slots: Tensor | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """sum_h weights[t, h] * max(0, q[t, h] . keys[j]): the lightning indexer (DeepSeek-V3.2).

    Args:
        q: [T, H, D].
        weights: [T, H] float32, scale factors included.
        keys: [N, D] that all queries share, or [T, N, D]; with `slots` [R, D].
        slots: [T, N] rows of `keys` that each query scores; -1 stands for no row and gives -inf.
        visible: [T] int32, how many of the keys each query sees: the others give -inf. Not with
            `slots`; None: all.

    Returns:
        [T, N] float32.
    """
    num_tokens, heads = weights.shape
    num_keys = keys.shape[-2] if slots is None else slots.shape[1]
    q, out = q.float(), weights.new_empty(num_tokens, num_keys)
    wide = max(1, min(num_keys, WORKSPACE_BYTES // (4 * heads)))
    block = max(1, WORKSPACE_BYTES // (4 * heads * wide))
    for start in range(0, num_tokens, block):
        rows = slice(start, start + block)
        for first in range(0, num_keys, wide):
            columns = slice(first, first + wide)
            if slots is not None:
                some = keys[slots[rows, columns].clamp_min(0)]
            else:
                some = keys[columns] if keys.dim() == 2 else keys[rows, columns]
            scores = (q[rows] @ some.float().transpose(-1, -2)).relu_()  # [c, H, n]
            out[rows, columns] = (weights[rows].unsqueeze(1) @ scores).squeeze(1)
    if slots is not None:
        out.masked_fill_(slots < 0, float("-inf"))
    if visible is not None:
        hidden = torch.arange(num_keys, device=out.device) >= visible.unsqueeze(1)
        out.masked_fill_(hidden, float("-inf"))
    return out


def split_lists(lists: Tensor, size: int, parts: int) -> tuple[Tensor, Tensor]:
    """Sort each row's numbers by the part they lie in; those of one part stay in their order.

    Number x is place x % size of part x // size.

    Args:
        lists: [n, c] int32, below parts * size; negative ones are left out.

    Returns:
        places: [n, c] int32; behind the last part's they mean nothing.
        starts: [n, parts + 1] int32, where in its row each part begins, and where the last ends.
    """
    part, order = torch.where(lists < 0, parts, lists // size).sort(dim=1, stable=True)
    edges = torch.arange(parts + 1, dtype=part.dtype, device=part.device).repeat(len(part), 1)
    starts = torch.searchsorted(part, edges, out_int32=True)
    return (lists % size).gather(1, order), starts


def pool_rows(values: Tensor, gates: Tensor) -> Tensor:
    """Sum of the rows, weighted per channel by a softmax over the rows (DeepSeek-V4).

    Args:
        values, gates: [G, rows, D] float32; a gate of -inf leaves its row out.

    Returns:
        [G, D] float32.
    """
    return (gates.softmax(dim=1) * values).sum(dim=1)


def hc_pre(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapse the residual streams into a sublayer's input (Xie et al. 2026, mHC).

    Args:
        streams: [T, N, d].
        fn: [(2 + N) N, N d] float32; rows: N collapse, N expand, N^2 mixing weights.
        base: [(2 + N) N] float32.
        scale: [3] float32, of the three kinds of weights.
        norm_eps: of the weightless RMS norm before `fn`.
        eps: added to the collapse weights and inside the Sinkhorn normalisation.
        iterations: Sinkhorn-Knopp iterations; the last step normalises columns.

    Returns:
        The input [T, d] in the dtype of `streams`, and for `hc_post` the expand weights [T, N]
        and the mixing matrix [T, N, N], float32.
    """
    n = streams.shape[1]
    # Tokens last: with rows of 4 a reduction over the last dimension would not vectorise.
    z = _hc_projection(streams, fn, norm_eps)  # [(2 + N) N, T]
    offset = base.unsqueeze(1)
    collapse = torch.sigmoid(z[:n] * scale[0] + offset[:n]) + eps
    expand = 2 * torch.sigmoid(z[n : 2 * n] * scale[1] + offset[n : 2 * n])
    mix = (z[2 * n :] * scale[2] + offset[2 * n :]).view(n, n, -1)  # [j, k, T]
    mix = mix.softmax(dim=1) + eps
    mix /= mix.sum(dim=0, keepdim=True) + eps
    for _ in range(iterations - 1):
        mix /= mix.sum(dim=1, keepdim=True) + eps
        mix /= mix.sum(dim=0, keepdim=True) + eps
    return _collapse(streams, collapse), expand.t(), mix.permute(2, 0, 1)


def hc_post(out: Tensor, streams: Tensor, expand: Tensor, mix: Tensor) -> Tensor:
    """The streams after a sublayer: X'[t, k] = expand[t, k] out[t] + sum_j mix[t, j, k] X[t, j].

    Args:
        out: [T, d], the sublayer's output.
        streams: [T, N, d], what `hc_pre` collapsed.
        expand, mix: [T, N] and [T, N, N] float32, from `hc_pre`.

    Returns:
        [T, N, d] in the dtype of `streams`.
    """
    result = expand.unsqueeze(2) * out.float().unsqueeze(1)
    for j, stream in enumerate(streams.float().unbind(1)):
        result.addcmul_(mix[:, j].unsqueeze(2), stream.unsqueeze(1))
    return result.to(streams.dtype)


def hc_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, eps: float
) -> Tensor:
    """Collapse the streams [T, N, d] after the last layer into [T, d].

    `fn` [N, N d], `base` [N] and `scale` [1] are float32; otherwise as in `hc_pre`.
    """
    z = _hc_projection(streams, fn, norm_eps)
    return _collapse(streams, torch.sigmoid(z * scale + base.unsqueeze(1)) + eps)


def _hc_projection(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """fn . u / rms(u) of the flattened streams u: [rows of fn, T] float32."""
    flat = streams.flatten(1).float()
    inverse_rms = (flat.square().mean(dim=1) + norm_eps).rsqrt()
    return (fn @ flat.t()) * inverse_rms


def _collapse(streams: Tensor, weights: Tensor) -> Tensor:
    """sum_j weights[j, t] streams[t, j]: [T, d] in the dtype of `streams`."""
    return (weights.t().unsqueeze(2) * streams).sum(dim=1).to(streams.dtype)
