"""Whole networks on a GPU against the same weights on the CPU in float32."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from kllm.models import MODELS
from kllm.models.base import CausalLM, Groups, default_device_and_dtype
from kllm.models.random import fill_random
from tests.models.harness import Harness
from tests.tolerances import GPU_SLACK, LOGITS

FAMILIES = sorted(LOGITS)

CHUNKS = [41, 20, 1, 1, 1, 1, 1]


def tiny_on_cpu(name: str, config: Any = None) -> tuple[CausalLM, Any]:
    family: Any = MODELS[name]()
    with default_device_and_dtype(torch.device("cpu"), torch.float32):
        model = family.build(config or family.tiny_config(), Groups.single())
    fill_random(model, family, seed=0)
    return model.eval(), family


def run(model: CausalLM, chunks: list[int], kv_dtype: str) -> torch.Tensor:
    tokens = torch.randint(0, 90, (sum(chunks),), generator=torch.Generator().manual_seed(2))
    return Harness(model, kv_dtype=kv_dtype).run(tokens.tolist(), chunks).float().cpu()


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_logits_equal_those_of_the_cpu(cuda: torch.device, name: str) -> None:
    model, _ = tiny_on_cpu(name)
    want = run(model, CHUNKS, "float32")
    moved = copy.deepcopy(model).to(cuda)
    moved.use_attention("auto", "float32")
    atol = GPU_SLACK * LOGITS[name]
    torch.testing.assert_close(run(moved, CHUNKS, "float32"), want, rtol=0, atol=atol)


def without_choices(name: str) -> Any:
    """The tiny config with every expert and every index entry taken.

    A random tiny router is full of near ties: one rounding sends a token to other experts, and
    its logits then say nothing about the arithmetic.
    """
    config = MODELS[name]().tiny_config()
    if name == "llama":
        return config
    everyone = replace(config, num_experts_per_tok=config.n_routed_experts)
    if name == "deepseek_v4":
        return replace(everyone, index_topk=4096)
    return replace(everyone, indexer=replace(config.indexer, topk=4096))


def config_to_round(name: str) -> Any:
    """GLM's 11 layers that select 6 of 60 tokens are chaotic: any rounding changes all logits,
    on the CPU too. Fewer layers that select most tokens are not."""
    family: Any = MODELS[name]()
    config = family.tiny_config()
    if name == "glm_moe_dsa":
        config = family.scaled_config(config, 4)
        config = replace(config, indexer=replace(config.indexer, topk=48))
    return config


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_logits_are_close_to_float32(cuda: torch.device, name: str, kv_dtype: str) -> None:
    config = without_choices(name)
    model, family = tiny_on_cpu(name, config)
    want = run(model, CHUNKS, "float32")
    with default_device_and_dtype(cuda, torch.bfloat16):
        rounded = family.build(config, Groups.single())
    rounded.load_state_dict(model.state_dict())
    rounded.use_attention("auto", kv_dtype)
    found = run(rounded.eval(), CHUNKS, kv_dtype)
    errors = (found - want).norm(dim=1) / want.norm(dim=1)
    assert errors.median() < (0.05 if kv_dtype == "bfloat16" else 0.15)


@pytest.mark.parametrize("attention", ["torch", "triton", "flashinfer"])
def test_attention_backends_give_the_same_logits(cuda: torch.device, attention: str) -> None:
    """Heads of 64 channels in bfloat16, which all backends read; mixed batches."""
    family: Any = MODELS["llama"]()
    if attention == "flashinfer":
        pytest.importorskip("flashinfer")
    config = replace(family.tiny_config(), head_dim=64)
    logits = {}
    for backend in ("torch", attention):
        with default_device_and_dtype(cuda, torch.bfloat16):
            model = family.build(config, Groups.single()).eval()
        fill_random(model, family, seed=0)
        model.use_attention(backend, "bfloat16")
        harness = Harness(model, num_requests=3, kv_dtype="bfloat16")
        harness.step({0: range(50), 1: range(7)})
        logits[backend] = torch.cat(
            [
                *harness.step({0: [5], 1: range(30), 2: range(20)}).values(),
                *harness.step({0: [6], 1: [7], 2: [8]}).values(),
            ]
        )
    torch.testing.assert_close(logits[attention], logits["torch"], rtol=0.05, atol=0.05)
