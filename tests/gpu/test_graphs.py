"""Captured decode steps give the logits of the same steps run as they are."""

import pytest
import torch

from kllm.engine.engine import Engine
from kllm.engine.graphs import DecodeGraphs
from tests.engine.graph_cases import Staged, check_replayed_steps, check_slice, decode_graphs
from tests.engine.relayed import check_relayed_stages, one_rank_eager, serve, staged_config
from tests.tolerances import LOGITS

# Of GLM, 3 stages begin with a shared selection and the third of 5 passes on one it received.
STAGES = {"llama": (1, 2), "deepseek_v4": (1, 3), "glm_moe_dsa": (1, 3, 5)}
PRESETS = ("smollm2-135m", "deepseek-v4-flash", "glm-5.2")
# Of log probabilities. Padded batches and cut prompts go through kernels of other shapes, and what
# one family's layers make of a rounding is more than on a CPU.
ATOL = 1e-3
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


@pytest.mark.parametrize("rank", [1, 2])
def test_a_captured_stage_alone_is_given_new_input_each_step(cuda: torch.device, rank: int) -> None:
    check_slice(DecodeGraphs, cuda, rank)


@pytest.mark.parametrize("preset", PRESETS)
def test_stages_on_one_gpu_answer_like_one_rank_without_graphs(
    cuda: torch.device, preset: str
) -> None:
    check_relayed_stages(preset, "cuda", 3, ATOL)


@pytest.mark.multi_gpu
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("preset", PRESETS)
def test_stages_on_two_gpus_answer_like_one_rank_without_graphs(preset: str) -> None:
    engine = Engine(staged_config(preset, "cuda", 2, graphs=True))  # a process for each stage
    try:
        found = serve(engine)
    finally:
        engine.close()
    assert found.difference(one_rank_eager(preset, "cuda")) <= ATOL
