"""FP4 weights: e2m1 values, two a byte, one E8M0 scale per 32 inputs of a row (MXFP4).

The low nibble of a byte is the even column (OCP Microscaling specification 1.0; order as in
DeepSeek-V4 checkpoints).
"""

import torch
from torch import Tensor

from kllm.quant.fp8 import scale_values

GROUP = 32  # inputs a scale
E2M1_MAX = 6.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the three low bits; the fourth is the sign


def dequantize(packed: Tensor, scale: Tensor) -> Tensor:
    """[r, c / 2] bytes and [r, c / 32] E8M0 scales -> [r, c] float32.

    A rectangle must start and end at whole groups of 32 columns.
    """
    codes = torch.tensor((*E2M1, *(-v for v in E2M1)), device=packed.device)
    data = packed.view(torch.uint8)
    nibbles = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(1)  # [r, c]
    groups = codes[nibbles.int()].view(packed.shape[0], -1, GROUP)
    return groups.mul_(scale_values(scale).unsqueeze(-1)).flatten(1)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(packed [r, c / 2] uint8, scales [r, c / 32] float8_e8m0fnu) of a matrix.

    The scale is the smallest power of two that keeps a group within +-6; values are rounded
    to nearest, ties to the even code.
    """
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    scale = torch.exp2(torch.ceil(torch.log2(amax / E2M1_MAX)))
    scaled = (groups / scale).flatten(1)
    table = torch.tensor(E2M1, device=weight.device)
    middles = (table[1:] + table[:-1]) / 2
    magnitude = scaled.abs()
    code = torch.bucketize(magnitude, middles)  # a tie stays at the lower code
    tie_at_odd = (code % 2 == 1) & (magnitude == middles[code.clamp(max=6)])
    code = (code + tie_at_odd).to(torch.uint8) | ((scaled < 0).to(torch.uint8) << 3)
    packed = code[:, ::2] | (code[:, 1::2] << 4)
    return packed, scale.squeeze(-1).to(torch.float8_e8m0fnu)
