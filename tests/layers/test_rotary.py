"""Rotary embedding against complex multiplication in float64."""

import pytest
import torch

from kllm import kernels
from kllm.layers.rotary import Rotary, Yarn


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("inverse", [True, False])
def test_rope_is_a_complex_rotation(interleaved: bool, inverse: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 16, generator=generator)
    positions = torch.tensor([0, 1, 7, 100, 5000])
    cos, sin = Rotary(16, 10000.0).cos_sin(positions)
    got = kernels.rope(x, cos, sin, interleaved=interleaved, inverse=inverse)

    freq = 10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    turn = torch.polar(
        torch.ones(5, 1, 8, dtype=torch.float64), (positions[:, None] * freq)[:, None]
    )
    pairs = x.double().unflatten(-1, (8, 2) if interleaved else (2, 8))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    z = torch.view_as_complex(pairs.contiguous()) * (turn.conj() if inverse else turn)
    want = torch.view_as_real(z)
    want = want.flatten(-2) if interleaved else want.transpose(-1, -2).flatten(-2)
    # float32 angles near 5000 rad are off by up to 2^-12 rad
    assert torch.allclose(got, want.float(), atol=1e-3)


def test_yarn_keeps_fast_and_stretches_slow_frequencies() -> None:
    """DeepSeek-V4's ramp runs from pair 15 to pair 25."""
    plain = Rotary(64, 160000.0).inv_freq()
    yarn = Rotary(64, 160000.0, Yarn(16, 65536)).inv_freq()
    assert torch.equal(yarn[:16], plain[:16])
    assert torch.allclose(yarn[25:], plain[25:] / 16)
    ratio = yarn[15:26] / plain[15:26]
    assert torch.allclose(ratio, 1 - torch.arange(11) / 10 * (15 / 16))
