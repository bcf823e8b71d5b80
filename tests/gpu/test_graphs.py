"""Captured decode steps give the logits of the same steps run as they are."""

from typing import Any

import pytest
import torch

from kllm.engine.graphs import DecodeGraphs
from kllm.models import MODELS
from kllm.models.base import CausalLM, Groups, default_device_and_dtype
from kllm.models.random import fill_random
from tests.models.harness import Harness
from tests.tolerances import LOGITS

FAMILIES = sorted(LOGITS)

PROMPTS = [5, 40, 18, 70, 9]
MAX_LEN = 256


def tiny(name: str, device: torch.device) -> CausalLM:
    family: Any = MODELS[name]()
    with default_device_and_dtype(device, torch.float32):
        model = family.build(family.tiny_config(), Groups.single())
    model.use_attention("auto", "float32")
    fill_random(model, family, seed=0)
    return model.eval()


def prefilled(model: CausalLM) -> Harness:
    harness = Harness(model, num_requests=len(PROMPTS), max_len=MAX_LEN)
    generator = torch.Generator().manual_seed(1)
    for request, length in enumerate(PROMPTS):
        harness.step({request: torch.randint(0, 90, (length,), generator=generator).tolist()})
    return harness


@pytest.mark.parametrize("limit", [32, 1], ids=["own graphs", "one graph"])
@pytest.mark.parametrize("name", FAMILIES)
def test_replayed_steps_equal_eager_steps(cuda: torch.device, name: str, limit: int) -> None:
    """Batches that grow and shrink, so that padding rows are used and reused."""
    model = tiny(name, cuda)
    eager, replayed = prefilled(model), prefilled(model)
    graphs = DecodeGraphs(
        model,
        replayed.pool,
        scratch_page=replayed.spare_page,
        scratch_row=replayed.spare_row,
        max_pages=MAX_LEN // replayed.pool.page_size,
        limit=limit,
    )
    used = 0
    for step, requests in enumerate([[0, 1, 2, 3, 4], [0, 1, 2], [4], [1, 2, 3, 4], [0, 1, 2, 3]]):
        tokens = {request: [(7 * step + request) % 90] for request in requests}
        want = eager.step(tokens)
        order, plan = replayed.plan(tokens)
        with torch.inference_mode():
            found = graphs.run(plan)
        if found is None:  # no graph is large enough
            continue
        used += 1
        replayed.lengths[order] += 1
        expected = torch.cat([want[request] for request in order])
        torch.testing.assert_close(found, expected, rtol=0, atol=max(LOGITS[name], 1e-4))
    assert used == 5


def test_a_step_with_a_prompt_is_not_replayed(cuda: torch.device) -> None:
    model = tiny("llama", cuda)
    harness = prefilled(model)
    graphs = DecodeGraphs(
        model,
        harness.pool,
        scratch_page=harness.spare_page,
        scratch_row=harness.spare_row,
        max_pages=MAX_LEN // harness.pool.page_size,
    )
    _, plan = harness.plan({0: [3], 1: [4, 5]})
    assert graphs.run(plan) is None
