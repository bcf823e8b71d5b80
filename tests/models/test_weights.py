"""Checkpoints are read completely, rank by rank, and damage is reported by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kllm.errors import DataError
from kllm.models.base import Groups
from kllm.models.weights import INDEX, SafetensorsFolder, fill
from kllm.quant import fp4, fp8
from tests.models.checkpoints import (
    EXPERTS,
    HIDDEN,
    Rank,
    Toy,
    manifest,
    released_tensors,
    write_sharded,
)

SOLO = Rank(0, 1)


def groups(ffn: Rank = SOLO, ep: Rank = SOLO) -> Groups:
    return Groups(SOLO, ffn, SOLO, ep, SOLO, SOLO)  # type: ignore[arg-type]


def load(
    folder: Path,
    layout: Groups,
    mtp: bool = False,
    held: tuple[int, ...] | None = None,
    dtype: str = "F4_E2M1",
) -> dict[str, Tensor]:
    model = Toy(layout, mtp, held)
    fill(model, manifest(dtype), SafetensorsFolder(folder), layout)
    return model.state_dict()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sharded(tmp_path, released_tensors())
    return tmp_path


def test_every_released_tensor_lands_dequantised_in_its_place(folder: Path) -> None:
    stored, got = released_tensors(), load(folder, groups(), mtp=True)
    for k, name in enumerate(("gate_proj", "up_proj")):
        scale = stored[f"{name}.weight_scale_inv"]
        want = fp8.dequantize(stored[f"{name}.weight"], scale, (128, 128))
        assert torch.equal(got["up.weight"][k * HIDDEN : (k + 1) * HIDDEN], want)
    want = fp8.dequantize(stored["w2.weight"], stored["w2.scale"], (128, 128))
    assert torch.equal(got["down.weight"], want)
    for e in range(EXPERTS):
        for k, name in enumerate(("w1", "w3")):
            prefix = f"experts.{e}.{name}."
            want = fp4.dequantize(stored[prefix + "weight"], stored[prefix + "scale"])
            assert torch.equal(got["experts.w13"][e, k * HIDDEN : (k + 1) * HIDDEN], want)
        prefix = f"experts.{e}.w2."
        want = fp4.dequantize(stored[prefix + "weight"], stored[prefix + "scale"])
        assert torch.equal(got["experts.w2"][e], want)
    assert torch.equal(got["norm"], stored["norm.weight"].float())
    assert torch.equal(got["table"], stored["tid2eid"])
    assert torch.equal(got["mtp_norm"], stored["mtp.norm.weight"])


@pytest.mark.parametrize("dtype", ["F4_E2M1", "F8_E4M3"])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ranks_read_the_hidden_features_of_every_expert(
    size: int, dtype: str, tmp_path: Path
) -> None:
    """192 / 4 = 48 and 192 / 8 = 24 columns begin inside a block of 128 and a group of 32."""
    write_sharded(tmp_path, released_tensors(dtype=dtype))
    whole = load(tmp_path, groups(), dtype=dtype)
    parts = [load(tmp_path, groups(ffn=Rank(r, size)), dtype=dtype) for r in range(size)]
    gates, ups = zip(*(part["experts.w13"].chunk(2, dim=1) for part in parts), strict=True)
    assert torch.equal(torch.cat((*gates, *ups), 1), whole["experts.w13"])
    assert torch.equal(torch.cat([p["experts.w2"] for p in parts], 2), whole["experts.w2"])


def test_copies_of_an_expert_are_read_on_every_rank_that_holds_it(folder: Path) -> None:
    whole = load(folder, groups())
    for rank, held in enumerate([(2, 0, 1), (1, 3, 2)]):
        part = load(folder, groups(ep=Rank(rank, 2)), held=held)
        for name in ("experts.w13", "experts.w2"):
            assert torch.equal(part[name], whole[name][list(held)])


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_the_slices_of_what_one_rank_reads(folder: Path, size: int) -> None:
    """HIDDEN / 4 = 48 rows start inside a block of 128 and inside a group of 32."""
    whole = load(folder, groups())
    parts = [load(folder, groups(Rank(r, size), Rank(r, size))) for r in range(size)]
    gates, ups = zip(*(part["up.weight"].chunk(2) for part in parts), strict=True)
    assert torch.equal(torch.cat((*gates, *ups)), whole["up.weight"])
    assert torch.equal(torch.cat([p["down.weight"] for p in parts], 1), whole["down.weight"])
    assert torch.equal(torch.cat([p["experts.w13"] for p in parts]), whole["experts.w13"])
    for part in parts:
        assert torch.equal(part["norm"], whole["norm"])


def test_each_rank_reads_only_its_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, int] = {}
    original = SafetensorsFolder.read

    def spy(self: SafetensorsFolder, name: str, part: tuple[slice, ...]) -> Tensor:
        tensor = original(self, name, part)
        read[name] = tensor.numel()
        return tensor

    monkeypatch.setattr(SafetensorsFolder, "read", spy)
    load(folder, groups(Rank(1, 4), Rank(1, 4)))
    sizes = {name: tensor.numel() for name, tensor in released_tensors().items()}
    for name in ("gate_proj.weight", "up_proj.weight", "w2.weight"):
        assert read[name] * 4 == sizes[name]
    experts = {name.split(".")[1] for name in read if name.startswith("experts.")}
    assert experts == {"1"}


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file(released_tensors(), tmp_path / "model.safetensors")
    assert torch.isfinite(load(tmp_path, groups())["up.weight"]).all()


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    tensors = released_tensors()
    del tensors["w2.weight"], tensors["experts.3.w1.weight"]
    write_sharded(tmp_path, tensors)
    with pytest.raises(DataError, match=r"lacks 2 of 17 tensors: w2\.weight, experts\.3\.w1"):
        load(tmp_path, groups())


def test_missing_scales_are_named(tmp_path: Path) -> None:
    tensors = released_tensors()
    del tensors["w2.scale"]
    write_sharded(tmp_path, tensors)
    with pytest.raises(DataError, match=r"its scales w2\.scale are missing"):
        load(tmp_path, groups())


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "experts.3.w1.scale",
            lambda scale: as_bytes(scale).repeat_interleave(2, dim=1),
            r"w1\.scale has shape \[192, 20\] .* asks for \[192, 10\]",
        ),
        ("w2.scale", lambda scale: scale[:1], r"w2\.scale has shape \[1, 2\] .* for \[3, 2\]"),
        (
            "w2.scale",
            lambda scale: scale.float().to(torch.float8_e4m3fn),
            r"scales w2\.scale are stored as F8_E4M3, .* asks for F8_E8M0",
        ),
        ("w2.weight", as_bytes, r"w2\.weight is stored as U8, .* asks for F8_E4M3"),
        (
            "norm.weight",
            lambda weight: weight.to(torch.float8_e4m3fn),
            r"norm\.weight is stored as F8_E4M3, .* asks for BF16",
        ),
    ],
    ids=["groups of 16", "scales that are missing", "e4m3 scales", "bytes", "an fp8 norm"],
)
def test_another_format_than_the_configs_is_reported(
    name: str, change: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    """It has as many bits, and would be read as other numbers."""
    tensors = released_tensors()
    tensors[name] = change(tensors[name]).contiguous()
    write_sharded(tmp_path, tensors)
    with pytest.raises(DataError, match=message):
        load(tmp_path, groups())


def test_scales_may_be_stored_as_bytes(folder: Path, tmp_path: Path) -> None:
    want = load(folder, groups())["down.weight"]
    tensors = released_tensors()
    write_sharded(tmp_path, tensors | {"w2.scale": as_bytes(tensors["w2.scale"])})
    assert torch.equal(load(tmp_path, groups())["down.weight"], want)


E8M0_NAN, E4M3_NAN = 0xFF, 0x7F


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("w2.scale", E8M0_NAN),
        ("w2.weight", E4M3_NAN),
        ("experts.3.w1.scale", E8M0_NAN),
        ("gate_proj.weight_scale_inv", float("inf")),
        ("norm.weight", float("nan")),
    ],
)
def test_values_that_are_no_numbers_are_reported(name: str, damage: float, tmp_path: Path) -> None:
    """One byte of a scale is enough to make every answer noise."""
    tensors = released_tensors()
    damaged = tensors[name]
    raw = damaged.view(torch.uint8) if isinstance(damage, int) else damaged
    raw.view(-1)[-1] = damage
    write_sharded(tmp_path, tensors)
    of = name.rpartition(".")[0]
    with pytest.raises(DataError, match=rf"{of}\.weight holds values that are not finite as float"):
        load(tmp_path, groups())


def test_values_beyond_the_dtype_are_reported(tmp_path: Path) -> None:
    """A bfloat16 weight may be too large for float16."""
    tensors = released_tensors()
    tensors["norm.weight"][0] = 1e5
    write_sharded(tmp_path, tensors)
    model = Toy(groups()).half()
    with pytest.raises(DataError, match=r"norm\.weight holds .* not finite as float16"):
        fill(model, manifest(), SafetensorsFolder(tmp_path), groups())


def test_a_wrong_shape_is_reported_with_both_shapes(tmp_path: Path) -> None:
    write_sharded(tmp_path, released_tensors() | {"norm.weight": torch.zeros(5)})
    with pytest.raises(DataError, match=r"norm\.weight has shape \[5\] .* asks for \[320\]"):
        load(tmp_path, groups())


def test_a_truncated_shard_is_reported(folder: Path) -> None:
    shard = folder / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"model-00002-of-00003\.safetensors cannot be read"):
        load(folder, groups())


def test_a_missing_shard_is_reported(folder: Path) -> None:
    (folder / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(DataError, match=r"lacks 1 shard files .* model-00003"):
        load(folder, groups())


def test_a_tensor_that_only_the_index_knows_is_reported(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["norm.weight"] = "model-00001-of-00003.safetensors"
    index["weight_map"]["tid2eid"] = "model-00001-of-00003.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"lacks tensor \S+ of the index"):
        load(folder, groups())


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_a_broken_index_is_reported(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(DataError, match="cannot be read as a shard index"):
        load(folder, groups())


def test_an_empty_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no tensors"):
        load(tmp_path, groups())


def test_plain_weights_of_a_quantised_family_are_read_as_they_are(tmp_path: Path) -> None:
    """The BF16 twin of an FP8 release has the same names and no scales."""
    tensors = released_tensors()
    plain = torch.randn(320, 192).bfloat16()
    del tensors["w2.scale"]
    write_sharded(tmp_path, tensors | {"w2.weight": plain})
    assert torch.equal(load(tmp_path, groups())["down.weight"], plain.float())
