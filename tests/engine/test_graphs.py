"""Decode graphs: which padded sizes are captured, and that padding changes nothing."""

import pytest
import torch

from kllm.engine.graphs import NARROWEST_TOKENS, batch_bucket, width_bucket
from tests.engine.graph_cases import (
    RerunGraphs,
    Staged,
    check_replayed_steps,
    check_slice,
    decode_graphs,
)
from tests.engine.relayed import check_relayed_stages
from tests.tolerances import LAYOUT, LOGITS

CPU = torch.device("cpu")
# Llama's attention on a CPU cannot be captured. DeepSeek-V4 has every kind of state; of GLM, 3
# stages begin with a shared selection and the third of 5 passes on one that it received.
CASES = [("deepseek_v4", 1), ("deepseek_v4", 3), ("glm_moe_dsa", 3), ("glm_moe_dsa", 5)]


@pytest.mark.parametrize("limit", [32, 1], ids=["own graphs", "one graph"])
@pytest.mark.parametrize(("family", "stages"), CASES)
def test_padded_steps_equal_plain_steps(family: str, stages: int, limit: int) -> None:
    check_replayed_steps(RerunGraphs, lambda: Staged(family, CPU, stages), limit, LOGITS[family])


def test_a_step_that_no_graph_can_hold_is_left_to_the_caller() -> None:
    (whole,) = Staged("deepseek_v4", CPU).stages
    graphs = decode_graphs(RerunGraphs, whole, limit=1)
    with torch.inference_mode():
        assert graphs.find(whole.plan({0: [3]})[1]) is not None
        assert graphs.find(whole.plan({0: [3], 1: [4]})[1]) is None, "the one graph is too small"
        assert graphs.find(whole.plan({0: [3], 1: [4, 5]})[1]) is None, "not only single tokens"


def test_batches_are_padded_by_less_than_half() -> None:
    for batch in range(1, 600):
        assert batch <= batch_bucket(batch) <= batch * 1.5


def test_few_batch_sizes_are_captured() -> None:
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert sorted({batch_bucket(n) for n in range(1, 65)}) == sizes


def test_block_tables_are_padded_to_powers_of_two_within_the_longest() -> None:
    page = 16
    narrowest = NARROWEST_TOKENS // page
    assert width_bucket(1, page, 1000) == narrowest
    assert width_bucket(narrowest + 1, page, 1000) == 2 * narrowest
    assert width_bucket(600, page, 1000) == 1000
    assert width_bucket(3, page, 10) == 10


@pytest.mark.parametrize(
    ("preset", "family", "pp"),
    [("deepseek-v4-flash", "deepseek_v4", 2), ("glm-5.2", "glm_moe_dsa", 3)],
)
def test_stages_answer_with_graphs_like_one_rank_without(preset: str, family: str, pp: int) -> None:
    check_relayed_stages(preset, "cpu", pp, LAYOUT[family])


@pytest.mark.parametrize("rank", [1, 2])
def test_a_captured_stage_alone_is_given_new_input_each_step(rank: int) -> None:
    check_slice(RerunGraphs, CPU, rank)
