"""Packed FP8 KV entries have the published sizes and keep their values."""

import pytest
import torch

from kllm.quant.entry import EntryFormat
from kllm.quant.kv_fp8 import pack, unpack

LATENT = EntryFormat(width=576, fp8_channels=512, group=128)  # MLA with fp32 scales
V4 = EntryFormat(width=512, fp8_channels=448, group=64, scale="ue8m0", pad=1)
INDEX_KEY = EntryFormat(width=128, fp8_channels=128, group=128)
FORMATS = [LATENT, V4, INDEX_KEY]


@pytest.mark.parametrize(("entry", "nbytes"), [(LATENT, 656), (V4, 584), (INDEX_KEY, 132)])
def test_entry_has_its_published_size(entry: EntryFormat, nbytes: int) -> None:
    assert entry.nbytes("fp8") == nbytes
    assert pack(torch.randn(3, entry.width), entry).shape == (3, nbytes)


@pytest.mark.parametrize("entry", FORMATS, ids=["latent", "v4", "index"])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e3])
def test_round_trip_error_is_that_of_three_mantissa_bits(
    entry: EntryFormat, magnitude: float
) -> None:
    x = torch.randn(64, 2, entry.width, generator=torch.Generator().manual_seed(0)) * magnitude
    y = unpack(pack(x, entry), entry, torch.float32)
    n = entry.fp8_channels
    group_max = x[..., :n].unflatten(-1, (-1, entry.group)).abs().amax(-1, keepdim=True)
    error = (x - y)[..., :n].unflatten(-1, (-1, entry.group)).abs()
    # Half a step of a 3-bit mantissa, or half the smallest step of the group (subnormals).
    # A power-of-two scale may waste one binade of the range.
    step = group_max / 448 * (2 if entry.scale == "ue8m0" else 1) * 2**-9
    bound = torch.maximum(x[..., :n].unflatten(-1, (-1, entry.group)).abs() * 2**-4, step)
    assert (error <= bound * 1.001).all()
    assert torch.equal(y[..., n:], x[..., n:].bfloat16().float())


@pytest.mark.parametrize("entry", FORMATS, ids=["latent", "v4", "index"])
def test_zeros_stay_zero(entry: EntryFormat) -> None:
    x = torch.zeros(2, entry.width)
    assert torch.equal(unpack(pack(x, entry), entry, torch.float32), x)


@pytest.mark.parametrize("entry", FORMATS, ids=["latent", "v4", "index"])
@pytest.mark.parametrize("rows", [0, 1])
def test_no_row_and_one_row_are_packed_too(entry: EntryFormat, rows: int) -> None:
    """One row of a larger tensor counts as contiguous wherever it starts."""
    x = torch.randn(3, entry.width, generator=torch.Generator().manual_seed(1))
    packed = pack(x, entry)
    some = slice(1, 1 + rows)
    assert torch.equal(pack(x[some], entry), packed[some])
    assert torch.equal(unpack(packed[some], entry, x.dtype), unpack(packed, entry, x.dtype)[some])
