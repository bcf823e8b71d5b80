# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Scores of the lightning indexer in Triton: the [T, H, N] products never reach memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS = 128  # keys a program scores; float32 products need more registers and take fewer
TOKENS = 8  # tokens a program scores against the same keys


@triton.jit(do_not_specialize=["num_tokens", "num_keys"])
def _index_scores(
    q_ptr, weights_ptr, keys_ptr, slots_ptr, visible_ptr, out_ptr, num_tokens, heads, num_keys,
    q_stride_t, q_stride_h, key_stride_t, key_stride_n,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    TOKENS: tl.constexpr, SLOTS: tl.constexpr, VISIBLE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1).to(tl.int64) * TOKENS
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    head, cols = tl.arange(0, HEADS), tl.arange(0, DIM_BLOCK)
    end = num_keys
    if VISIBLE:
        tokens = first + tl.arange(0, TOKENS)
        end = tl.max(tl.load(visible_ptr + tokens, tokens < num_tokens, other=0), axis=0)
    if tl.program_id(0) * KEYS < end:
        if SLOTS:
            row = tl.load(slots_ptr + first * num_keys + key, key < num_keys, other=-1).to(tl.int64)
            seen = row >= 0
        else:
            row = key.to(tl.int64)
            seen = key < num_keys
        rows = keys_ptr + first * key_stride_t + row[:, None] * key_stride_n
        k_mask = seen[:, None] & (cols < DIM)[None, :]
        k = tl.load(rows + cols[None, :], k_mask, other=0.0)
        for i in range(TOKENS):
            token = first + i
            q_mask = (head < heads)[:, None] & (cols < DIM)[None, :] & (token < num_tokens)
            q_rows = q_ptr + token * q_stride_t + head[:, None] * q_stride_h
            q = tl.load(q_rows + cols[None, :], q_mask, other=0.0)
            live = (head < heads) & (token < num_tokens)
            weights = tl.load(weights_ptr + token * heads + head, live, other=0.0)
            s = tl.dot(q, tl.trans(k).to(q.dtype), input_precision="ieee")  # [HEADS, KEYS]
            score = tl.sum(tl.maximum(s, 0.0) * weights[:, None], axis=0)
            shown = seen
            if VISIBLE:
                shown = seen & (key < tl.load(visible_ptr + token, token < num_tokens, other=0))
            score = tl.where(shown, score, float("-inf"))
            there = (key < num_keys) & (token < num_tokens)
            tl.store(out_ptr + token * num_keys + key, score, there)
    else:  # none of these tokens sees any of these keys
        nothing = tl.full((KEYS,), float("-inf"), tl.float32)
        for i in range(TOKENS):
            there = (key < num_keys) & (first + i < num_tokens)
            tl.store(out_ptr + (first + i) * num_keys + key, nothing, there)


def index_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    slots: Tensor | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """See `kllm.kernels.reference.index_scores`."""
    tokens, heads, dim = q.shape
    num_keys = keys.shape[-2] if slots is None else slots.shape[1]
    out = torch.empty(tokens, num_keys, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    shared = keys.dim() == 2
    together = TOKENS if shared and slots is None and tokens >= TOKENS else 1
    block = KEYS if q.dtype != torch.float32 else 16
    _index_scores[(triton.cdiv(num_keys, block), triton.cdiv(tokens, together))](
        q, weights.contiguous(), keys, keys if slots is None else slots.contiguous(),
        keys if visible is None else visible.contiguous(), out,
        tokens, heads, num_keys,
        q.stride(0), q.stride(1), 0 if shared else keys.stride(0), keys.stride(-2),
        DIM=dim,
        DIM_BLOCK=max(16, triton.next_power_of_2(dim)),
        HEADS=max(16, triton.next_power_of_2(heads)),
        KEYS=block,
        TOKENS=together,
        SLOTS=slots is not None,
        VISIBLE=visible is not None,
        num_warps=8 if heads > 32 else 4,
        num_stages=1 if q.dtype == torch.float32 else 2,
    )  # fmt: skip
    return out
