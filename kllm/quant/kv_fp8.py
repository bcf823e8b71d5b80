"""FP8 KV entries: e4m3 channels, their scales and the unquantised rope channels in one row.

Layout of a packed entry: fp8 channels | scales | bfloat16 channels | padding; with groups of
128 and fp32 scales this is the published 656-byte MLA entry, with groups of 64 and ue8m0
scales DeepSeek-V4's 584-byte one. Scales are dynamic per entry: a static 1.0 loses accuracy.
"""

import torch
from torch import Tensor

from kllm.quant.entry import EntryFormat

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4  # smallest group maximum that gets a scale of its own


def pack(values: Tensor, entry: EntryFormat) -> Tensor:
    """[..., width] in a float dtype -> [..., entry.nbytes("fp8")] uint8."""
    n, group = entry.fp8_channels, entry.group
    groups = torch.unflatten(values[..., :n].float(), -1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(AMAX_FLOOR) / E4M3_MAX
    if entry.scale == "ue8m0":
        exponent = torch.ceil(torch.log2(scale)).clamp(-127, 127)
        scale = torch.exp2(exponent)
        scale_bytes = (exponent.squeeze(-1) + 127).to(torch.uint8)
    else:
        scale = scale.clone(memory_format=torch.contiguous_format)  # empty ones have odd strides
        scale_bytes = scale.squeeze(-1).view(torch.uint8)
    quantised = (groups / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    parts = [quantised.flatten(-2).view(torch.uint8), scale_bytes]
    if entry.width > n:
        parts.append(values[..., n:].to(torch.bfloat16).contiguous().view(torch.uint8))
    if entry.pad:
        parts.append(scale_bytes.new_zeros(*values.shape[:-1], entry.pad))
    return torch.cat(parts, dim=-1)


def unpack(stored: Tensor, entry: EntryFormat, dtype: torch.dtype) -> Tensor:
    """[..., entry.nbytes("fp8")] uint8 -> [..., width] in `dtype`."""
    n, group = entry.fp8_channels, entry.group
    num_groups = -(-n // group)
    scale_end = n + num_groups * (1 if entry.scale == "ue8m0" else 4)
    quantised = stored[..., :n].contiguous().view(torch.float8_e4m3fn).float()
    # Copies: a slice of a single row counts as contiguous, at an offset that no view can have.
    raw = stored[..., n:scale_end].clone(memory_format=torch.contiguous_format)
    scale = torch.exp2(raw.float() - 127) if entry.scale == "ue8m0" else raw.view(torch.float32)
    values = torch.unflatten(quantised, -1, (-1, group)) * scale.unsqueeze(-1)
    values = values.flatten(-2).to(dtype)
    if entry.width == n:
        return values
    rope_end = scale_end + (entry.width - n) * 2
    rope = stored[..., scale_end:rope_end].clone(memory_format=torch.contiguous_format)
    return torch.cat((values, rope.view(torch.bfloat16).to(dtype)), dim=-1)
