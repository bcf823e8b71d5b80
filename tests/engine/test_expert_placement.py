"""Ranks whose experts lie by measured routing answer like one rank; other routing is refused."""

import re
from pathlib import Path

import pytest
import torch

from kllm.config import EngineConfig, ParallelConfig
from kllm.engine.engine import Engine
from kllm.engine.rank_groups import sliced_groups
from kllm.engine.rank_pool import launch
from kllm.errors import ConfigError, DataError
from kllm.parallel.expert_placement import balanced, in_order
from tests.engine.layout_cases import answers, checkpoint
from tests.parallel.test_expert_counts import stored
from tests.tolerances import LAYOUT

LAYOUT_OF_2 = ParallelConfig(dp=2, ep=2, redundant_experts=4)
EXPERTS, LAYERS, TOKENS = 8, 6, 8
# Every layer has other busy experts.
ROUTING = {layer: [1 + (3 * e + layer) % 7**2 for e in range(EXPERTS)] for layer in range(LAYERS)}


def test_ranks_place_experts_by_measured_routing_and_answer_like_one(tmp_path: Path) -> None:
    model = checkpoint("deepseek_v4", tmp_path / "m")
    routing = stored(tmp_path / "routing", ROUTING, scale="full")
    wrong = stored(tmp_path / "wrong", {0: [1, 2, 3, 4]}, scale="full")
    alone = answers(model, ParallelConfig(), new_tokens=TOKENS)
    with launch(LAYOUT_OF_2.world) as pool:
        found = answers(model, LAYOUT_OF_2, pool, new_tokens=TOKENS, expert_placement=str(routing))
        assert found.tokens == alone.tokens
        assert found.difference(alone) <= LAYOUT["deepseek_v4"]
        # Only a rank that reads the counts can find that they are those of fewer experts.
        with pytest.raises(ConfigError, match="layer 0 has 8 experts and routing counts of 4"):
            answers(model, LAYOUT_OF_2, pool, new_tokens=TOKENS, expert_placement=str(wrong))


def sliced(**other: object) -> EngineConfig:
    """A rank-slice of the tiny model."""
    about = {"model": "deepseek-v4", "scale": "tiny", "device": "cpu", "fidelity": "rank-slice"}
    return EngineConfig(**{**about, "parallel": LAYOUT_OF_2, **other})  # type: ignore[arg-type]


def test_each_layer_has_a_placement_of_its_own(tmp_path: Path) -> None:
    config = sliced(expert_placement=str(stored(tmp_path, ROUTING)))
    options = sliced_groups(config, torch.device("cpu")).experts
    for layer, counts in ROUTING.items():
        assert options.placement(layer, EXPERTS, 2) == balanced(counts, 4, 2) != in_order(8, 4, 2)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"model": "glm-5.2"}, r"deepseek-v4-flash \(tiny\) and this is glm-5.2 \(tiny\)"),
        ({"scale": "layers:4"}, r"\(tiny\) and this is deepseek-v4-flash \(layers:4\)"),
    ],
)
def test_routing_of_another_model_is_refused_before_anything_starts(
    tmp_path: Path, other: dict[str, str], words: str
) -> None:
    path = stored(tmp_path, ROUTING, model="deepseek-v4-flash")
    with pytest.raises(ConfigError, match=words) as caught:
        Engine(sliced(expert_placement=str(path), **other))
    assert "\n" not in str(caught.value)


def test_a_layout_without_expert_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"r\.json has no ranks to place experts on: ep is 1"):
        sliced(expert_placement="r.json", parallel=ParallelConfig(tp=2))


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    with pytest.raises(DataError, match=re.escape(str(path))):
        Engine(sliced(expert_placement=str(path)))
