"""Every way of spreading experts over ranks gives what one rank gives. Debug checks are on."""

import re
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kllm import env
from kllm.config import ParallelConfig
from kllm.errors import ConfigError, DependencyError
from kllm.layers.experts import ExpertRanks, RoutedExperts
from kllm.layers.mlp import GatedMLP
from kllm.layers.moe import HashRouter, MoE, Routing, ScoreRouter
from kllm.models.base import Groups
from kllm.parallel import expert_deep_ep
from kllm.parallel.emulated import EmulatedComm
from kllm.parallel.expert_backends import Backends
from kllm.parallel.link import Link
from kllm.parallel.single import SingleComm
from tests.layers.expert_steps import step
from tests.parallel import fake_deep_ep
from tests.parallel.thread_layouts import run_layout
from tests.tolerances import TOLERANCE

EXPERTS, DIM, HIDDEN, VOCAB = 8, 16, 12, 23
ROUTING = Routing(num_experts=EXPERTS, top_k=3, scoring="sigmoid", scaling=2.5)
LAYOUTS = {
    "tp2": ParallelConfig(tp=2),
    "tp2 ep2": ParallelConfig(tp=2, ep=2),
    "dp2 ep2": ParallelConfig(dp=2, ep=2),
    "dp4 ep4": ParallelConfig(dp=4, ep=4),
    "dp4 ep2": ParallelConfig(dp=4, ep=2),
    "dp2 tp2 ep4": ParallelConfig(dp=2, tp=2, ep=4),
    "dp2 tp2 ep2": ParallelConfig(dp=2, tp=2, ep=2),
}
TOKENS = {"uneven": (7, 3, 12, 5), "idle": (9, 0, 0, 1), "one": (1, 1, 1, 1), "none": (0,) * 4}


@pytest.fixture(autouse=True)
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)


def block(groups: Groups, hashed: bool) -> MoE:
    """A MoE block with uninitialised weights."""
    router = HashRouter(DIM, ROUTING, VOCAB) if hashed else ScoreRouter(DIM, ROUTING)
    ranks = ExpertRanks(groups.ffn, groups.ep, groups.experts.backend)
    placement = groups.experts.placement(0, EXPERTS, groups.ep.size)
    experts = RoutedExperts(DIM, HIDDEN, placement, ranks, 0.5)
    return MoE(router, experts, GatedMLP(DIM, HIDDEN, groups.ffn, 0.5), ranks)


def whole(hashed: bool) -> MoE:
    """The block on one rank, with weights."""
    generator = torch.Generator().manual_seed(0)
    model = block(Groups.single(), hashed)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.normal_(0, 0.3, generator=generator)
    if isinstance(model.router, HashRouter):
        chosen = torch.rand(VOCAB, EXPERTS, generator=generator).argsort(1)
        model.router.tid2eid.data = chosen[:, : ROUTING.top_k]
    return model


def rank_block(model: MoE, groups: Groups) -> MoE:
    """One rank's block with its part of the weights of `model`."""
    part = block(groups, isinstance(model.router, HashRouter))
    part.router.load_state_dict(model.router.state_dict())

    def cut(stacked: Tensor, down: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor]:
        gate, up = (half.chunk(size, dim=-2)[rank] for half in stacked.chunk(2, dim=-2))
        return torch.cat((gate, up), dim=-2), down.chunk(size, dim=-1)[rank]

    held, comm = list(part.experts.held), part.experts.comm
    w13, w2 = cut(model.experts.w13[held], model.experts.w2[held], comm.rank, comm.size)
    part.experts.w13.copy_(w13)
    part.experts.w2.copy_(w2)
    assert model.shared is not None
    assert part.shared is not None
    tp = groups.ffn
    up, down = cut(model.shared.gate_up.weight, model.shared.down.weight, tp.rank, tp.size)
    part.shared.gate_up.weight.copy_(up)
    part.shared.down.weight.copy_(down)
    return part


def batch(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Activations [tokens, DIM] and token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (tokens,), generator=generator)
    return torch.randn(tokens, DIM, generator=generator), ids


