"""Sparse attention and indexer kernels against their torch twins."""

import importlib

import pytest
import torch
from torch import Tensor

from kllm.kernels import reference
from tests.gpu.cases import DTYPES, assert_near, randn


def kernel(name: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"kllm.kernels.{name}_triton")


def index_lists(tokens: int, width: int, rows: int, device: torch.device, seed: int) -> Tensor:
    """Random rows, a random share of them absent, and one token that sees nothing."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(0, rows, (tokens, width), generator=generator)
    idx[torch.rand(tokens, width, generator=generator) < 0.3] = -1
    idx[tokens // 2] = -1
    return idx.int().to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(8, 64, None), (20, 72, 64)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_sparse_attention_matches_the_reference(
    device: torch.device,
    tokens: int,
    heads: int,
    dim: int,
    value_dim: int | None,
    sink: bool,
    dtype: torch.dtype,
) -> None:
    """Two segments; the second is long enough to be split."""
    q = randn(tokens, heads, dim, dtype=dtype, device=device)
    kv = [randn(200, dim, dtype=dtype, device=device, seed=s) for s in (1, 2)]
    idx = [index_lists(tokens, width, 200, device, width) for width in (40, 300)]
    segments = list(zip(kv, idx, strict=True))
    sinks = randn(heads, dtype=torch.float32, device=device) if sink else None
    found = kernel("sparse_attention").sparse_attention(q, segments, dim**-0.5, sinks, value_dim)
    want = reference.sparse_attention(q, segments, dim**-0.5, sinks, value_dim)
    assert_near(found, want)
    assert not found[tokens // 2].any(), "a query without keys gives zeros"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [512, 576])
def test_sparse_attention_of_released_sizes(
    device: torch.device, dim: int, dtype: torch.dtype
) -> None:
    """64 heads over a 512-wide latent, with and without separate rope channels; one segment."""
    tokens = 3 if device.type == "cpu" else 300
    q = randn(tokens, 64, dim, dtype=dtype, device=device)
    kv = randn(1000, dim, dtype=dtype, device=device)
    idx = index_lists(tokens, 130, 1000, device, 3)
    found = kernel("sparse_attention").sparse_attention(q, [(kv, idx)], dim**-0.5, None, 512)
    want = reference.sparse_attention(q, [(kv, idx)], dim**-0.5, None, 512)
    assert_near(found, want)


def test_sparse_attention_of_no_tokens(device: torch.device) -> None:
    kv = randn(4, 32, dtype=torch.float32, device=device)
    idx = torch.zeros(0, 2, dtype=torch.int32, device=device)
    q = kv.new_empty(0, 4, 32)
    found = kernel("sparse_attention").sparse_attention(q, [(kv, idx)], 1.0, None, None)
    assert found.shape == q.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [3, 64])
@pytest.mark.parametrize("own_keys", [False, True])
@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (1, 300), (19, 130), (0, 5), (4, 0)])
def test_index_scores_match_the_reference(
    device: torch.device, tokens: int, keys: int, own_keys: bool, heads: int, dtype: torch.dtype
) -> None:
    q = randn(tokens, heads, 128, dtype=dtype, device=device)
    weights = randn(tokens, heads, dtype=torch.float32, device=device) * heads**-1 * 128**-0.5
    shape = (tokens, keys, 128) if own_keys else (keys, 128)
    k = randn(*shape, dtype=dtype, device=device)
    found = kernel("indexer").index_scores(q, weights, k)
    assert_near(found, reference.index_scores(q, weights, k), scale=10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [3, 19])
def test_index_scores_hide_what_a_query_does_not_see(
    device: torch.device, tokens: int, dtype: torch.dtype
) -> None:
    """Whole tiles of keys that no query of a program sees, parts of tiles, and all of them."""
    q = randn(tokens, 16, 32, dtype=dtype, device=device)
    weights = randn(tokens, 16, dtype=torch.float32, device=device) / 16
    keys = randn(300, 32, dtype=dtype, device=device)
    for first, each in ((0, 2), (200, 7), (300, 0)):
        visible = (first + each * torch.arange(tokens, device=device)).clamp_max(300).int()
        found = kernel("indexer").index_scores(q, weights, keys, None, visible)
        hidden = torch.arange(300, device=device) >= visible.unsqueeze(1)
        assert torch.equal(found == float("-inf"), hidden)
        want = reference.index_scores(q, weights, keys, None, visible)
        assert_near(found, want, scale=10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_index_scores_of_listed_rows_match_the_reference(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Decodes score entries where they lie in the pages."""
    q = randn(5, 16, 32, dtype=dtype, device=device)
    weights = randn(5, 16, dtype=torch.float32, device=device) / 16
    keys = randn(90, 32, dtype=dtype, device=device)
    slots = index_lists(5, 200, 90, device, seed=4)
    found = kernel("indexer").index_scores(q, weights, keys, slots)
    assert torch.equal(found == float("-inf"), slots < 0)
    assert_near(found, reference.index_scores(q, weights, keys, slots), scale=10)
