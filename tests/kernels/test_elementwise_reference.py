"""The elementwise references against their formulas in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.kernels import reference
from tests.tolerances import TOLERANCE


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@given(
    rows=st.sampled_from([(0,), (1,), (7,), (2, 3)]),
    size=st.sampled_from([1, 5, 64, 576]),
    scale=st.sampled_from([0.0, 1e-4, 1.0, 1e3]),
    eps=st.sampled_from([1e-5, 1e-6]),
)
@settings(max_examples=25, deadline=None)
def test_rmsnorm_is_its_formula(
    rows: tuple[int, ...], size: int, scale: float, eps: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(*rows, size, generator=generator) * scale).to(dtype)
    weight = torch.randn(size, generator=generator).to(dtype)
    got = reference.rmsnorm(x, weight, eps)
    assert got.dtype == dtype
    wide = x.double()
    want = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
