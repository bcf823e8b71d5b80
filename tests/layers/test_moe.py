"""Routers and routed experts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm import kernels
from kllm.errors import ConfigError
from kllm.kernels import moe_grouped, reference
from kllm.layers.experts import ExpertRanks, RoutedExperts
from kllm.layers.mlp import GatedMLP
from kllm.layers.moe import HashRouter, MoE, Routing, ScoreRouter
from kllm.parallel.expert_placement import in_order
from kllm.parallel.single import SingleComm
from tests.layers.expert_steps import step
from tests.tolerances import GEMM_DISTANCE

STEP = step()
SIGMOID = Routing(num_experts=8, top_k=2, scoring="sigmoid", scaling=2.5)


def randomise(module: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data.normal_(0, 0.3, generator=generator)


def expert_inputs(
    dtype: torch.dtype = torch.float32, tokens: int = 13
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    ids = torch.rand(tokens, 8, generator=generator).argsort(1)[:, :3]
    weights = torch.rand(tokens, 3, generator=generator)
    return normal(tokens, 16), ids, weights, normal(8, 48, 16), normal(8, 16, 24)


def dense_moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    limit: float | None,
) -> torch.Tensor:
    """Every expert for every token, then the chosen ones: float64."""
    gate, up = torch.einsum("td,eid->tei", x.double(), w13.double()).chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    every = torch.einsum("tei,edi->ted", torch.nn.functional.silu(gate) * up, w2.double())
    return (every.gather(1, ids.unsqueeze(2).expand(-1, -1, 16)) * weights.unsqueeze(2)).sum(1)


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_moe_equals_the_dense_sum_over_experts(tokens: int, limit: float | None) -> None:
    inputs = expert_inputs(tokens=tokens)
    got = kernels.moe(*inputs, limit)
    torch.testing.assert_close(got.double(), dense_moe(*inputs, limit), rtol=1e-5, atol=1e-5)


def test_ranges_of_experts_add_up_to_all_of_them() -> None:
    x, ids, weights, w13, w2 = expert_inputs()
    parts = [kernels.moe(x, ids, weights, w13[i : i + 4], w2[i : i + 4], 0.5, i) for i in (0, 4)]
    whole = kernels.moe(x, ids, weights, w13, w2, 0.5)
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("first_expert", [0, 4])
def test_grouped_products_agree_with_the_loop_over_experts(
    first_expert: int, counted: bool
) -> None:
    """Half of the experts, so that some tokens belong to another rank."""
    x, ids, weights, w13, w2 = expert_inputs(torch.bfloat16)
    half = slice(first_expert, first_expert + 4)
    args = (x, ids, weights, w13[half], w2[half], 0.5, first_expert)
    pairs = int((ids // 4 == first_expert // 4).sum()) if counted else None
    got, want = moe_grouped.moe(*args, pairs).double(), reference.moe(*args).double()
    distance = 1 - 2 * (got * want).sum() / (got.square().sum() + want.square().sum())
    assert distance < GEMM_DISTANCE[torch.bfloat16]


@given(tokens=st.integers(1, 1024))
@settings(max_examples=40, deadline=None)
def test_no_number_of_tokens_is_special_to_experts(tokens: int) -> None:
    """Not to those that are chosen by few, nor at the edge of a group."""
    inputs = expert_inputs(torch.bfloat16, tokens)
    want = dense_moe(*inputs, None)
    for found in (kernels.moe(*inputs, None), moe_grouped.moe(*inputs, None, 0)):
        got = found.double()
        distance = 1 - 2 * (got * want).sum(1) / (got.square().sum(1) + want.square().sum(1))
        assert distance.max() < 1e-2, "a token that is lost is 1 away"


def test_grouped_products_of_no_pair_are_zero() -> None:
    x, ids, weights, w13, w2 = expert_inputs(torch.bfloat16)
    nobody = torch.full_like(ids, -1)
    assert not moe_grouped.moe(x, nobody, weights, w13, w2, 0.5, 0, 0).any()
    assert not moe_grouped.moe(x, nobody, weights, w13, w2, 0.5, 0).any()


def test_router_weights_are_normalised_scores_of_the_chosen() -> None:
    router = ScoreRouter(16, SIGMOID)
    randomise(router)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    ids, weights = router(x, torch.zeros(5, dtype=torch.int64))
    scores = torch.sigmoid(x @ router.weight.t())
    for row in range(5):
        best = (scores[row] + router.bias).topk(2).indices
        assert set(ids[row].tolist()) == set(best.tolist())
        want = scores[row, ids[row]] / scores[row, ids[row]].sum() * 2.5
        torch.testing.assert_close(weights[row], want)


def test_bias_decides_the_choice_and_never_the_weight() -> None:
    router = ScoreRouter(16, SIGMOID)
    randomise(router)
    router.bias.data.zero_()
    router.bias.data[[3, 6]] = 100.0
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
    ids, weights = router(x, torch.zeros(4, dtype=torch.int64))
    assert (ids.sort(dim=1).values == torch.tensor([3, 6])).all()
    torch.testing.assert_close(weights.sum(1), torch.full((4,), 2.5))
    assert weights.max() < 2.5


def test_grouped_routing_stays_inside_the_best_groups() -> None:
    routing = Routing(
        num_experts=8, top_k=2, scoring="sigmoid", scaling=1.0, groups=4, kept_groups=1
    )
    router = ScoreRouter(16, routing)
    randomise(router)
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(4))
    ids, _ = router(x, torch.zeros(32, dtype=torch.int64))
    choice = torch.sigmoid(x @ router.weight.t()) + router.bias
    best_group = choice.view(32, 4, 2).sum(-1).argmax(-1)
    assert (ids // 2 == best_group.unsqueeze(1)).all()


@pytest.mark.parametrize("groups", [1, 4])
def test_no_tokens_are_routed_nowhere(groups: int) -> None:
    routing = Routing(
        num_experts=8, top_k=2, scoring="sigmoid", scaling=1.0, groups=groups, kept_groups=1
    )
    router = ScoreRouter(16, routing)
    randomise(router)
    ids, weights = router(torch.empty(0, 16), torch.empty(0, dtype=torch.int64))
    assert ids.shape == weights.shape == (0, 2)


def test_hash_router_looks_up_the_token() -> None:
    routing = Routing(num_experts=8, top_k=2, scoring="sqrtsoftplus", scaling=1.5)
    router = HashRouter(16, routing, vocab_size=11)
    randomise(router)
    generator = torch.Generator().manual_seed(5)
    router.tid2eid.data = torch.rand(11, 8, generator=generator).argsort(1)[:, :2]
    x, tokens = torch.randn(6, 16, generator=generator), torch.tensor([1, 10, 1, 0, 5, 9])
    ids, weights = router(x, tokens)
    assert torch.equal(ids, router.tid2eid[tokens])
    chosen = torch.nn.functional.softplus(x @ router.weight.t()).sqrt().gather(1, ids)
    torch.testing.assert_close(weights, 1.5 * chosen / chosen.sum(1, keepdim=True))


def test_block_adds_the_shared_expert() -> None:
    comm = SingleComm()
    ranks = ExpertRanks.single()
    experts = RoutedExperts(16, 12, in_order(8, 0, 1), ranks, 0.5)
    block = MoE(ScoreRouter(16, SIGMOID), experts, GatedMLP(16, 12, comm, 0.5), ranks)
    randomise(block)
    x, tokens = torch.randn(3, 16), torch.zeros(3, dtype=torch.int64)
    shared, block.shared = block.shared, None
    assert shared is not None
    routed_only = block(x, tokens, STEP)
    block.shared = shared
    torch.testing.assert_close(block(x, tokens, STEP), routed_only + shared(x))


def test_hidden_features_that_do_not_divide_are_refused() -> None:
    class ThreeRanks(SingleComm):
        size = 3

    ranks = ExpertRanks(ThreeRanks(), SingleComm())
    with pytest.raises(ConfigError, match="hidden features of an expert = 16 cannot be split"):
        RoutedExperts(16, 16, in_order(8, 0, 1), ranks, None)
