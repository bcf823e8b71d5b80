"""Layouts as text, the groups of their ranks, and which of them a model allows."""

import pytest

from kllm.config import ParallelConfig
from kllm.errors import ConfigError
from kllm.parallel import layout
from kllm.parallel.layout import Dimensions, Place, parse, problem, short_name

GLM = Dimensions(
    layers=78,
    cuts=(("attention heads", 64), ("vocabulary entries", 154880)),
    experts=256,
    expert_columns=2048,
)
V4 = Dimensions(
    layers=43,
    cuts=(("attention heads", 64), ("output groups", 8), ("vocabulary entries", 129280)),
    experts=256,
    expert_columns=2048,
)
DENSE = Dimensions(layers=3, cuts=(("attention heads", 6), ("KV heads", 2)))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("tp=1", "1 rank"),
        ("tp=2", "tp2"),
        ("tp=2,dp=4,ep=8", "dp4·tp2+ep8"),
        ("ep=4, dp=4", "dp4+ep4"),
        ("pp=2,tp=2", "pp2·tp2"),
        ("cp=4,cp_kind=ring", "cp4 ring"),
        ("cp=2,tp=2,cp_kind=all-gather", "cp2 all-gather·tp2"),
        ("cp=2", "cp2"),
    ],
)
def test_text_becomes_a_layout_with_a_short_name(text: str, name: str) -> None:
    assert short_name(parse(text)) == name


def test_parsing_sets_every_field() -> None:
    text = "tp=2,dp=3,ep=6,cp=1,pp=5,cp_kind=ring,ep_backend=deep_ep,redundant_experts=2"
    assert parse(text) == ParallelConfig(
        tp=2, dp=3, ep=6, pp=5, cp_kind="ring", ep_backend="deep_ep", redundant_experts=2
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read at ''"),
        ("tp", "cannot be read at 'tp'"),
        ("tp=2,xp=3", "cannot be read at 'xp=3'"),
        ("tp=two", "whole number for tp, got 'two'"),
        ("tp=0", "tp must be at least 1"),
        ("tp=2,tp=4", "names tp twice"),
        ("cp=2,cp_kind=star", "unknown cp_kind 'star'"),
        ("tp=2,dp=2,ep=3", "ep 3 does not suit"),
    ],
)
def test_text_that_is_no_layout_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("dims", "text", "why"),
    [
        (GLM, "tp=3", "tp 3 does not divide the 64 attention heads; use a tp of 1, 2, 4"),
        (V4, "tp=16", "tp 16 does not divide the 8 output groups; use a tp of 1, 2, 4, 8"),
        (DENSE, "tp=3", "tp 3 does not divide the 2 KV heads; use a tp of 1, 2"),
        (DENSE, "dp=2,ep=2", "the model has no experts"),
        (DENSE, "pp=4", "the model has 3 layers; use a pp of at most 3"),
        (GLM, "dp=6,ep=6", "ep 6 does not divide the 256 experts; .* redundant_experts=2"),
        (GLM, "dp=6,ep=6,redundant_experts=1", r"257 experts \(1 of them .*redundant_experts=2"),
        (GLM, "dp=2,ep=2,redundant_experts=258", "use at most 256"),
        (GLM, "dp=2,ep=2,redundant_experts=999", "use at most 256"),
    ],
)
def test_an_impossible_layout_is_explained(dims: Dimensions, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        layout.check(dims, parse(text))


def test_the_advice_of_a_refusal_can_be_followed() -> None:
    assert problem(GLM, parse("dp=6,ep=6,redundant_experts=2")) is None
    assert problem(GLM, parse("dp=2,ep=2,redundant_experts=256")) is None


def test_experts_are_cut_by_columns_only_without_expert_parallelism() -> None:
    odd = Dimensions(layers=2, cuts=(("attention heads", 8),), experts=8, expert_columns=6)
    assert problem(odd, parse("tp=4,ep=4")) is None
    assert "tp 4 does not divide the 6 expert columns; use a tp of 1, 2" in str(
        problem(odd, parse("tp=4"))
    )


def test_all_valid_layouts_are_found_once() -> None:
    found = layout.layouts(GLM, 8)
    assert len(set(found)) == len(found)
    assert all(one.world == 8 and problem(GLM, one) is None for one in found)
    names = {short_name(one) for one in found}
    assert {"tp8", "dp8", "dp8+ep8", "dp4·tp2+ep8", "cp8 ring", "cp8 all-gather+ep8"} <= names
    assert {"pp8", "pp2·dp2·tp2+ep4", "dp2·cp2 ring·tp2+ep2"} <= names
    brute = [
        ParallelConfig(tp=tp, dp=8 // (tp * cp * pp), ep=ep, cp=cp, pp=pp, cp_kind=kind)
        for tp in range(1, 9)
        for cp in range(1, 9)
        for pp in range(1, 9)
        if 8 % (tp * cp * pp) == 0
        for ep in range(1, 9)
        if ep == 1 or (ep % tp == 0 and (8 // pp) % ep == 0)
        for kind in (("ring", "all_gather", "replicated") if cp > 1 else ("auto",))
    ]
    assert set(found) == set(brute)


def test_a_model_without_experts_has_no_expert_layouts() -> None:
    assert all(one.ep == 1 and one.tp <= 2 for one in layout.layouts(DENSE, 4))


def test_groups_partition_the_ranks_and_agree_with_places() -> None:
    at = parse("tp=2,dp=3,cp=2,pp=2,ep=4")
    places = [layout.place(at, rank) for rank in range(at.world)]
    assert len(set(places)) == at.world == 24
    assert [layout.rank_of(at, where) for where in places] == list(range(24))
    for groups, axis in (
        (layout.tp_groups(at), "tp"),
        (layout.cp_groups(at), "cp"),
        (layout.pp_groups(at), "pp"),
    ):
        assert sorted(rank for group in groups for rank in group) == list(range(24))
        for group in groups:
            assert [getattr(places[rank], axis) for rank in group] == list(range(len(group)))
            others = [
                {f: getattr(places[r], f) for f in Place.__slots__ if f != axis} for r in group
            ]
            assert all(other == others[0] for other in others)
    assert layout.ep_groups(at)[1] == (4, 5, 6, 7)
    assert all(len({places[rank].pp for rank in group}) == 1 for group in layout.ep_groups(at))
