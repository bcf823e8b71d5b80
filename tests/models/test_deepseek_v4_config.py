"""Reading, refusing and cutting DeepSeek-V4 configs."""

from typing import Any

import pytest

from kllm.errors import ConfigError
from kllm.models import deepseek_v4, presets
from kllm.models.base import Groups
from tests.models.deepseek_v4_tiny import TINY

FLASH = deepseek_v4.read_config(presets.load("deepseek-v4-flash"))
PRO = deepseek_v4.read_config(presets.load("deepseek-v4-pro"))


def test_published_layer_kinds() -> None:
    assert [len(FLASH.layers_of(k)) for k in ("window", "csa", "hca")] == [2, 21, 20]
    assert [len(PRO.layers_of(k)) for k in ("window", "csa", "hca")] == [0, 30, 31]


def test_yarn_ramp_of_the_published_config() -> None:
    """Frequencies 0..15 are kept, 25..31 divided by the factor; no amplitude scaling."""
    rotary = FLASH.rotary("csa")
    plain = type(rotary)(rotary.dim, rotary.theta).inv_freq()
    ratio = (plain / rotary.inv_freq()).tolist()
    assert ratio[:16] == pytest.approx([1.0] * 16)
    assert ratio[25:] == pytest.approx([16.0] * 7)
    assert all(1 < r < 16 for r in ratio[16:25])
    assert FLASH.rotary("window").yarn is None


def test_tiny_config_is_what_the_reference_is_compared_with() -> None:
    assert deepseek_v4.tiny_config() == deepseek_v4.read_config(
        TINY | {"compress_ratios": [0, 128, 4, 128, 4, 0, 0]}
    )


@pytest.mark.parametrize("layers", [3, 4, 8, 20, 43])
def test_cut_config_keeps_the_mix(layers: int) -> None:
    cut = deepseek_v4.scaled_config(FLASH, layers)
    assert cut.num_hidden_layers == len(cut.layer_kinds) == layers
    for kind in ("window", "csa", "hca"):
        share = len(FLASH.layers_of(kind)) * layers / 43
        assert max(1, share - 1) <= len(cut.layers_of(kind)) <= share + 1
    assert 1 <= cut.num_hash_layers <= 3


def test_uncut_config_is_the_same() -> None:
    assert deepseek_v4.scaled_config(FLASH, 43) == FLASH
    assert deepseek_v4.scaled_config(PRO, 61) == PRO


def test_cut_config_keeps_the_order_of_kinds() -> None:
    kinds = deepseek_v4.scaled_config(FLASH, 8).layer_kinds
    assert kinds == ("window", "csa", "hca", "csa", "hca", "csa", "hca", "csa")


@pytest.mark.parametrize("layers", [0, 44])
def test_impossible_cut_is_refused(layers: int) -> None:
    with pytest.raises(ConfigError, match="1 to 43 layers"):
        deepseek_v4.scaled_config(FLASH, layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_ratios": [0, 128]}, "must list at least 6 layers"),
        ({"compress_ratios": [0, 128, 4, 128, 4, 8]}, "has 8; known: 0, 4, 128"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ({"o_groups": 3}, "not a multiple of o_groups = 3"),
        ({"qk_rope_head_dim": 16}, "below head_dim and index_head_dim, got 16"),
        ({"num_experts_per_tok": 9}, "exceeds n_routed_experts = 8"),
        ({"expert_dtype": "int4"}, "expert_dtype = 'int4' is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear'"),
    ],
)
def test_unusable_config_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deepseek_v4.read_config({**TINY, **change})


def test_dspark_release_has_no_mtp_head_to_build() -> None:
    config = deepseek_v4.read_config(presets.load("deepseek-v4-flash-0731"))
    assert config.dspark is not None
    assert config.dspark.stages == 3
    with pytest.raises(ConfigError, match="DSpark drafter instead of an MTP head"):
        deepseek_v4.build(config, Groups.single(), mtp=True)
