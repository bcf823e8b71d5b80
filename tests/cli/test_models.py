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
    assert "23,040.00 bytes a token" in text


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown model 'nope'"):
        run("nope")


def test_numbers_are_printed_in_the_units_of_the_field() -> None:
    assert [count(n) for n in (7, 34_240, 134_515_008, 284_330_000_000)] == [
        "7",
        "34.2 k",
        "135 M",
        "284 B",
    ]
    assert [size(n) for n in (0, 17_840_000, 159_609_000_000)] == ["0 B", "17.8 MB", "160 GB"]
