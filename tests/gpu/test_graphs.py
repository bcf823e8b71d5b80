"""Captured decode steps give the logits of the same steps run as they are."""

import pytest
import torch

from kllm.engine.graphs import DecodeGraphs
from tests.engine.graph_cases import Staged, check_replayed_steps, decode_graphs
from tests.tolerances import LOGITS

# Of GLM, 3 stages begin with a shared selection and the third of 5 passes on one it received.
STAGES = {"llama": (1, 2), "deepseek_v4": (1, 3), "glm_moe_dsa": (1, 3, 5)}
CASES = [(family, count) for family in sorted(STAGES) for count in STAGES[family]]


@pytest.mark.parametrize("limit", [32, 1], ids=["own graphs", "one graph"])
@pytest.mark.parametrize(("family", "stages"), CASES)
def test_replayed_steps_equal_eager_steps(
    cuda: torch.device, family: str, stages: int, limit: int
) -> None:
    atol = max(LOGITS[family], 1e-4)
    check_replayed_steps(DecodeGraphs, lambda: Staged(family, cuda, stages), limit, atol)


def test_a_step_with_a_prompt_is_not_replayed(cuda: torch.device) -> None:
    (whole,) = Staged("llama", cuda).stages
    graphs = decode_graphs(DecodeGraphs, whole)
    assert graphs.find(whole.plan({0: [3], 1: [4, 5]})[1]) is None
