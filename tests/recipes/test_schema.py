"""Recipes survive writing and reading, and refuse what the engine would."""

from dataclasses import replace
from pathlib import Path

import pytest

from kllm.config import CacheConfig, EngineConfig, SchedulerConfig
from kllm.errors import ConfigError, DataError
from kllm.recipes import schema
from kllm.recipes.schema import Boundary, Hardware, Measured, Recipe, SloLimits

CONFIG = EngineConfig(
    model="deepseek-v4-flash",
    scale="tiny",
    dtype="float32",
    cache=CacheConfig(page_size=32),
    scheduler=SchedulerConfig(token_budget=256, max_batch=16),
)


def recipe() -> Recipe:
    return Recipe(
        name="deepseek-v4-flash on a laptop",
        model="deepseek-v4-flash",
        scale="tiny",
        dtype="float32",
        hardware=Hardware(device="cpu", name="a processor"),
        workload={"name": "chat", "isl": "16-128", "concurrency": 8},
        engine=schema.engine_changes(CONFIG),
        measured={"output_tokens_per_s": Measured(unit="tokens/s", median=100.5, ci95=(99, 102))},
        fidelity="real",
        verdict="12 % better than the default settings",
        objectives=["goodput"],
        slo=SloLimits(ttft_s=2.0, tpot_s=0.05),
        boundary=Boundary(
            statement="best between half and twice the limits",
            slo_factor=(0.5, 2.0),
            near={"page_size": [0, 32], "kv_dtype": ["auto"]},
        ),
        results=["20260101T000000Z-abcdef"],
    )


def test_recipe_survives_writing_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    schema.save(recipe(), path)
    assert schema.load(str(path)) == recipe()


def test_recipe_gives_the_config_it_was_made_from() -> None:
    assert recipe().config() == CONFIG


def test_only_changed_settings_are_written() -> None:
    assert recipe().engine == {
        "cache": {"page_size": 32},
        "scheduler": {"token_budget": 256, "max_batch": 16},
    }


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('model = "deepseek-v4-flash"', "model = 3", r"\$\.model"),
        ("token_budget = 256", "token_budget = 0", "token_budget must be at least 1"),
        ("token_budget = 256", 'token_budget = "x"', "token_budget must be of type int"),
        ("page_size = 32", "pagesize = 32", "pagesize is not an engine setting"),
        ("recipe_version = 1", "recipe_version = 99", "update kllm"),
        ("[hardware]", "[hardware", "cannot be used"),
        ('fidelity = "real"', 'fidelity = "guess"', r"\$\.fidelity"),
    ],
)
def test_broken_recipe_is_refused_with_its_field(old: str, new: str, says: str) -> None:
    text = schema.dumps(recipe())
    assert old in text
    with pytest.raises(DataError, match=says):
        schema.loads(text.replace(old, new, 1), "r.toml")


def test_unknown_recipe_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match="there is no recipe 'nothing'"):
        schema.load("nothing")


def test_missing_file_is_named() -> None:
    with pytest.raises(DataError, match=r"none\.toml"):
        schema.load("none.toml")


def test_misfits_name_the_other_machine() -> None:
    assert recipe().misfits("cpu", "a processor") == []
    assert "this machine has cuda" in recipe().misfits("cuda", "H200")[0]
    other = replace(recipe(), hardware=Hardware(device="cpu", name="another"))
    assert "measured on another" in other.misfits("cpu", "a processor")[0]


def test_packaged_recipes_are_valid() -> None:
    for name, text in schema.packaged_texts():
        assert schema.loads(text, name).recipe_version == schema.RECIPE_VERSION