def check(layout: ParallelConfig, counts: tuple[int, ...], hashed: bool, decode: bool) -> None:
    model = whole(hashed)
    batches = [batch(n, seed=i) for i, n in enumerate(counts[: layout.dp])]
    want = [model(*each, step()) for each in batches]
    by_rank = [len(batches[rank // layout.tp][0]) for rank in range(layout.world)]

    def work(rank: int, groups: Groups) -> Tensor:
        first = rank // layout.ep * layout.ep
        peers = tuple(by_rank[first : first + layout.ep])
        part = rank_block(model, groups)
        return part(*batches[rank // layout.tp], step(peers, decode))

    tolerance = TOLERANCE[torch.float32]
    for rank, got in enumerate(run_layout(layout, work)):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want[rank // layout.tp], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("backend", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_spread_experts_give_what_one_rank_gives(name: str, backend: str, tokens: str) -> None:
    check(replace(LAYOUTS[name], ep_backend=backend), TOKENS[tokens], hashed=False, decode=False)


@pytest.mark.parametrize("backend", ["auto", "all_to_all", "all_gather"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_hash_routers_get_the_ids_of_the_tokens_they_route(name: str, backend: str) -> None:
    layout = replace(LAYOUTS[name], ep_backend=backend)
    check(layout, TOKENS["uneven"], hashed=True, decode=False)


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_automatic_choice_gives_what_one_rank_gives(
    name: str, tokens: str, decode: bool
) -> None:
    check(LAYOUTS[name], TOKENS[tokens], hashed=False, decode=decode)


@pytest.mark.parametrize("backend", ["auto", "all_to_all", "all_gather"])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if "ep" in name])
def test_copies_of_experts_change_nothing(name: str, backend: str) -> None:
    layout = replace(LAYOUTS[name], ep_backend=backend, redundant_experts=4)
    check(layout, TOKENS["uneven"], hashed=False, decode=False)


def test_counts_are_those_of_the_tokens_that_a_rank_routes() -> None:
    layout = ParallelConfig(dp=2, tp=2, ep=4, ep_backend="all_to_all", redundant_experts=4)
    model, each = whole(hashed=True), batch(11, seed=0)
    counter = model.count_routing()
    model(*each, step())
    model(*each, step())

    def work(rank: int, groups: Groups) -> list[int]:
        part = rank_block(model, groups)
        counts = part.count_routing()
        part(*each, step((11,) * 4))
        return counts.read()

    found = torch.tensor(run_layout(layout, work))
    assert counter.read() == found.sum(dim=0).tolist(), "two batches, and each of them once"
    assert sum(counter.read()) == 2 * 11 * ROUTING.top_k
    assert (found.sum(dim=1) == torch.tensor([6, 5, 6, 5]) * ROUTING.top_k).all()


def emulated(size: int, rank: int) -> EmulatedComm:
    link = Link(latency_s=0.0, bytes_per_s=1e15)
    return EmulatedComm(link, size=size, rank=rank, device=torch.device("cpu"))


def run_slice(
    backend: str, decode: bool, tokens: int, tp: int = 2, redundant: int = 0
) -> EmulatedComm:
    """Run one of 4 expert ranks alone; its communicator of experts."""
    one, inner, ep = SingleComm(), emulated(tp, tp - 1), emulated(4, 3)
    groups = Groups(inner, inner, inner, ep, one, one)
    options = replace(groups.experts, backend=backend, redundant=redundant)
    part = block(replace(groups, experts=options), hashed=False)
    for parameter in part.parameters():
        parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    y = part(*batch(tokens, seed=0), step((tokens,) * 4, decode))
    assert y.shape == (tokens, DIM)
    assert y.isfinite().all()
    return ep


@pytest.mark.parametrize("redundant", [0, 4])
@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("backend", ["auto", "all_to_all", "all_gather"])
def test_one_rank_of_a_larger_group_runs_alone(
    backend: str, decode: bool, tokens: int, redundant: int
) -> None:
    ep = run_slice(backend, decode, tokens, redundant=redundant)
    gathers = backend == "all_gather" or (backend == "auto" and decode)
    # With its counts, in debug mode a sum; tokens and routing; answers.
    exact = {"all_to_all": 4, "all_reduce": 1}
    assert ep.calls == ({"all_gather": 2, "reduce_scatter": 1} if gathers else exact)


def test_ranks_that_hold_the_same_tokens_exchange_none() -> None:
    ep = run_slice("auto", decode=False, tokens=9, tp=4)
    assert not ep.calls


def backends(name: str, **other: object) -> Backends:
    arguments = {"per_rank": 2, "dim": 4096, "top_k": 8, "device": torch.device("cuda")}
    return Backends(
        name,
        emulated(8, 0),
        **{**arguments, "dtype": torch.bfloat16, **other},  # type: ignore
    )


@pytest.fixture
def deep_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_deep_ep, "installed", lambda: True)
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deep_ep)  # type: ignore[arg-type]


def test_deep_ep_is_reported_when_it_is_missing() -> None:
    with pytest.raises(DependencyError, match="deep_ep is not installed; install DeepEP, or use"):
        backends("deep_ep")


@pytest.mark.usefixtures("deep_ep")
@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"device": torch.device("cpu")}, "between GPUs and this rank runs on cpu"),
        ({"dtype": torch.float16}, "bfloat16 tokens and the model runs in torch.float16"),
        ({}, "needs all ranks of the layout and here one stands for them"),
    ],
)
def test_deep_ep_says_why_it_cannot_be_used(other: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        backends("deep_ep", **other)
    backends("auto", **other)  # does without


@pytest.mark.usefixtures("deep_ep")
@pytest.mark.parametrize(
    ("size", "dim", "top_k", "why"),
    [
        (6, 4096, 8, "groups of 2, 4, 8, .* and not 6"),
        (8, 4000, 8, "hidden sizes of 2048, .* and not 4000"),
        (8, 4096, 12, "experts a token of 1, .* and not 12"),
    ],
)
def test_deep_ep_says_which_sizes_it_has(size: int, dim: int, top_k: int, why: str) -> None:
    comm = emulated(size, 0)
    comm.group = object()  # type: ignore[attr-defined]
    device = torch.device("cuda")
    found = expert_deep_ep.problem(comm, dim, top_k, device, torch.bfloat16)
    assert found is not None
    assert re.search(why, found)
