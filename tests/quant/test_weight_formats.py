"""FP8 and FP4 weights against plain numpy, written from the formats' definitions."""

import numpy as np
import pytest
import torch

from kllm.quant import fp4, fp8


def e4m3_value(byte: int) -> float:
    """OCP FP8 E4M3: 1 sign, 4 exponent (bias 7), 3 mantissa bits."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 0xF, byte & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e2m1_value(nibble: int) -> float:
    """OCP FP4 E2M1: 1 sign, 2 exponent (bias 1), 1 mantissa bit."""
    sign = -1.0 if nibble & 8 else 1.0
    exponent, mantissa = (nibble >> 1) & 3, nibble & 1
    if exponent == 0:
        return sign * mantissa * 0.5
    return sign * (1 + mantissa / 2) * 2.0 ** (exponent - 1)


def random_bytes(*shape: int, high: int = 256) -> np.ndarray:
    return np.random.default_rng(0).integers(0, high, shape, dtype=np.uint8)


@pytest.mark.parametrize("scale_kind", ["float32", "e8m0", "e8m0 bytes"])
@pytest.mark.parametrize(("shape", "block"), [((5, 7), (2, 3)), ((130, 257), (128, 128))])
def test_fp8_dequantises_as_numpy_does(
    shape: tuple[int, int], block: tuple[int, int], scale_kind: str
) -> None:
    data = random_bytes(*shape)
    data[(data & 0x7F) == 0x7F] = 0  # NaN
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    exponents = np.random.default_rng(1).integers(110, 140, grid, dtype=np.uint8)
    scales = 2.0 ** (exponents.astype(float) - 127)
    if scale_kind == "float32":
        scale = torch.from_numpy((scales * 1.25).astype(np.float32))
        scales = scales * 1.25
    else:
        scale = torch.from_numpy(exponents)
        scale = scale if scale_kind == "e8m0 bytes" else scale.view(torch.float8_e8m0fnu)
    want = np.empty(shape)
    for r in range(shape[0]):
        for c in range(shape[1]):
            want[r, c] = e4m3_value(int(data[r, c])) * scales[r // block[0], c // block[1]]
    values = torch.from_numpy(data).view(torch.float8_e4m3fn)
    got = fp8.dequantize(values, scale, block)
    assert got.dtype == torch.float32
    assert torch.equal(got, torch.from_numpy(want.astype(np.float32)))


def test_fp8_rectangle_that_starts_inside_a_block_takes_the_right_scales() -> None:
    weight = torch.randn(70, 90, generator=torch.Generator().manual_seed(0))
    values, scale = fp8.quantize(weight, (32, 32))
    whole = fp8.dequantize(values, scale, (32, 32))
    part = fp8.dequantize(values[40:66, 33:80], scale[1:3, 1:3], (32, 32), offset=(8, 1))
    assert torch.equal(part, whole[40:66, 33:80])


@pytest.mark.parametrize("power_of_two", [False, True])
def test_fp8_round_trip_keeps_three_mantissa_bits(power_of_two: bool) -> None:
    weight = torch.randn(200, 150, generator=torch.Generator().manual_seed(0))
    values, scale = fp8.quantize(weight, (128, 128), power_of_two)
    assert scale.dtype == (torch.float8_e8m0fnu if power_of_two else torch.float32)
    assert scale.shape == (2, 2)
    error = (fp8.dequantize(values, scale, (128, 128)) - weight).abs()
    smallest_step = weight.abs().max() / 448 * 2**-9 * (2 if power_of_two else 1)
    assert (error <= torch.clamp(weight.abs() * 2**-4, min=smallest_step) * 1.001).all()
    again, scale_again = fp8.quantize(
        fp8.dequantize(values, scale, (128, 128)), (128, 128), power_of_two
    )
    if power_of_two:  # exact arithmetic: what was representable stays
        assert torch.equal(again.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(scale_again.float(), scale.float())


def test_fp4_dequantises_as_numpy_does() -> None:
    packed, exponents = random_bytes(3, 32), random_bytes(3, 2, high=250)
    exponents = np.clip(exponents, 100, 150).astype(np.uint8)
    want = np.empty((3, 64))
    for r in range(3):
        for c in range(64):
            byte = int(packed[r, c // 2])
            nibble = byte & 0xF if c % 2 == 0 else byte >> 4
            want[r, c] = e2m1_value(nibble) * 2.0 ** (int(exponents[r, c // 32]) - 127)
    for stored in (torch.uint8, torch.int8):
        got = fp4.dequantize(torch.from_numpy(packed).view(stored), torch.from_numpy(exponents))
        assert torch.equal(got, torch.from_numpy(want.astype(np.float32)))


def test_fp4_round_trip_of_representable_weights_is_exact() -> None:
    packed, exponents = torch.from_numpy(random_bytes(8, 64)), torch.full((8, 4), 120)
    packed[:, ::16] = 0x77  # every group holds the largest code, so its scale is not ambiguous
    weight = fp4.dequantize(packed, exponents.to(torch.uint8))
    again, scale = fp4.quantize(weight)
    assert torch.equal(fp4.dequantize(again, scale), weight)


def test_fp4_rounds_to_the_nearest_code_and_ties_to_even() -> None:
    row = torch.zeros(1, 32)
    cases = {0.2: 0.0, 0.25: 0.0, 0.3: 0.5, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0}
    row[0, 0] = 6.0  # scale 1
    for i, value in enumerate(cases, start=1):
        row[0, i] = -value
    got = fp4.dequantize(*fp4.quantize(row))[0]
    assert got[0] == 6.0
    assert got[1 : len(cases) + 1].tolist() == [-v for v in cases.values()]


@pytest.mark.parametrize("quantise", [lambda w: fp8.quantize(w, (128, 128)), fp4.quantize])
def test_zeros_stay_zero(quantise) -> None:
    values, scale = quantise(torch.zeros(4, 64))
    assert not values.view(torch.uint8).any()
    assert torch.isfinite(scale.float()).all()
