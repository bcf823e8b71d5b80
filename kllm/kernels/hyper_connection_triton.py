# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Manifold-constrained hyper-connections (Xie et al. 2026) in Triton: three launches a sublayer.

`hc_pre` is a split-K product with the flattened streams, then one kernel that sums the
splits, runs Sinkhorn in registers and collapses the streams; `hc_post` is one pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

K_BLOCK = 64
PROGRAMS = 1024  # of a launch: several on each SM hide each other's loads
WIDTH_BLOCK = 1024  # channels a program collapses or expands


@triton.jit(do_not_specialize=["num_tokens", "share"])
def _project(
    x_ptr, fn_ptr, z_ptr, squares_ptr, num_tokens, length, x_stride, share,
    ROWS: tl.constexpr, ROW_BLOCK: tl.constexpr, TOKENS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Partial fn . u [splits, T, ROWS] and sum(u^2) [splits, T] of one share of the channels."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(1)
    row = tl.arange(0, ROW_BLOCK)
    z = tl.zeros((TOKENS, ROW_BLOCK), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    begin = split * share
    for start in range(begin, tl.minimum(begin + share, length), K):
        k = start + tl.arange(0, K)
        live = k < length
        x_mask = (token < num_tokens)[:, None] & live[None, :]
        x = tl.load(x_ptr + token[:, None] * x_stride + k[None, :], x_mask, other=0.0)
        x = x.to(tl.float32)
        fn_mask = (row < ROWS)[:, None] & live[None, :]
        fn = tl.load(fn_ptr + row[:, None] * length + k[None, :], fn_mask, other=0.0)
        squares += tl.sum(x * x, axis=1)
        # Three tf32 products keep float32's accuracy at the speed of the matrix units.
        z += tl.dot(x, tl.trans(fn), input_precision="tf32x3")
    line = split * num_tokens + token
    mask = (token < num_tokens)[:, None] & (row < ROWS)[None, :]
    tl.store(z_ptr + line[:, None] * ROWS + row[None, :], z, mask)
    tl.store(squares_ptr + line, squares, token < num_tokens)


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def _collapse(
    z_ptr, squares_ptr, base_ptr, scale_ptr, x_ptr, y_ptr, expand_ptr, mix_ptr,
    num_tokens, splits, width, norm_eps, eps,
    N: tl.constexpr, ROWS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, ITERATIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the splits, make the weights, and collapse one block of channels of one token."""
    token = tl.program_id(0).to(tl.int64)
    split, j = tl.arange(0, SPLIT_BLOCK), tl.arange(0, N)
    line = split * num_tokens + token
    live = split < splits
    mean = tl.sum(tl.load(squares_ptr + line, live, other=0.0), axis=0) / (N * width)
    rms = tl.sqrt(mean + norm_eps)
    at = z_ptr + line[:, None] * ROWS + j[None, :]
    z = tl.sum(tl.load(at, live[:, None], other=0.0), axis=0) / rms  # [N]
    collapse = tl.sigmoid(z * tl.load(scale_ptr) + tl.load(base_ptr + j)) + eps

    if ITERATIONS > 0 and tl.program_id(1) == 0:
        z = tl.sum(tl.load(at + N, live[:, None], other=0.0), axis=0) / rms
        expand = 2 * tl.sigmoid(z * tl.load(scale_ptr + 1) + tl.load(base_ptr + N + j))
        tl.store(expand_ptr + token * N + j, expand)
        jk = j[:, None] * N + j[None, :]
        at3 = z_ptr + line[:, None, None] * ROWS + 2 * N + jk[None, :, :]
        z3 = tl.sum(tl.load(at3, live[:, None, None], other=0.0), axis=0) / rms  # [N, N]
        mix = z3 * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * N + jk)
        mix = tl.exp(mix - tl.max(mix, axis=1)[:, None])
        mix = mix / tl.sum(mix, axis=1)[:, None] + eps
        mix = mix / (tl.sum(mix, axis=0)[None, :] + eps)
        for _ in range(ITERATIONS - 1):
            mix = mix / (tl.sum(mix, axis=1)[:, None] + eps)
            mix = mix / (tl.sum(mix, axis=0)[None, :] + eps)
        tl.store(mix_ptr + token * N * N + jk, mix)

    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = x_ptr + (token * N + j[:, None]) * width + col[None, :]
    x = tl.load(source, (col < width)[None, :], other=0.0).to(tl.float32)
    y = tl.sum(x * collapse[:, None], axis=0)
    tl.store(y_ptr + token * width + col, y.to(y_ptr.dtype.element_ty), col < width)


@triton.jit
def _expand(
    out_ptr, x_ptr, expand_ptr, mix_ptr, y_ptr, width, out_stride,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, N)
    live = col < width
    out = tl.load(out_ptr + token * out_stride + col, live, other=0.0).to(tl.float32)
    y = tl.load(expand_ptr + token * N + k)[:, None] * out[None, :]
    for j in tl.static_range(N):
        x = tl.load(x_ptr + (token * N + j) * width + col, live, other=0.0).to(tl.float32)
        y += tl.load(mix_ptr + token * N * N + j * N + k)[:, None] * x[None, :]
    target = y_ptr + (token * N + k[:, None]) * width + col[None, :]
    tl.store(target, y.to(y_ptr.dtype.element_ty), live[None, :])


def _weights_and_input(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `hc_pre` returns; with 0 iterations only the collapsed input is computed."""
    tokens, n, width = streams.shape
    streams = streams.contiguous()
    rows = fn.shape[0]
    y = torch.empty(tokens, width, dtype=streams.dtype, device=streams.device)
    expand = torch.empty(tokens, n, dtype=torch.float32, device=streams.device)
    mix = torch.empty(tokens, n, n, dtype=torch.float32, device=streams.device)
    if tokens == 0:
        return y, expand, mix
    token_block = 16 if tokens <= 16 else 32
    token_tiles = triton.cdiv(tokens, token_block)
    # At least 4 blocks of channels in each split.
    chunks = triton.cdiv(n * width, K_BLOCK)
    splits = max(1, min(PROGRAMS // token_tiles, chunks // 4, 64))
    share = triton.cdiv(chunks, splits) * K_BLOCK
    z = torch.empty(splits, tokens, rows, dtype=torch.float32, device=streams.device)
    squares = torch.empty(splits, tokens, dtype=torch.float32, device=streams.device)
    _project[(token_tiles, splits)](
        streams, fn, z, squares, tokens, n * width, n * width, share,
        ROWS=rows,
        ROW_BLOCK=max(16, triton.next_power_of_2(rows)),
        TOKENS=token_block,
        K=K_BLOCK,
    )  # fmt: skip
    block = min(triton.next_power_of_2(width), WIDTH_BLOCK)
    _collapse[(tokens, triton.cdiv(width, block))](
        z, squares, base, scale, streams, y, expand, mix, tokens, splits, width, norm_eps, eps,
        N=n,
        ROWS=rows,
        SPLIT_BLOCK=triton.next_power_of_2(splits),
        ITERATIONS=iterations,
        BLOCK=block,
    )  # fmt: skip
    return y, expand, mix


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
    """See `kllm.kernels.reference.hc_pre`; the number of streams is a power of two."""
    return _weights_and_input(streams, fn, base, scale, norm_eps, eps, iterations)


def hc_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, eps: float
) -> Tensor:
    """See `kllm.kernels.reference.hc_head`."""
    return _weights_and_input(streams, fn, base, scale, norm_eps, eps, 0)[0]


def hc_post(out: Tensor, streams: Tensor, expand: Tensor, mix: Tensor) -> Tensor:
    """See `kllm.kernels.reference.hc_post`."""
    tokens, n, width = streams.shape
    streams = streams.contiguous()
    result = torch.empty_like(streams)
    if tokens == 0:
        return result
    block = min(triton.next_power_of_2(width), WIDTH_BLOCK)
    _expand[(tokens, triton.cdiv(width, block))](
        out, streams, expand.contiguous(), mix.contiguous(), result, width, out.stride(0),
        N=n,
        BLOCK=block,
    )  # fmt: skip
    return result
