"""Released DeepSeek-V4 checkpoints: exact counts, and reading their FP8 and FP4 blocks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kllm.models import deepseek_v4, presets
from kllm.models.base import CheckpointTensor, Groups
from tests.models.deepseek_v4_logits import PROMPT
from tests.models.deepseek_v4_tiny import TINY, load_ours, random_values
from tests.models.harness import Harness

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def released(preset: str, mtp: bool) -> list[CheckpointTensor]:
    config = deepseek_v4.read_config(presets.load(preset))
    return [t for t in deepseek_v4.manifest(config) if mtp or not t.mtp]


@pytest.mark.parametrize(
    ("preset", "mtp", "parameters", "tensors", "gigabytes"),
    [
        ("deepseek-v4-flash", False, "284.33", 67_612, "156.02"),
        ("deepseek-v4-flash", True, "290.94", 69_187, "159.61"),
        ("deepseek-v4-pro", False, "1573.00", 142_773, "850.75"),
        ("deepseek-v4-pro", True, "1598.84", 145_116, "864.70"),
    ],
)
def test_counts_equal_the_published_totals(
    preset: str, mtp: bool, parameters: str, tensors: int, gigabytes: str
) -> None:
    found = released(preset, mtp)
    assert f"{sum(t.parameters for t in found) / 1e9:.2f}" == parameters
    assert sum(t.tensors for t in found) == tensors
    assert f"{sum(t.nbytes for t in found) / 1e9:.2f}" == gigabytes


@pytest.mark.parametrize(
    ("preset", "tensors", "nbytes"),
    [
        ("deepseek-v4-flash-0731", 72_317, 166_878_536_440),
        ("deepseek-v4-pro-0813", 149_782, 892_727_580_904),
    ],
)
def test_dspark_releases_are_counted_to_the_byte(preset: str, tensors: int, nbytes: int) -> None:
    found = released(preset, mtp=True)
    assert sum(t.tensors for t in found) == tensors
    assert sum(t.nbytes for t in found) == nbytes


def test_refresh_keeps_the_backbone() -> None:
    assert released("deepseek-v4-flash-0731", False) == released("deepseek-v4-flash", False)


@pytest.mark.parametrize("preset", ["deepseek-v4-flash-0731", "deepseek-v4-flash"])
def test_names_are_unique(preset: str) -> None:
    names = [t.name for t in released(preset, True)]
    assert len(set(names)) == len(names)


def test_every_parameter_is_filled_exactly_once() -> None:
    """Rows and experts of the manifest tile each parameter of the network."""
    config = deepseek_v4.tiny_config()
    model = deepseek_v4.build(config, Groups.single(), mtp=True)
    filled = dict.fromkeys(model.state_dict(), 0)
    for tensor in deepseek_v4.manifest(config):
        filled[tensor.target] += tensor.parameters
    assert filled == {name: value.numel() for name, value in model.state_dict().items()}


def quantised(
    tensor: CheckpointTensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Random stored bytes of a block-scaled weight, its scales, and the values they stand for."""
    rows, columns = tensor.shape
    assert tensor.scale is not None
    block_rows, block_columns = tensor.scale.block
    exponent = torch.randint(-5, -2, tensor.scale.shape(tensor.shape), generator=generator)
    scale = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    per_value = torch.exp2(exponent.float())
    per_value = per_value.repeat_interleave(block_rows, 0).repeat_interleave(block_columns, 1)
    per_value = per_value[:rows, :columns]
    if tensor.dtype == "F4_E2M1":
        codes = torch.randint(0, 16, (rows, columns), generator=generator)
        values = torch.tensor(E2M1 + [-v for v in E2M1])[codes]
        packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
        return packed, scale, values * per_value
    stored = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    return stored, scale, stored.float() * per_value


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
def test_quantised_release_runs_like_its_dequantised_values(
    expert_dtype: str, tmp_path: Path
) -> None:
    data = {**TINY, "expert_dtype": expert_dtype}
    generator = torch.Generator().manual_seed(0)
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for t in deepseek_v4.manifest(deepseek_v4.read_config(data)):
        if t.scale is None:
            values = random_values(t, generator)
            values = values.bfloat16() if t.dtype == "BF16" else values
            stored[t.name] = plain[t.name] = values
        else:
            scale_name = t.name.removesuffix("weight") + "scale"
            stored[t.name], stored[scale_name], plain[t.name] = quantised(t, generator)
    logits = []
    for name, tensors in (("stored", stored), ("plain", plain)):
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(data))
        logits.append(Harness(load_ours(folder)).run(PROMPT, [60]))
    assert logits[0].std() > 0.1
    assert torch.equal(*logits)
