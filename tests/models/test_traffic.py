"""Computed transfers against those that networks really make, counted by an emulated link."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from kllm.config import ParallelConfig
from kllm.models import deepseek_v4, glm_moe_dsa, llama
from kllm.models.base import Groups, default_device_and_dtype
from kllm.models.random import fill_random
from kllm.models.shape import model_shape
from kllm.parallel.emulated import EmulatedComm
from kllm.parallel.layout import parse
from kllm.parallel.link import Link
from kllm.parallel.overlap import PromptChunk, Setting, predict
from kllm.parallel.single import SingleComm
from kllm.parallel.traffic import Exchange, Step, busiest, expected_destinations, traffic
from tests.models.harness import Harness

INSTANT = Link(latency_s=0.0, bytes_per_s=1e15)
CPU = torch.device("cpu")


def even_vocabulary(family: Any) -> Any:
    config = family.tiny_config()
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return type(config)(**{**fields, "vocab_size": config.vocab_size + config.vocab_size % 2})


@pytest.mark.parametrize(
    ("family", "ep"),
    [(llama, 1), (glm_moe_dsa, 1), (glm_moe_dsa, 2), (deepseek_v4, 1), (deepseek_v4, 2)],
    ids=lambda value: getattr(value, "__name__", f"ep{value}").rpartition(".")[2],
)
def test_tensor_parallel_transfers_are_those_of_the_network(family: Any, ep: int) -> None:
    """Calls and bytes of one rank of two, in a prompt chunk and in a decode step."""
    config = even_vocabulary(family)
    shape = model_shape(family, config)
    tp = EmulatedComm(INSTANT, size=2, device=CPU)
    one = SingleComm()
    with default_device_and_dtype(CPU, torch.float32):
        model = family.build(config, Groups(tp, tp, tp, tp if ep > 1 else one, one, one))
    fill_random(model, family, 0)
    model.freeze()
    harness = Harness(model.eval())
    layout = ParallelConfig(tp=2, ep=ep)
    steps = {
        13: Step(tokens=13, samples=13, prefill=True),  # the harness samples every row
        1: Step.decode(1, context=13),
    }
    for count, step in steps.items():
        tp.calls.clear()
        tp.sent_bytes = 0.0
        harness.step({0: list(range(count))})
        (found,) = traffic(shape, layout, step, element_bytes=4)
        calls: Counter[str] = Counter()
        for exchange in found:
            calls[exchange.collective] += exchange.calls
        assert calls == tp.calls
        assert sum(exchange.sent_bytes for exchange in found) == pytest.approx(tp.sent_bytes)


@pytest.mark.parametrize(("experts", "k", "ranks"), [(256, 8, 8), (16, 4, 4), (8, 2, 8), (8, 8, 2)])
def test_expected_destinations_are_those_of_random_routing(
    experts: int, k: int, ranks: int
) -> None:
    rng = np.random.default_rng(0)
    draws = 20_000
    chosen = rng.random((draws, experts)).argpartition(k - 1, axis=1)[:, :k]
    homes = np.sort(chosen // (experts // ranks), axis=1)
    reached = 1 + (np.diff(homes, axis=1) != 0).sum(axis=1)
    error = reached.std() / math.sqrt(draws)
    expected = expected_destinations(experts, k, ranks)
    assert abs(reached.mean() - expected) <= 5 * error + 1e-12


def named(exchanges: tuple[Exchange, ...]) -> dict[str, Exchange]:
    return {exchange.what: exchange for exchange in exchanges}


def tiny(text: str, step: Step) -> dict[str, Exchange]:
    shape = model_shape(glm_moe_dsa, glm_moe_dsa.tiny_config())
    (stage,) = traffic(shape, parse(text), step)
    return named(stage)


def test_request_dp_with_experts_on_all_ranks_only_dispatches() -> None:
    prompt = tiny("dp=4,ep=4", Step.chunk(100))
    assert set(prompt) == {"dispatch", "routing", "combine", "token counts"}
    reached = expected_destinations(8, 2, 4)
    # 8 layers with experts, hidden 64 in bfloat16, 3 of 4 destinations are other ranks.
    assert prompt["dispatch"].sent_bytes == pytest.approx(8 * 100 * reached * 3 / 4 * 64 * 2)
    decode = tiny("dp=4,ep=4", Step.decode(100))
    assert decode["dispatch"].collective == "all_gather"  # of fixed shape, for a graph
    assert decode["dispatch"].sent_bytes == pytest.approx(8 * 100 * 3 * 64 * 2)


def test_tensor_parallel_ranks_dispatch_their_share_of_the_tokens() -> None:
    alone = tiny("dp=4,ep=4", Step.chunk(100))["dispatch"].sent_bytes
    shared = tiny("dp=2,tp=1,ep=2", Step.chunk(100))
    assert alone > shared["dispatch"].sent_bytes
    shape = model_shape(glm_moe_dsa, even_vocabulary(glm_moe_dsa))
    (stage,) = traffic(shape, parse("dp=2,tp=2,ep=4"), Step.chunk(100))
    assert named(stage)["dispatch"].sent_bytes == pytest.approx(alone / 2)


def test_experts_on_the_ranks_of_the_same_tokens_need_no_dispatch() -> None:
    shape = model_shape(glm_moe_dsa, even_vocabulary(glm_moe_dsa))
    (stage,) = traffic(shape, parse("tp=2,ep=2"), Step.chunk(100))
    assert {exchange.collective for exchange in stage} == {"all_reduce", "all_gather"}


def test_a_prefix_moves_again_unless_it_is_replicated() -> None:
    step = Step.chunk(256, cached=768)
    ring, gather, new = (
        tiny(f"cp=4,cp_kind={kind}", step) for kind in ("ring", "all_gather", "replicated")
    )
    for what in (
        "DSA index keys",
        "DSA selected latents",
        "DSA, shared selection selected latents",
    ):
        assert ring[what].sent_bytes == gather[what].sent_bytes
        assert ring[what].sent_bytes == pytest.approx(4 * new[what].sent_bytes)
        assert ring[what].calls == 3 * gather[what].calls == 3 * new[what].calls
    # 11 layers, 5 of them with an indexer; latents of 40 channels, keys of 16, bfloat16.
    for found, tokens in ((gather, 1024), (new, 256)):
        moved = sum(exchange.sent_bytes for exchange in found.values())
        assert moved == pytest.approx(tokens * 3 / 4 * 2 * (11 * 40 + 5 * 16))
    assert tiny("cp=4,cp_kind=ring", Step.decode(8)) == {}


def test_ring_transfers_agree_with_the_predicted_ring() -> None:
    shape = model_shape(deepseek_v4, deepseek_v4.tiny_config())
    layout, link = parse("cp=4,cp_kind=ring"), Link(latency_s=1e-5, bytes_per_s=1e9)
    (stage,) = traffic(shape, layout, Step.chunk(4096, 4096))
    sent = sum(e.seconds(link) for e in stage if e.collective == "ring_shift")
    setting = Setting(ranks=4, flops=1e12, link=link)
    chunk = PromptChunk(new=4096, cached=4096)
    predicted = sum(
        predict(kind, chunk, setting).times(len(kind.layers)).ring_transfer
        for kind in shape.attention
    )
    assert sent == pytest.approx(predicted)


def test_constant_state_travels_near_the_seams_of_stripes() -> None:
    shape = model_shape(deepseek_v4, deepseek_v4.tiny_config())
    (stage,) = traffic(shape, parse("cp=2,cp_kind=ring"), Step.chunk(256))
    window = named(stage)["window rows"]
    # 4 stripes of 64 tokens: the 7 rows before each of 3 seams, and the newest 8; half are own.
    assert window.sent_bytes == pytest.approx(6 * (3 * 7 + 8) / 2 * 32 * 2)


def test_a_pipeline_sends_the_streams_and_a_selection_that_the_next_stage_shares() -> None:
    glm = model_shape(glm_moe_dsa, glm_moe_dsa.tiny_config())
    stages = traffic(glm, parse("pp=2"), Step.decode(10, context=100))
    # Layers 0-5 and 6-10: layer 6 selects for itself.
    assert named(stages[0])["stage"].sent_bytes == 10 * 64 * 2
    assert named(stages[1]) == {}
    third = traffic(glm, parse("pp=3"), Step.decode(10, context=100))  # 0-3, 4-7: 4 shares
    assert named(third[0])["stage"].sent_bytes == 10 * (64 * 2 + 6 * 8)
    short = traffic(glm, parse("pp=3"), Step.decode(10, context=5))  # nothing to select yet
    assert named(short[0])["stage"].sent_bytes == 10 * 64 * 2
    v4 = model_shape(deepseek_v4, deepseek_v4.tiny_config())
    assert named(traffic(v4, parse("pp=2"), Step.decode(10))[0])["stage"].sent_bytes == (
        10 * 4 * 64 * 2
    )


def test_the_busiest_stage_takes_the_longest() -> None:
    glm = model_shape(glm_moe_dsa, glm_moe_dsa.tiny_config())
    stages = traffic(glm, parse("pp=3"), Step.decode(10, context=100))
    assert busiest(stages, INSTANT) == stages[0]
