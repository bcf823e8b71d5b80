"""Small-batch expert kernel against the loop over experts."""

import importlib

import pytest
import torch

from kllm.kernels import moe_grouped, reference
from tests.gpu.cases import DTYPES, distance, randn
from tests.tolerances import MOE_DISTANCE


def kernel():  # type: ignore[no-untyped-def]
    return importlib.import_module("kllm.kernels.moe_triton")


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


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("first_expert", [0, 3])
@pytest.mark.parametrize("tokens", [1, 65, 500])
def test_grouped_products_match_the_reference(
    device: torch.device, tokens: int, first_expert: int, counted: bool
) -> None:
    """As tokens arrive from other ranks: most choices are foreign, their number may be known."""
    experts, dim, hidden, k = 8, 256, 128, 3
    x = randn(tokens, dim, dtype=torch.bfloat16, device=device)
    shapes = ((experts, 2 * hidden, dim), (experts, dim, hidden))
    w13, w2 = (
        randn(*shape, dtype=torch.bfloat16, device=device, seed=i) * shape[2] ** -0.5
        for i, shape in enumerate(shapes, start=1)
    )
    scores = torch.rand(tokens, 20, generator=torch.Generator().manual_seed(3)).to(device)
    weights, ids = scores.topk(k)
    ids = ids.masked_fill(ids == 19, -1)
    own = (ids >= first_expert) & (ids < first_expert + experts)
    arguments = (x, ids, weights, w13, w2, 0.5, first_expert)
    found = moe_grouped.moe(*arguments, int(own.sum()) if counted else None)
    assert found.isfinite().all()
    assert distance(found, reference.moe(*arguments)) < MOE_DISTANCE
