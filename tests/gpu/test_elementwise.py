"""Norm, rotary embedding and SwiGLU kernels against their torch twins."""

import importlib

import pytest
import torch
from torch import Tensor

from kllm.kernels import reference
from tests.gpu.cases import DTYPES, TOKENS, assert_near, randn


def kernel(name: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"kllm.kernels.{name}_triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [48, 512, 7168])
@pytest.mark.parametrize("tokens", TOKENS)
def test_rmsnorm_matches_the_reference(
    device: torch.device, tokens: int, dim: int, dtype: torch.dtype
) -> None:
    x = randn(tokens, dim, dtype=dtype, device=device)
    weight = randn(dim, dtype=dtype, device=device)
    assert_near(
        kernel("rmsnorm").rmsnorm(x, weight, 1e-6), reference.rmsnorm(x, weight, 1e-6), scale=2
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rmsnorm_reads_a_strided_view(device: torch.device, dtype: torch.dtype) -> None:
    """The latent part of a fused projection is normed without a copy."""
    fused = randn(33, 96, dtype=dtype, device=device)
    weight = randn(64, dtype=dtype, device=device)
    x = fused[:, :64]
    assert_near(kernel("rmsnorm").rmsnorm(x, weight, 1e-6), reference.rmsnorm(x, weight, 1e-6), 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_add_rmsnorm_matches_the_reference(
    device: torch.device, tokens: int, dtype: torch.dtype
) -> None:
    x, residual = (randn(tokens, 576, dtype=dtype, device=device, seed=s) for s in (1, 2))
    weight = randn(576, dtype=dtype, device=device)
    normed, total = kernel("rmsnorm").add_rmsnorm(x, residual, weight, 1e-5)
    want_normed, want_total = reference.add_rmsnorm(x, residual, weight, 1e-5)
    assert torch.equal(total, want_total)
    assert_near(normed, want_normed, scale=2)


def angles(tokens: int, half: int, device: torch.device) -> tuple[Tensor, Tensor]:
    position = torch.arange(tokens, dtype=torch.float32).unsqueeze(1) * 37
    theta = position * 10000.0 ** (-torch.arange(half) / half)
    return theta.cos().to(device), theta.sin().to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_rope_matches_the_reference(
    device: torch.device, tokens: int, interleaved: bool, inverse: bool, dtype: torch.dtype
) -> None:
    x = randn(tokens, 9, 64, dtype=dtype, device=device)
    cos, sin = angles(tokens, 32, device)
    found = kernel("rope").rope(x, cos, sin, interleaved=interleaved, inverse=inverse)
    want = reference.rope(x, cos, sin, interleaved=interleaved, inverse=inverse)
    assert_near(found, want)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_reads_the_last_channels_of_wider_heads(
    device: torch.device, interleaved: bool
) -> None:
    x = randn(17, 5, 48, dtype=torch.float32, device=device)[..., 24:]
    cos, sin = angles(17, 12, device)
    found = kernel("rope").rope(x, cos, sin, interleaved=interleaved, inverse=False)
    assert_near(found, reference.rope(x, cos, sin, interleaved=interleaved, inverse=False))


def test_rope_in_place_leaves_the_other_channels(device: torch.device) -> None:
    x = randn(17, 5, 48, dtype=torch.float32, device=device)
    before, rotated = x.clone(), x[..., 24:]
    cos, sin = angles(17, 12, device)
    kernel("rope").rope(rotated, cos, sin, interleaved=True, inverse=True, out=rotated)
    want = reference.rope(before[..., 24:], cos, sin, interleaved=True, inverse=True)
    assert_near(x[..., 24:], want)
    assert torch.equal(x[..., :24], before[..., :24])


def test_rope_takes_one_vector_a_token(device: torch.device) -> None:
    x = randn(17, 64, dtype=torch.float32, device=device)
    cos, sin = angles(17, 32, device)
    found = kernel("rope").rope(x, cos, sin, interleaved=True, inverse=False)
    assert_near(found, reference.rope(x, cos, sin, interleaved=True, inverse=False))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("tokens", TOKENS)
def test_swiglu_matches_the_reference(
    device: torch.device, tokens: int, limit: float | None, dtype: torch.dtype
) -> None:
    x = randn(tokens, 2 * 1408, dtype=dtype, device=device)
    assert_near(kernel("swiglu").swiglu(x, limit), reference.swiglu(x, limit))
