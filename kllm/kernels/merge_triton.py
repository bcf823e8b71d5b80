# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Merging attention results of key splits, and how many splits fill a device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634  # the attention kernels work with powers of two
MAX_SPLITS = 64


@triton.jit(do_not_specialize=["lines", "splits"])
def _merge(
    partial_ptr,
    lse_ptr,
    sink_ptr,
    out_ptr,
    lines,
    splits,
    heads,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    SINK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLIT_BLOCK)
    lse = tl.load(lse_ptr + split * lines + line, split < splits, other=float("-inf"))
    peak = tl.max(lse, axis=0)
    if SINK:
        sink = tl.load(sink_ptr + line % heads).to(tl.float32) * 1.4426950408889634
        peak = tl.maximum(peak, sink)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(lse - peak)
    total = tl.sum(weight, axis=0)
    if SINK:
        total += tl.exp2(sink - peak)
    weight = weight / tl.where(total == 0.0, 1.0, total)
    cols = tl.arange(0, BLOCK)
    rows = (split * lines + line)[:, None] * DIM + cols[None, :]
    mask = (split < splits)[:, None] & (cols < DIM)[None, :]
    out = tl.sum(tl.load(partial_ptr + rows, mask, other=0.0) * weight[:, None], axis=0)
    tl.store(out_ptr + line * DIM + cols, out.to(out_ptr.dtype.element_ty), cols < DIM)


def merge_splits(partial: Tensor, lse: Tensor, out: Tensor, sink: Tensor | None = None) -> None:
    """Merge normalised partial results by their weights into `out` [T, H, D], in place.

    Args:
        partial: [splits, T, H, D] float32.
        lse: [splits, T, H] float32, base-2 log-sum-exp of each; -inf: the split saw no key.
        sink: [H] natural logits that only enter the denominator.
    """
    splits, tokens, heads, dim = partial.shape
    _merge[(tokens * heads,)](
        partial,
        lse,
        lse if sink is None else sink,
        out,
        tokens * heads,
        splits,
        heads,
        DIM=dim,
        BLOCK=triton.next_power_of_2(dim),
        SPLIT_BLOCK=triton.next_power_of_2(splits),
        SINK=sink is not None,
    )


def choose_splits(programs: int, keys: int, min_keys: int, device: torch.device) -> int:
    """Into how many splits the keys of each of `programs` tiles go to fill the device.

    Args:
        keys: upper bound of the keys of a tile, known on the host.
        min_keys: fewer keys a split cost more in merging than they win in parallelism.
    """
    useful: int = min(triton.cdiv(keys, min_keys), MAX_SPLITS)
    if device.type == "cpu":  # the interpreter: split wherever a GPU could
        return max(1, useful)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(2 * processors // max(programs, 1), useful))
