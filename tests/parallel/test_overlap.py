"""When a ring hides its transfers: the published conditions, and a simulated ring."""

import math
from dataclasses import replace

import pytest

from kllm.parallel.link import Link
from kllm.parallel.overlap import (
    AttentionShape,
    Phase,
    PromptChunk,
    Setting,
    Times,
    choose_cp_kind,
    crossings,
    hiding_bandwidth,
    hiding_rows,
    pass_q_share,
    predict,
    predict_prompt,
    prompt_chunks,
)

FLOPS = 600e12
H, G, D = 64, 8, 128
NVLINK, NETWORK = (Link(latency_s=0.0, bytes_per_s=b) for b in (400e9, 50e9))


def stored(nbytes: float) -> dict[str, float]:
    return {"bfloat16": nbytes, "fp8": nbytes / 2}


GQA = Phase(
    name="kv",
    entry_bytes=stored(2 * G * D * 2),
    pair_flops=4.0 * H * D,
    query_width=H * D,
    split_entries=True,
)
LATENT = Phase(
    name="latents",
    entry_bytes=stored(576 * 2),
    pair_flops=2.0 * H * (576 + 512),
    query_width=H * 576,
)
PICKED = Phase(
    name="selected",
    entry_bytes=stored(576 * 2),
    pick_flops=2.0 * H * (576 + 512),
    picks=2048,
    query_width=H * 576,
)


def setting(link: Link = NVLINK, ranks: int = 8) -> Setting:
    return Setting(ranks=ranks, flops=FLOPS, link=link)


@pytest.mark.parametrize(
    ("link", "visible", "rows"),
    [(NVLINK, 1.0, 188), (NVLINK, 0.5, 375), (NETWORK, 1.0, 1500), (NETWORK, 0.5, 3000)],
)
def test_worked_thresholds_of_grouped_query_attention(
    link: Link, visible: float, rows: int
) -> None:
    exact = FLOPS * G * 2 / (2 * H * link.bytes_per_s * visible)  # C G e / (2 H B)
    assert math.ceil(exact) == rows
    for tokens in (1e3, 1e6):  # what a block holds does not matter
        found = hiding_rows(GQA, block_tokens=tokens, setting=setting(link), visible=visible)
        assert found == pytest.approx(exact)


def test_pass_q_sends_less_for_few_new_tokens() -> None:
    assert pass_q_share(GQA, setting()) == pytest.approx(2 * G / H)
    assert pass_q_share(LATENT, setting()) == pytest.approx(1 / H), "all heads share an entry"
    packed = replace(setting(), kv_dtype="fp8")
    assert pass_q_share(GQA, packed) == pytest.approx(G / H)
    grouped = replace(LATENT, tokens_per_entry=4)
    assert pass_q_share(grouped, setting()) == pytest.approx(1 / H / 4)
    every_head = replace(GQA, entry_bytes=stored(2 * H * D * 2))
    assert pass_q_share(every_head, setting()) == 1
    # TP cuts queries by heads, and entries where heads have their own.
    cut = replace(setting(), tp=4)
    assert pass_q_share(GQA, cut) == pytest.approx(2 * G / H)
    assert pass_q_share(LATENT, cut) == pytest.approx(4 / H)


def test_a_latent_needs_far_fewer_rows_than_its_heads_would() -> None:
    rows = hiding_rows(LATENT, block_tokens=1e5, setting=setting())
    assert rows == pytest.approx(FLOPS * 576 * 2 / (2 * H * 1088 * 400e9))  # 12.4
    # Expanded, keys and values of each head are made from the latents on each rank: work that
    # hides transfers by itself once it takes longer than they do.
    expanded = replace(LATENT, pair_flops=2.0 * H * 512, entry_flops=2.0 * H * 448 * 512)
    assert hiding_rows(expanded, block_tokens=1e5, setting=setting()) == 0
    assert hiding_rows(expanded, block_tokens=1e5, setting=setting(NETWORK)) == 0
    slow = setting(Link(latency_s=0.0, bytes_per_s=5e9))
    assert hiding_rows(expanded, block_tokens=1e5, setting=slow) > 0


