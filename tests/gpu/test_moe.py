"""Small-batch expert kernel against the loop over experts."""

import importlib

import pytest
import torch
from torch import Tensor

from kllm.kernels import reference
from tests.gpu.cases import DTYPES, randn
from tests.tolerances import MOE_DISTANCE


def kernel():  # type: ignore[no-untyped-def]
    return importlib.import_module("kllm.kernels.moe_triton")


def distance(x: Tensor, y: Tensor) -> float:
    """1 - 2<x,y> / (<x,x> + <y,y>): 0 for equal tensors."""
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / ((x * x).sum() + (y * y).sum()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("first_expert", [0, 3])
@pytest.mark.parametrize("tokens", [1, 17, 100])
def test_moe_matches_the_reference(
    device: torch.device, tokens: int, first_expert: int, limit: float | None, dtype: torch.dtype
) -> None:
    """Some experts get no token, some more than one tile of them, some choices are foreign."""
    experts, dim, hidden, k = 8, 200, 72, 3
    x = randn(tokens, dim, dtype=dtype, device=device)
    w13 = randn(experts, 2 * hidden, dim, dtype=dtype, device=device, seed=1) * dim**-0.5
    w2 = randn(experts, dim, hidden, dtype=dtype, device=device, seed=2) * hidden**-0.5
    scores = torch.rand(tokens, 12, generator=torch.Generator().manual_seed(3))
    scores[:, 4] += 1  # everybody's choice
    weights, ids = scores.topk(k)
    arguments = (x, ids.to(device), weights.to(device), w13, w2, limit, first_expert)
    found, want = kernel().moe(*arguments), reference.moe(*arguments)
    assert found.dtype == dtype
    assert distance(found, want) < MOE_DISTANCE
