"""Random weights have the stated scales and do not depend on what else is made."""

import pytest
import torch

from kllm.models import llama
from kllm.models.base import Groups
from kllm.models.random import EMBEDDING_STD, fill_random


def random_llama(layers: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    model = llama.build(llama.scaled_config(llama.tiny_config(), layers), Groups.single())
    fill_random(model, llama, seed)
    return model.state_dict()


def test_scales_are_as_stated() -> None:
    for name, weight in random_llama().items():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight)), name
            continue
        std = EMBEDDING_STD if name == "embed.weight" else weight.shape[1] ** -0.5
        standard_error = std / (2 * weight.numel()) ** 0.5
        assert abs(weight.std().item() - std) < 6 * standard_error, name
        assert abs(weight.mean().item()) < 6 * std / weight.numel() ** 0.5, name


def test_a_cut_model_has_the_weights_of_the_whole_one() -> None:
    whole, cut = random_llama(layers=3), random_llama(layers=1)
    assert all(torch.equal(weight, whole[name]) for name, weight in cut.items())


def test_the_seed_decides() -> None:
    first, again, other = random_llama(), random_llama(), random_llama(seed=1)
    name = "layers.0.attn.qkv.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first["layers.1.attn.qkv.weight"])


def test_a_family_fills_its_special_tensors_itself() -> None:
    class Special:
        @staticmethod
        def init_special(config: object, name: str, tensor: torch.Tensor, rng: object) -> bool:
            if name != "norm.weight":
                return False
            tensor.fill_(7)
            return True

    model = llama.build(llama.tiny_config(), Groups.single())
    fill_random(model, Special, 0)
    assert torch.equal(model.norm.weight, torch.full_like(model.norm.weight, 7))
    assert model.layers["0"].attn_norm.weight.unique().tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_weights_are_made_directly(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        weight = random_llama()["layers.0.ffn.down.weight"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert weight.dtype == dtype
    assert abs(weight.float().std().item() - weight.shape[1] ** -0.5) < 5e-3