def test_a_fixed_selection_needs_more_rows_the_longer_the_context() -> None:
    near, far = (
        hiding_rows(PICKED, block_tokens=tokens, setting=setting()) for tokens in (1e4, 1e5)
    )
    assert far == pytest.approx(10 * near)


def test_the_threshold_is_where_a_step_and_its_transfer_take_the_same_time() -> None:
    link = Link(latency_s=20e-6, bytes_per_s=50e9)
    for phase in (GQA, LATENT, PICKED, replace(GQA, entry_flops=1e5)):
        n, cached = 4, 100_000
        rows = hiding_rows(
            phase, block_tokens=(cached + 8000) / n, setting=setting(link, n), visible=1.0
        )
        chunk = PromptChunk(new=8000, cached=cached)
        needed = hiding_bandwidth(phase, chunk, setting(link, n))
        fast_enough = link.bytes_per_s >= needed
        assert fast_enough == (chunk.new / n * chunk.visible >= rows)


def test_latency_alone_can_take_longer_than_a_step() -> None:
    slow = setting(Link(latency_s=1.0, bytes_per_s=1e12))
    assert hiding_bandwidth(GQA, PromptChunk(new=64), slow) == math.inf


def simulate_ring(phase: Phase, chunk: PromptChunk, at: Setting) -> float:
    """A ring in which each rank computes on a block while the next one arrives."""
    n = at.ranks
    pairs = chunk.new / n * (chunk.new + chunk.cached) / n * chunk.visible
    compute = pairs * phase.pair_flops / at.flops + at.call_s
    size = phase.entry_bytes[at.kv_dtype] * (chunk.new + chunk.cached) / n
    computed, arrived = 0.0, 0.0
    for hop in range(n):
        start = max(computed, arrived)  # this block is here and the computation is free
        computed = start + compute
        if hop < n - 1:  # its buffer is sent on from the moment it is used
            arrived = start + at.link.latency_s + size / at.link.bytes_per_s
    return computed


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("cached", [0, 500_000])
@pytest.mark.parametrize("link", [NVLINK, NETWORK, Link(latency_s=1e-3, bytes_per_s=1e9)])
def test_predicted_times_are_those_of_a_simulated_ring(ranks: int, cached: int, link: Link) -> None:
    chunk = PromptChunk(new=8192, cached=cached)
    at = replace(setting(link, ranks), call_s=5e-6)
    times = predict(AttentionShape(name="GQA", layers=(0,), phases=(GQA,)), chunk, at)
    assert times.ring == pytest.approx(simulate_ring(GQA, chunk, at))
    if ranks == 1:
        assert times.all_gather == pytest.approx(times.ring)
        assert times.replicated == pytest.approx(times.ring)
        assert times.ring_transfer == 0
    else:
        for new_and_cached, found in (
            (8192 + cached, times.all_gather),
            (8192, times.replicated),  # the prefix is there
        ):
            moved = new_and_cached * (ranks - 1) / ranks * GQA.entry_bytes["bfloat16"]
            gather = link.latency_s + moved / link.bytes_per_s
            assert found == pytest.approx(gather + times.compute + at.call_s)


def test_the_cheaper_form_of_a_latent_is_predicted() -> None:
    expanded = replace(LATENT, pair_flops=2.0 * H * 512, entry_flops=2.0 * H * 448 * 512)
    kind = AttentionShape(name="MLA", layers=(0,), phases=(LATENT,), other_form=expanded)
    plain, other = (replace(kind, phases=(phase,), other_form=None) for phase in (LATENT, expanded))
    few, many = PromptChunk(new=64, cached=10_000), PromptChunk(new=65_536)
    assert predict(kind, few, setting()) == predict(plain, few, setting())
    assert predict(kind, many, setting()) == predict(other, many, setting())


