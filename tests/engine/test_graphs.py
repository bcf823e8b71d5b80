"""Decode graphs: which padded sizes are captured, and that padding changes nothing.

Capturing needs a GPU. Here a stand-in runs the forward pass anew for each replay, from the same
fixed inputs: padding, spare page and row, and the choice among graphs are the real ones.
"""

from typing import Any

import pytest
import torch

from kllm.engine import graphs
from kllm.engine.graphs import NARROWEST_TOKENS, DecodeGraphs, batch_bucket, width_bucket
from kllm.models import MODELS
from kllm.models.base import CausalLM, Groups, default_device_and_dtype
from kllm.models.random import fill_random
from tests.models.harness import Harness

PROMPTS = [5, 40, 18, 33, 9]
STEPS = [[0, 1, 2, 3, 4], [0, 1, 2], [4], [1, 2, 3, 4], [0, 1, 2, 3]]


class Rerun:
    """Stands in for a captured graph."""

    def __init__(self, run: Any, logits: torch.Tensor) -> None:
        self.run, self.logits = run, logits

    def replay(self) -> None:
        self.logits.copy_(self.run())


class RerunGraphs(DecodeGraphs):
    """Graphs whose replay runs the model."""

    def _capture(self, batch: int, width: int) -> Any:
        inputs = graphs._Inputs(
            self.pool, batch, width, self.scratch_page, self.scratch_row, self._device
        )
        logits = self._forward(inputs.ctx)  # all rows are padding, as in a capture's first run
        graph: Any = Rerun(lambda: self._forward(inputs.ctx), logits)
        return graphs._Captured(graph, inputs, logits)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    """DeepSeek-V4 has every kind of state: rings, tails and entries of several ratios."""
    family: Any = MODELS["deepseek_v4"]()
    with default_device_and_dtype(torch.device("cpu"), torch.float32):
        model: CausalLM = family.build(family.tiny_config(), Groups.single())
    fill_random(model, family, seed=0)
    return model.eval()


def prefilled(model: CausalLM) -> Harness:
    harness = Harness(model, num_requests=len(PROMPTS))
    generator = torch.Generator().manual_seed(1)
    for request, length in enumerate(PROMPTS):
        harness.step({request: torch.randint(0, 90, (length,), generator=generator).tolist()})
    return harness


def decode_graphs(harness: Harness, limit: int) -> DecodeGraphs:
    return RerunGraphs(
        harness.model,
        harness.pool,
        scratch_page=harness.spare_page,
        scratch_row=harness.spare_row,
        max_pages=harness.tables.shape[1],
        limit=limit,
    )


@pytest.mark.parametrize("limit", [32, 1], ids=["own graphs", "one graph"])
def test_padded_steps_equal_plain_steps(model: CausalLM, limit: int) -> None:
    """Batches grow and shrink, so that rows turn into padding and back."""
    plain, padded = prefilled(model), prefilled(model)
    steps = decode_graphs(padded, limit)
    for number, requests in enumerate(STEPS):
        tokens = {request: [(7 * number + request) % 90] for request in requests}
        want = plain.step(tokens)
        order, plan = padded.plan(tokens)
        with torch.inference_mode():
            found = steps.run(plan)
        assert found is not None
        padded.lengths[order] += 1
        expected = torch.cat([want[request] for request in order])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert len(steps._captured) == min(limit, len({batch_bucket(len(r)) for r in STEPS}))


def test_a_step_that_no_graph_can_hold_is_left_to_the_caller(model: CausalLM) -> None:
    harness = prefilled(model)
    steps = decode_graphs(harness, limit=1)
    with torch.inference_mode():
        assert steps.run(harness.plan({0: [3]})[1]) is not None
        assert steps.run(harness.plan({0: [3], 1: [4]})[1]) is None, "the one graph is too small"
        assert steps.run(harness.plan({0: [3], 1: [4, 5]})[1]) is None, "not only single tokens"


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
