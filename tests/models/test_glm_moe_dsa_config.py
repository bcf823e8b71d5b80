"""Reading, refusing and cutting configs of GLM-5, DeepSeek-V3 and V3.2."""

import math
from typing import Any

import pytest

from kllm.errors import ConfigError
from kllm.models import MODELS, glm_moe_dsa, presets
from tests.models.glm_moe_dsa_tiny import GLM, V3, V32

GLM_52 = glm_moe_dsa.read_config(presets.load("glm-5.2"))
DEEPSEEK_V3 = glm_moe_dsa.read_config(presets.load("deepseek-v3"))
DEEPSEEK_V32 = glm_moe_dsa.read_config(presets.load("deepseek-v3.2"))
GLM_5 = {  # what GLM-5 and GLM-5.1 say otherwise
    **presets.load("glm-5.2"),
    "max_position_embeddings": 202752,
    "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"},
    "index_topk_freq": None,
    "index_skip_topk_offset": None,
}


def test_published_schedule() -> None:
    assert GLM_52.layers_of("full") == (0, 1, *range(2, 78, 4))
    assert len(GLM_52.layers_of("shared")) == 57
    assert GLM_52.sparse_mlp == (False,) * 3 + (True,) * 75


def test_layers_without_a_schedule_have_an_indexer_each() -> None:
    config = glm_moe_dsa.read_config(GLM_5)
    assert config.indexer_types == ("full",) * 78
    assert config.rope_theta == 1e6
    assert DEEPSEEK_V32.indexer_types == ("full",) * 61


def test_missing_offset_means_two() -> None:
    data = {k: v for k, v in GLM.items() if k != "index_skip_topk_offset"}
    assert glm_moe_dsa.read_config(data).layers_of("full") == (0, 1, 5, 9)


def test_listed_types_win_over_the_pattern_and_that_over_the_schedule() -> None:
    pattern = {**GLM, "index_topk_pattern": "FSSFSSFSSFS"}
    assert glm_moe_dsa.read_config(pattern).layers_of("full") == (0, 3, 6, 9)
    listed = {**pattern, "indexer_types": ["full"] * 2 + ["shared"] * 9}
    assert glm_moe_dsa.read_config(listed).layers_of("full") == (0, 1)


def test_members_of_the_family_differ_in_their_indexers() -> None:
    assert all(MODELS[t]() is glm_moe_dsa for t in ("glm_moe_dsa", "deepseek_v3", "deepseek_v32"))
    assert DEEPSEEK_V3.indexer is None
    assert DEEPSEEK_V3.indexer_types == ("none",) * 61
    assert DEEPSEEK_V32.indexer is not None
    assert not DEEPSEEK_V32.indexer.interleaved
    assert GLM_52.indexer is not None
    assert GLM_52.indexer.interleaved


def test_softmax_scale_follows_yarn() -> None:
    assert GLM_52.softmax_scale == 1 / 16
    mscale = 0.1 * math.log(40) + 1
    assert pytest.approx(mscale**2 / math.sqrt(192)) == DEEPSEEK_V3.softmax_scale


def test_tiny_config_is_what_the_reference_is_compared_with() -> None:
    assert glm_moe_dsa.tiny_config() == glm_moe_dsa.read_config(GLM)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 8, 20, 78])
def test_cut_config_keeps_the_mix(layers: int) -> None:
    cut = glm_moe_dsa.scaled_config(GLM_52, layers)
    assert cut.num_hidden_layers == layers
    assert cut.indexer_types[0] == "full"
    if layers > 3:  # with fewer, one of each kind comes before its share
        kinds = list(zip(cut.sparse_mlp, cut.indexer_types, strict=True))
        for kind, count in {(False, "full"): 3, (True, "full"): 18, (True, "shared"): 57}.items():
            share = count * layers / 78
            assert max(1, share - 1) <= kinds.count(kind) <= share + 1
        assert list(cut.sparse_mlp) == sorted(cut.sparse_mlp), "dense layers come first"


def test_uncut_config_is_the_same() -> None:
    for config in (GLM_52, DEEPSEEK_V3, DEEPSEEK_V32):
        assert glm_moe_dsa.scaled_config(config, config.num_hidden_layers) == config


def test_impossible_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 to 78 layers"):
        glm_moe_dsa.scaled_config(GLM_52, 79)


YARN = V3["rope_parameters"]


@pytest.mark.parametrize(
    ("data", "change", "message"),
    [
        (GLM, {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        (GLM, {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
        (GLM, {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2"),
        (GLM, {"q_lora_rank": None}, "q_lora_rank is missing"),
        (GLM, {"indexer_types": ["full"]}, "must name 11 layers 'full' or 'shared', got 1"),
        (GLM, {"index_topk_pattern": "FSX" + "S" * 8}, "11 names with 'X'"),
        (GLM, {"index_topk_pattern": "S" * 11}, "first layer cannot share"),
        (GLM, {"mlp_layer_types": ["dense"]}, "mlp_layer_types must name 11 layers"),
        (GLM, {"qk_rope_head_dim": 18}, "at most index_head_dim, got 18"),
        (GLM, {"n_group": 3}, "n_group = 3 must divide n_routed_experts = 8"),
        (V3, {"num_experts_per_tok": 5}, "exceeds the 4 experts that a token can choose from"),
        (V3, {"rope_parameters": {**YARN, "mscale": 0.7}}, "must be the same number"),
        (V32, {"rope_parameters": {**YARN, "mscale_all_dim": 0}}, "must be the same number"),
        (V32, {"rope_parameters": {**YARN, "rope_type": "linear"}}, "rope type 'linear'"),
        (V3, {"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq'"),
    ],
)
def test_unusable_config_is_refused(
    data: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        glm_moe_dsa.read_config({**data, **change})