def test_tensor_parallelism_cuts_work_and_heads() -> None:
    at, chunk = setting(), PromptChunk(new=4096)
    gqa = AttentionShape(name="GQA", layers=(0,), phases=(GQA,))
    mla = AttentionShape(name="MLA", layers=(0,), phases=(LATENT,))
    for kind, transfer in ((gqa, 4), (mla, 1)):  # a latent is whole on every rank
        whole, cut = (predict(kind, chunk, replace(at, tp=tp)) for tp in (1, 4))
        assert whole.compute == pytest.approx(4 * cut.compute)
        assert whole.ring_transfer == pytest.approx(transfer * cut.ring_transfer)


def test_chunks_of_a_prompt_see_what_came_before() -> None:
    assert list(prompt_chunks(2500, 1000, 100)) == [
        PromptChunk(new=1000, cached=100),
        PromptChunk(new=1000, cached=1100),
        PromptChunk(new=500, cached=2100),
    ]
    kind = (AttentionShape(name="GQA", layers=(0, 1, 2), phases=(GQA,)),)
    whole = predict_prompt(kind, setting(), tokens=4096)
    parts = predict_prompt(kind, setting(), tokens=4096, chunk_tokens=512)
    assert parts.compute == pytest.approx(whole.compute)  # causal work does not depend on the cut
    one = predict(kind[0], PromptChunk(new=4096), setting())
    assert whole.ring == pytest.approx(3 * one.ring)


def test_the_choice_is_the_sharded_kind_with_less_predicted_time() -> None:
    kind = (AttentionShape(name="GQA", layers=(0,), phases=(GQA,)),)
    free = setting(NVLINK)
    assert choose_cp_kind(kind, free, tokens=65_536) == "ring"
    # Both move the same bytes, and a ring computes meanwhile even where that hides a part only.
    assert choose_cp_kind(kind, setting(NETWORK), tokens=512, cached=500_000) == "ring"
    # What it has more is calls.
    late = setting(Link(latency_s=100e-6, bytes_per_s=400e9))
    assert choose_cp_kind(kind, late, tokens=512) == "all_gather"
    assert choose_cp_kind(kind, late, tokens=65_536) == "ring"
    assert choose_cp_kind(kind, replace(free, call_s=1e-3), tokens=4096) == "all_gather"
    times = predict(kind[0], PromptChunk(new=512, cached=500_000), setting(NETWORK))
    assert times.best == "ring"
    assert times.replicated < times.ring, "what is there already need not travel"


def test_break_even_points_are_where_both_kinds_take_the_same_time() -> None:
    kind = (AttentionShape(name="GQA", layers=(0,), phases=(GQA,)),)
    at = replace(setting(Link(latency_s=20e-6, bytes_per_s=400e9)), call_s=5e-6)

    def by_tokens(tokens: float) -> Times:
        return predict_prompt(kind, at, tokens=round(tokens))

    def by_bandwidth(bandwidth: float) -> Times:
        link = replace(at.link, bytes_per_s=bandwidth)
        prompt = {"tokens": 4096, "cached": 200_000}
        return predict_prompt(kind, replace(at, link=link), **prompt)  # type: ignore[arg-type]

    (tokens,) = crossings(by_tokens, 256, 1 << 20)
    assert (tokens.below, tokens.above) == ("all_gather", "ring")
    assert by_tokens(tokens.at * 0.95).best == "all_gather"
    assert by_tokens(tokens.at * 1.05).best == "ring"
    found = crossings(by_bandwidth, 1e9, 1e14)
    assert [crossing.below for crossing in found] == ["ring"], "there is little left to hide"
    for crossing in found:
        times = by_bandwidth(crossing.at)
        assert times.ring == pytest.approx(times.all_gather, rel=1e-6)
    assert crossings(by_tokens, tokens.at * 2, 1 << 20) == ()
