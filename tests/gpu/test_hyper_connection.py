"""Hyper-connection kernels against their torch twins."""

import importlib

import pytest
import torch
from torch import Tensor

from kllm.kernels import reference
from tests.gpu.cases import DTYPES, TOKENS, assert_near, randn
from tests.tolerances import TOLERANCE

STREAMS = 4


def kernel():  # type: ignore[no-untyped-def]
    return importlib.import_module("kllm.kernels.hyper_connection_triton")


def site(width: int, rows: int, device: torch.device) -> dict[str, Tensor]:
    fn = randn(rows, STREAMS * width, dtype=torch.float32, device=device) * width**-0.5
    return {"fn": fn, "base": randn(rows, dtype=torch.float32, device=device, seed=5)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 1300])
@pytest.mark.parametrize("tokens", TOKENS)
def test_hc_pre_matches_the_reference(
    device: torch.device, tokens: int, width: int, dtype: torch.dtype
) -> None:
    streams = randn(tokens, STREAMS, width, dtype=dtype, device=device)
    arguments = site(width, (2 + STREAMS) * STREAMS, device)
    scale = torch.tensor([0.7, 1.1, 0.9], device=device)
    options = {"norm_eps": 1e-6, "eps": 1e-6, "iterations": 20}
    found = kernel().hc_pre(streams, **arguments, scale=scale, **options)
    want = reference.hc_pre(streams, **arguments, scale=scale, **options)
    assert_near(found[0], want[0])
    limit = TOLERANCE[torch.float32] * 5  # sums of thousands of products in another order
    for mine, theirs in zip(found[1:], want[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_hc_post_matches_the_reference(
    device: torch.device, tokens: int, dtype: torch.dtype
) -> None:
    streams = randn(tokens, STREAMS, 1300, dtype=dtype, device=device)
    out = randn(tokens, 1300, dtype=dtype, device=device)
    expand = randn(tokens, STREAMS, dtype=torch.float32, device=device).sigmoid()
    mix = randn(tokens, STREAMS, STREAMS, dtype=torch.float32, device=device).softmax(2)
    found = kernel().hc_post(out, streams, expand, mix)
    assert_near(found, reference.hc_post(out, streams, expand, mix))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hc_head_matches_the_reference(device: torch.device, dtype: torch.dtype) -> None:
    streams = randn(17, STREAMS, 640, dtype=dtype, device=device)
    arguments = site(640, STREAMS, device)
    scale = torch.tensor([0.7], device=device)
    found = kernel().hc_head(streams, **arguments, scale=scale, norm_eps=1e-6, eps=1e-6)
    want = reference.hc_head(streams, **arguments, scale=scale, norm_eps=1e-6, eps=1e-6)
    assert_near(found, want)
