"""A recipe as another engine's command line: nothing of it vanishes, and a shell can read it."""

import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kllm.config import EngineConfig
from kllm.errors import ConfigError
from kllm.models import presets
from kllm.recipes import checkpoints, schema
from kllm.recipes.export import TARGETS, Export, export
from kllm.recipes.schema import Hardware, Recipe

MEASURED = Path(__file__).parents[2] / "results" / "measured"
LAYOUT = {"tp": 2, "dp": 2, "cp": 2, "ep": 2}
BASE: dict[str, Any] = {"fidelity": "rank-slice", "parallel": LAYOUT}  # every setting has a meaning
CHANGED: dict[str, Any] = {  # by setting: another value than in BASE
    "model": "glm-5.2",
    "scale": "layers:4",
    "load": "random",
    "device": "cuda:1",
    "dtype": "float16",
    "attention": "triton",
    "graphs": False,
    "max_model_len": 4096,
    "seed": 7,
    "fidelity": "real",
    "link": "pcie5",
    "slice_rank": 1,
    "expert_placement": "routing.json",
    "scheduler.max_batch": 8,
    "scheduler.token_budget": 512,
    "cache.page_size": 64,
    "cache.memory_bytes": 1 << 30,
    "cache.memory_fraction": 0.5,
    "cache.dtype": "fp8",
    "cache.rewind_tokens": 2,
    "parallel.tp": 1,
    "parallel.dp": 4,
    "parallel.ep": 4,
    "parallel.cp": 4,
    "parallel.pp": 2,
    "parallel.cp_kind": "ring",
    "parallel.ep_backend": "deep_ep",
    "parallel.redundant_experts": 2,
}


def recipe(**changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "name": "made up",
        "model": "deepseek-v4",
        "scale": "full",
        "dtype": "bfloat16",
        "hardware": Hardware(device="cuda", name="a GPU"),
        "workload": {},
        "engine": {},
        "measured": {},
        "fidelity": "real",
        "verdict": "",
    }
    return Recipe(**(values | changes))


def with_setting(setting: str, value: Any) -> Recipe:
    if setting in ("model", "scale", "dtype"):
        return recipe(engine=BASE, **{setting: value})
    *table, name = setting.split(".")
    inner = {name: value}
    engine = BASE | ({table[0]: BASE.get(table[0], {}) | inner} if table else inner)
    return recipe(engine=engine)


def settings(config: Any, at: str = "") -> Iterator[str]:
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from settings(value, f"{at}{item.name}.")
        else:
            yield at + item.name


def flags(made: Export) -> Mapping[str, str]:
    return {words[0]: " ".join(words[1:]) for words in made.lines[1:]}


@pytest.mark.parametrize("to", TARGETS)
def test_every_engine_setting_has_a_rule(to: str) -> None:
    """A new setting needs a rule in every target: flags, or why there are none."""
    assert {"model", *TARGETS[to].rules} == set(settings(EngineConfig(model="m")))


@pytest.mark.parametrize("setting", sorted(settings(EngineConfig(model="m"))))
@pytest.mark.parametrize("to", TARGETS)
def test_no_setting_vanishes_silently(to: str, setting: str) -> None:
    """Another value changes the command or what is said of it."""
    before, after = (
        export(recipe(engine=BASE), to),
        export(with_setting(setting, CHANGED[setting]), to),
    )
    assert before != after


@pytest.mark.parametrize("to", TARGETS)
def test_every_value_of_a_named_choice_is_exported(to: str) -> None:
    for setting, values in {
        "dtype": ("auto", "float32", "bfloat16", "float16"),
        "cache.dtype": ("auto", "float32", "bfloat16", "float16", "fp8"),
        "attention": ("auto", "torch", "flashinfer", "triton"),
        "parallel.cp_kind": ("auto", "ring", "all_gather", "replicated"),
        "parallel.ep_backend": ("auto", "all_to_all", "all_gather", "deep_ep"),
    }.items():
        for value in values:
            made = export(with_setting(setting, value), to)
            assert not {"{", "}"} & set("".join([*made.missing.values()])), (setting, value)


GOLDEN = {
    ("h200-x2/tune-deepseek-v4-flash-layers-4.toml", "vllm"): r"""
vllm serve deepseek-ai/DeepSeek-V4-Flash \
    --dtype bfloat16 \
    --max-model-len auto \
    --max-num-seqs 64 \
    --max-num-batched-tokens 2048 \
    --data-parallel-size 2 \
    --enable-expert-parallel \
    --seed 0""",
    ("h200-x2/tune-deepseek-v4-flash-layers-4.toml", "sglang"): r"""
python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V4-Flash \
    --dtype bfloat16 \
    --kv-cache-dtype bfloat16 \
    --max-running-requests 128 \
    --chunked-prefill-size 4096 \
    --tp-size 2 \
    --attn-dp-size 2 \
    --ep-size 2 \
    --random-seed 0""",
    ("cpu/tune-deepseek-v4-tiny-tight-slo.toml", "vllm"): r"""
vllm serve deepseek-ai/DeepSeek-V4-Flash \
    --dtype float32 \
    --max-model-len auto \
    --max-num-seqs 4 \
    --max-num-batched-tokens 2048 \
    --seed 0""",
    ("cpu/tune-deepseek-v4-tiny-tight-slo.toml", "sglang"): r"""
python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V4-Flash \
    --dtype float32 \
    --max-running-requests 4 \
    --chunked-prefill-size 2048 \
    --random-seed 0 \
    --device cpu""",
}


