"""The plain kernels of sparse attention, indexing and hyper-connections against slow formulas."""

import math

import pytest
import torch

from kllm.kernels import reference
from tests.tolerances import TOLERANCE

CLOSE = {"rtol": TOLERANCE[torch.float32], "atol": TOLERANCE[torch.float32]}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def listed(tokens: int, count: int, rows: int, seed: int) -> torch.Tensor:
    """Index lists of different lengths: distinct rows, then -1."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.rand(tokens, rows, generator=generator).argsort(1)[:, :count]
    lengths = torch.randint(1, count + 1, (tokens, 1), generator=generator)
    return idx.masked_fill(torch.arange(count) >= lengths, -1)


def slow_attention(
    q: torch.Tensor,
    segments: list[tuple[torch.Tensor, torch.Tensor]],
    scale: float,
    sink: torch.Tensor | None,
    value_dim: int,
) -> torch.Tensor:
    """One token and head at a time, in float64."""
    out = torch.zeros(*q.shape[:2], value_dim, dtype=torch.float64)
    for t in range(q.shape[0]):
        keys = torch.cat([kv[idx[t][idx[t] >= 0]] for kv, idx in segments]).double()
        for h in range(q.shape[1]):
            weights = (keys @ q[t, h].double() * scale).exp()
            total = weights.sum() + (sink[h].double().exp() if sink is not None else 0.0)
            out[t, h] = (weights.unsqueeze(1) * keys[:, :value_dim]).sum(0) / total
    return out


@pytest.mark.parametrize("with_sink", [True, False])
@pytest.mark.parametrize("workspace", [1 << 28, 1])  # all tokens at once, one by one
def test_sparse_attention_is_one_softmax_over_the_listed_keys(
    monkeypatch: pytest.MonkeyPatch, with_sink: bool, workspace: int
) -> None:
    monkeypatch.setattr(reference, "WORKSPACE_BYTES", workspace)
    q, sink = normal(7, 3, 16), normal(3, seed=1) if with_sink else None
    segments = [
        (normal(20, 16, seed=2), listed(7, 5, 20, seed=3)),
        (normal(40, 16, seed=4), listed(7, 9, 40, seed=5).int()),
    ]
    got = reference.sparse_attention(q, segments, 0.25, sink, 12)
    want = slow_attention(q, segments, 0.25, sink, 12)
    torch.testing.assert_close(got.double(), want, **CLOSE)


@pytest.mark.parametrize("with_sink", [True, False])
def test_query_without_keys_gets_zeros(with_sink: bool) -> None:
    sink = normal(3) if with_sink else None
    segments = [(normal(20, 16), torch.full((2, 4), -1))]
    out = reference.sparse_attention(normal(2, 3, 16), segments, 0.25, sink, None)
    assert torch.equal(out, torch.zeros(2, 3, 16))


def test_large_scores_do_not_overflow() -> None:
    idx = torch.arange(4).expand(1, 4)
    out = reference.sparse_attention(
        100 * normal(1, 2, 8), [(100 * normal(4, 8, seed=1), idx)], 1.0, normal(2), None
    )
    assert out.isfinite().all()


@pytest.mark.parametrize("workspace", [1 << 28, 64])  # 64 bytes: one query, 4 keys at a time
@pytest.mark.parametrize("own_keys", [False, True])
def test_index_scores_weigh_rectified_products(
    monkeypatch: pytest.MonkeyPatch, workspace: int, own_keys: bool
) -> None:
    monkeypatch.setattr(reference, "WORKSPACE_BYTES", workspace)
    q, weights = normal(5, 4, 8), normal(5, 4, seed=1)
    keys = normal(5, 11, 8, seed=2) if own_keys else normal(11, 8, seed=2)
    products = torch.einsum("thd,tnd->thn", q, keys.expand(5, 11, 8))
    want = (products.clamp_min(0) * weights.unsqueeze(2)).sum(1)
    torch.testing.assert_close(reference.index_scores(q, weights, keys), want, **CLOSE)


def test_pooling_skips_rows_gated_with_minus_infinity() -> None:
    values, gates = normal(3, 6, 4), normal(3, 6, 4, seed=1)
    gates[:, :2] = -math.inf
    want = (gates[:, 2:].softmax(1) * values[:, 2:]).sum(1)
    torch.testing.assert_close(reference.pool_rows(values, gates), want, **CLOSE)


def test_hyper_connection_collapses_and_expands_as_published() -> None:
    """mHC equations one token at a time, in float64."""
    n, d, eps = 4, 6, 1e-6
    streams, out = normal(5, n, d), normal(5, d, seed=1)
    fn, base, scale = normal(24, n * d, seed=2), normal(24, seed=3), normal(3, seed=4)
    x, expand, mix = reference.hc_pre(
        streams, fn, base, scale, norm_eps=eps, eps=eps, iterations=20
    )
    got = reference.hc_post(out, streams, expand, mix)
    for t in range(5):
        u = streams[t].double().flatten()
        z = fn.double() @ (u / (u.square().mean() + eps).sqrt())
        a = torch.sigmoid(scale[0] * z[:4] + base[:4]) + eps
        p = 2 * torch.sigmoid(scale[1] * z[4:8] + base[4:8])
        m = (scale[2] * z[8:] + base[8:]).view(n, n).softmax(1) + eps
        m = m / (m.sum(0, keepdim=True) + eps)
        for _ in range(19):
            m = m / (m.sum(1, keepdim=True) + eps)
            m = m / (m.sum(0, keepdim=True) + eps)
        torch.testing.assert_close(x[t].double(), (a.unsqueeze(1) * streams[t]).sum(0), **CLOSE)
        for k in range(n):
            want = p[k] * out[t] + (m[:, k].unsqueeze(1) * streams[t]).sum(0)
            torch.testing.assert_close(got[t, k].double(), want, **CLOSE)


def test_mixing_matrix_is_nearly_doubly_stochastic() -> None:
    fn, base, scale = normal(24, 24), normal(24, seed=1), normal(3, seed=2)
    _, _, mix = reference.hc_pre(
        normal(9, 4, 6, seed=3), fn, base, scale, norm_eps=1e-6, eps=1e-6, iterations=20
    )
    ones = torch.ones(9, 4)
    torch.testing.assert_close(mix.sum(1), ones, rtol=0, atol=1e-5)
    torch.testing.assert_close(mix.sum(2), ones, rtol=0, atol=1e-2)
