"""`kllm models`: published sizes, and what fits."""

import json

import pytest
import typer
from typer.testing import CliRunner

from kllm.cli.models import count, models, size
from kllm.errors import ConfigError
from kllm.models import presets


def run(*args: str) -> str:
    app = typer.Typer()
    app.command()(models)
    result = CliRunner().invoke(app, args, catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0
    return result.stdout


def test_the_table_lists_every_preset() -> None:
    text = run()
    assert all(f" {name} " in text for name in presets.names())
    assert "deepseek-v4 is short for deepseek-v4-flash." in text


def test_json_has_the_published_counts() -> None:
    facts = {m["name"]: m for m in json.loads(run("--json"))["models"]}
    assert facts["llama-3-8b"]["parameters"] == 8_030_261_248
    assert facts["llama-3-8b"]["tensors"] == 291
    assert facts["llama-3-8b"]["checkpoint_bytes"] == 16_060_522_496
    smol = facts["smollm2-135m"]
    assert smol["parameters"] == 134_515_008
    assert smol["kv_bytes_per_token"]["bfloat16"] == 23_040  # 30 layers, 2 * 3 heads of 64
    assert smol["bytes_per_request"]["bfloat16"] == 0
    for fit in (m["fit"] for m in facts.values()):
        assert fit["scale"] in ("full", "tiny") or fit["scale"].startswith("layers:")
        assert fit["context_tokens"] > 0


def test_one_model_in_detail() -> None:
    text = run("smollm2-135m")
    assert "134,515,008" in text
    assert "272 tensors" in text
    assert "23,040 bytes a token" in text


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown model 'nope'"):
        run("nope")


def test_options_of_layouts_are_refused_without_one() -> None:
    with pytest.raises(ConfigError, match=r"--batch, --gpu: for layouts only"):
        run("--gpu", "b200", "--batch", "8", "--json")


def test_numbers_are_printed_in_the_units_of_the_field() -> None:
    assert [count(n) for n in (7, 34_240, 134_515_008, 284_330_000_000)] == [
        "7",
        "34.2 k",
        "135 M",
        "284 B",
    ]
    assert [size(n) for n in (0, 17_840_000, 159_609_000_000)] == ["0 B", "17.8 MB", "160 GB"]


def test_a_layout_is_computed_for_a_gpu() -> None:
    text = run("glm-5.2", "--layout", "dp=8,ep=8", "--gpu", "h200")
    assert "glm-5.2 dp8+ep8" in text
    assert "8 x h200" in text
    assert "2,320,960 tokens" in text
    assert "53,940 bytes" in text
    for what in ("dispatch", "combine"):
        assert what in text
    assert "Modelled" in text


def test_context_parallelism_says_when_a_ring_hides_its_transfers() -> None:
    text = run("deepseek-v4", "--layout", "cp=8,ep=8", "--link", "ib400", "--cached", "100000")
    for kind in ("CSA", "HCA", "Break-even", "when a ring step hides"):
        assert kind in text
    assert "requests' state" in text


def test_a_layout_as_json_has_the_tables_numbers() -> None:
    args = ("glm-5.2", "--layout", "tp=8", "--gpu", "b300", "--memory-fraction", "0.872")
    found = json.loads(run(*args, "--json"))
    assert found["kv_tokens"] == found["capacity"]["rank_tokens"] == 2_900_499
    assert found["device"]["memory_bytes"] == 288e9
    assert found["fidelity"] == "modelled"
    smaller = json.loads(run(*args, "--memory-gb", "200", "--json"))
    assert smaller["kv_tokens"] < found["kv_tokens"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("glm-5.2",), True),
        (("deepseek-v4",), True),
        (("glm-5.2", "--dtype", "bfloat16"), False),
        (("glm-5.2-bf16",), False),
    ],
)
def test_weights_that_kllm_dequantises_are_said_to(args: tuple[str, ...], said: bool) -> None:
    text = " ".join(run(*args, "--layout", "dp=8,ep=8").split())
    assert ("kLLM itself dequantises them: --dtype bfloat16" in text) is said


def test_weights_that_do_not_fit_are_said_to() -> None:
    assert "the weights do not fit" in run("glm-5.2", "--layout", "tp=1")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("glm-5.2", "--layout", "tp=3"), "tp 3 does not divide the 64 attention heads"),
        (("glm-5.2", "--layout", "tp3"), "cannot be read at 'tp3'"),
        (("glm-5.2", "--layout", "tp=2", "--gpu", "abacus"), "unknown GPU 'abacus'"),
        (("glm-5.2", "--layout", "tp=2", "--link", "string"), "unknown link 'string'"),
        (("glm-5.2", "--layout", "tp=2", "--dtype", "int3"), "unknown weight dtype 'int3'"),
        (("glm-5.2", "--layout", "tp=2", "--kv-dtype", "fp3"), "unknown KV dtype 'fp3'"),
        (("--layout", "tp=2"), "--layout needs a model"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        run(*args)
    assert refused.value.exit_code == 2