@pytest.mark.parametrize(("file", "to"), GOLDEN)
def test_measured_recipe_gives_this_command(file: str, to: str) -> None:
    made = export(schema.load(str(MEASURED / file)), to)
    assert made.command == GOLDEN[file, to].lstrip()
    assert {"scale"} <= set(made.missing) <= {"scale", "device"}
    assert {"dtype", "load", "cache.memory_fraction", "prefix caching"} <= set(made.approximate)


@pytest.mark.parametrize("to", TARGETS)
def test_shell_reads_the_words_back(to: str) -> None:
    """Also a model path with spaces and quotes, and a value that is JSON."""
    path = '/models/it\'s a "model" of $HOME/v4'
    engine = {"parallel": LAYOUT | {"redundant_experts": 2}}
    made = export(recipe(model=path, engine=engine), to)
    script = f"set -- {made.command}\nprintf '%s\\0' \"$@\""
    read = subprocess.run(["sh", "-c", script], check=True, capture_output=True, text=True).stdout
    words = [word for line in made.lines for word in line]
    assert read.split("\0")[:-1] == words == made.document()["arguments"]
    assert path in words


def test_sglang_divides_its_limits_by_the_attention_groups() -> None:
    """Whole replicas, which groups without shared experts are, have limits of their own."""
    shared = flags(export(recipe(engine={"parallel": {"dp": 4, "ep": 4}}), "sglang"))
    assert shared["--max-running-requests"] == "256"
    assert shared["--attn-dp-size"] == shared["--tp-size"] == "4"
    replicas = flags(export(recipe(engine={"parallel": {"dp": 4}}), "sglang"))
    assert replicas["--max-running-requests"] == "64"
    assert replicas["--dp-size"] == "4"
    assert not {"--attn-dp-size", "--tp-size"} & set(replicas)


def test_vllm_spreads_experts_over_all_ranks() -> None:
    whole = export(recipe(engine={"parallel": {"dp": 4, "ep": 4}}), "vllm")
    assert "--enable-expert-parallel" in flags(whole)
    assert "parallel.ep" not in whole.approximate
    half = export(recipe(engine={"parallel": {"dp": 4, "ep": 2}}), "vllm")
    assert "over all 4 ranks, the recipe over 2" in half.approximate["parallel.ep"]


@pytest.mark.parametrize(
    ("graphs", "backend"), [(True, "deepep_low_latency"), (False, "deepep_high_throughput")]
)
def test_vllm_takes_the_deep_ep_kernels_that_suit_graphs(graphs: bool, backend: str) -> None:
    parallel = {"dp": 2, "ep": 2, "ep_backend": "deep_ep"}
    made = export(recipe(engine={"parallel": parallel, "graphs": graphs}), "vllm")
    assert flags(made)["--all2all-backend"] == backend


@pytest.mark.parametrize("to", TARGETS)
def test_ring_has_no_equivalent(to: str) -> None:
    made = export(recipe(engine={"parallel": {"cp": 4, "cp_kind": "ring"}}), to)
    assert "no ring" in made.missing["parallel.cp_kind"]


def test_kv_dtype_that_an_engine_has_not_is_named() -> None:
    engine = {"cache": {"dtype": "float32"}}
    for to in TARGETS:
        made = export(recipe(engine=engine), to)
        assert "float32" in made.missing["cache.dtype"]
        assert "--kv-cache-dtype" not in flags(made)


def test_weights_of_a_preset_are_the_released_ones() -> None:
    assert set(checkpoints.REPOSITORIES) <= set(presets.names())
    for name, repository in checkpoints.REPOSITORIES.items():
        assert export(recipe(model=name), "vllm").lines[0] == ("vllm", "serve", repository)


@pytest.mark.parametrize("model", ["my-model", "some-preset"])
def test_unknown_model_becomes_a_placeholder(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "names", lambda: ["some-preset"])
    monkeypatch.setattr(presets, "load", lambda name: {})
    made = export(recipe(model=model), "vllm")
    assert made.lines[0][-1] == checkpoints.PLACEHOLDER
    assert model in made.missing["model"]


def test_gguf_file_is_read_by_sglang_only(tmp_path: Path) -> None:
    made = recipe(model=str(tmp_path / "model.gguf"))
    assert flags(export(made, "sglang"))["--load-format"] == "gguf"
    assert "GGUF" in export(made, "vllm").missing["load"]


def test_recipe_of_a_cpu_names_the_device() -> None:
    on_cpu = replace(recipe(), hardware=Hardware(device="cpu", name="a processor"))
    assert flags(export(on_cpu, "sglang"))["--device"] == "cpu"
    assert "CPU build" in export(on_cpu, "vllm").missing["device"]


def test_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown engine to export to 'tgi'; known: sglang, vllm"):
        export(recipe(), "tgi")


@pytest.mark.parametrize("to", TARGETS)
def test_that_a_tiny_model_says_nothing_comes_before_all_else(to: str) -> None:
    made = export(recipe(model="no such model", scale="tiny"), to)
    assert next(iter(made.missing)) == "scale"
    assert "none of its settings" in made.missing["scale"]
