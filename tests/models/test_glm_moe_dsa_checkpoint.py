"""Released GLM-5.2, DeepSeek-V3 and V3.2 checkpoints: exact counts, FP8 blocks, shards."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kllm.attention.context import ForwardContext
from kllm.models import glm_moe_dsa, presets
from kllm.models.base import CheckpointTensor, Groups
from kllm.models.weights import SafetensorsFolder, fill
from kllm.parallel.single import SingleComm
from tests.models.glm_moe_dsa_logits import PROMPT
from tests.models.glm_moe_dsa_tiny import GLM, load_ours, random_values, write_checkpoint
from tests.models.harness import Harness

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def released(preset: str) -> list[CheckpointTensor]:
    return list(glm_moe_dsa.manifest(glm_moe_dsa.read_config(presets.load(preset))))


@pytest.mark.parametrize(
    ("preset", "tensors", "nbytes"),
    [("glm-5.2", 118_629, 755_617_140_416), ("glm-5.2-bf16", 59_585, 1_506_659_919_872)],
)
def test_glm_releases_are_counted_to_the_byte(preset: str, tensors: int, nbytes: int) -> None:
    found = released(preset)
    assert sum(t.tensors for t in found) == tensors
    assert sum(t.nbytes for t in found) == nbytes
    # The published count leaves out the routers' correction biases, which are buffers.
    assert sum(t.parameters for t in found if t.dtype != "F32") == 753_329_921_024


def test_parts_of_glm_have_the_published_sizes() -> None:
    found = released("glm-5.2")
    assert sum(t.parameters for t in found if t.expert is not None) == 734_439_407_616
    indexer = [t for t in found if ".indexer." in t.name and len(t.shape) == 2]
    assert sum(t.parameters for t in indexer) == 22 * 9_371_648
    mtp = sum(t.nbytes for t in found if t.mtp)
    assert f"{mtp / 1e9:.3f}" == "10.033"


def test_deepseek_v3_has_the_published_sizes() -> None:
    found = released("deepseek-v3")
    assert f"{sum(t.parameters for t in found if not t.mtp) / 1e9:.1f}" == "671.0"
    assert sum(t.tensors for t in found) == 91_991
    scales = sum(prod(t.scale.shape(t.shape)) for t in found if t.scale)
    assert sum(t.parameters for t in found) + scales == 684_531_386_000


def test_deepseek_v32_adds_an_indexer_to_every_layer() -> None:
    names = {t.name for t in released("deepseek-v3.2")} - {t.name for t in released("deepseek-v3")}
    assert {name.split(".indexer.")[1] for name in names} == {
        "wq_b.weight",
        "wk.weight",
        "k_norm.weight",
        "k_norm.bias",
        "weights_proj.weight",
    }
    assert len(names) == 5 * 62


@pytest.mark.parametrize("preset", ["glm-5.2", "deepseek-v3.2"])
def test_names_are_unique(preset: str) -> None:
    names = [t.name for t in released(preset)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("preset", ["glm-5.2", "deepseek-v3", "deepseek-v3.2"])
def test_every_parameter_is_filled_exactly_once(preset: str) -> None:
    """Rows and experts of the manifest tile each parameter of the network, at real sizes."""
    config = glm_moe_dsa.scaled_config(glm_moe_dsa.read_config(presets.load(preset)), 4)
    with torch.device("meta"):
        model = glm_moe_dsa.build(config, Groups.single(), mtp=True)
    filled = dict.fromkeys(model.state_dict(), 0)
    unused = set()
    for tensor in glm_moe_dsa.manifest(config):
        if tensor.target in filled:
            filled[tensor.target] += tensor.parameters
        else:
            unused.add(tensor.target)
    assert filled == {name: value.numel() for name, value in model.state_dict().items()}
    # DeepSeek's MTP head is released with copies of the backbone's tables.
    assert unused == (set() if preset == "glm-5.2" else {"mtp.embed.weight", "mtp.head.weight"})


def quantised(tensor: CheckpointTensor, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Stored bytes of a block-scaled weight, its scales, and the values they stand for."""
    assert tensor.scale is not None
    rows, columns = tensor.shape
    scale = 0.05 + 0.1 * torch.rand(tensor.scale.shape(tensor.shape), generator=generator)
    stored = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    each = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    return stored, scale, stored.float() * each


def test_fp8_release_runs_like_its_dequantised_values(tmp_path: Path) -> None:
    """With matrices of several blocks, and blocks that the edges cut."""
    data = {**GLM, "hidden_size": 144, "num_hidden_layers": 4, "quantization_config": FP8}
    generator = torch.Generator().manual_seed(0)
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for t in glm_moe_dsa.manifest(glm_moe_dsa.read_config(data)):
        if t.scale is None:
            values = random_values(t, generator)
            stored[t.name] = plain[t.name] = values.bfloat16() if t.dtype == "BF16" else values
        else:
            scale_name = t.name + "_scale_inv"
            stored[t.name], stored[scale_name], plain[t.name] = quantised(t, generator)
    logits = []
    for name, tensors in (("stored", stored), ("plain", plain)):
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(data))
        logits.append(Harness(load_ours(folder)).run(PROMPT, [41]))
    assert logits[0].std() > 0.1
    assert torch.equal(*logits)


class Half(SingleComm):
    """One of two ranks, which never hears of the other: sums stay partial."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_tensor_parallel_ranks_hold_halves_of_the_heads(tmp_path: Path) -> None:
    """The attention outputs of two ranks add up to that of one; latents are whole on both."""
    write_checkpoint(tmp_path, GLM)
    whole = load_ours(tmp_path)
    config, one = whole.config, SingleComm()
    x = torch.randn(41, config.hidden_size, generator=torch.Generator().manual_seed(1))
    outs = []
    for rank in (None, 0, 1):
        groups = replace(Groups.single(), attn=one if rank is None else Half(rank))
        model = glm_moe_dsa.build(config, groups)
        fill(model, glm_moe_dsa.manifest(config), SafetensorsFolder(tmp_path), groups)
        assert model.cache_spec == whole.cache_spec
        driven = Harness(model)
        ctx = ForwardContext.from_plan(driven.plan({0: PROMPT})[1], driven.pool, x.device)
        outs.append(model.layers["0"].attn(x, ctx))
    torch.testing.assert_close(outs[1] + outs[2], outs[0], rtol=0, atol=1e-5)
