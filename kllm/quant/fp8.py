"""Block-scaled FP8 weights: e4m3 values with one scale per block of rows and columns.

Scales are float32 (DeepSeek-V3, GLM: `weight_scale_inv`) or powers of two in one byte
(DeepSeek-V4: E8M0, value 2^(byte - 127)). Edge blocks are partial.
"""

import torch
from torch import Tensor

E4M3_MAX = 448.0


def scale_values(scale: Tensor) -> Tensor:
    """Scales as float32. E8M0 comes as that dtype or as its bytes."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.float()


def dequantize(
    values: Tensor, scale: Tensor, block: tuple[int, int], offset: tuple[int, int] = (0, 0)
) -> Tensor:
    """float32 weights of a rectangle of a block-scaled matrix.

    Args:
        values: [r, c] float8_e4m3fn.
        scale: the scales of all blocks that the rectangle touches.
        block: rows and columns a block.
        offset: where in its first block the rectangle starts.
    """
    rows, columns = values.shape
    out = values.float()
    row_index = (torch.arange(rows, device=values.device) + offset[0]) // block[0]
    column_index = (torch.arange(columns, device=values.device) + offset[1]) // block[1]
    return out.mul_(scale_values(scale)[row_index][:, column_index])


def quantize(
    weight: Tensor, block: tuple[int, int], power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """(values [r, c] float8_e4m3fn, scales [ceil, ceil]) of a matrix.

    Each block's largest magnitude maps to the largest e4m3 value, or with `power_of_two` at
    most to it; then the scales are float8_e8m0fnu, otherwise float32.
    """
    rows, columns = weight.shape
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    padded = weight.new_zeros(grid[0] * block[0], grid[1] * block[1], dtype=torch.float32)
    padded[:rows, :columns] = weight
    blocks = padded.view(grid[0], block[0], grid[1], block[1])
    # The floor keeps an all-zero block finite; it is far below any weight's magnitude.
    scale = blocks.abs().amax(dim=(1, 3)).clamp_min(2.0**-100) / E4M3_MAX
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    scaled = blocks / scale[:, None, :, None]
    values = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    values = values.view(padded.shape)[:rows, :columns].contiguous()
    return values, scale.to(torch.float8_e8m0fnu) if power_of_two else scale
