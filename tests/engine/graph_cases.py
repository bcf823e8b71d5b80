"""Decode steps of tiny networks, whole and in stages, as they are and as captured ones.

Capturing needs a GPU. `RerunGraphs` runs the forward pass anew for each replay, from the same fixed
inputs into the same fixed results: padding, spare page and row, and the choice among graphs are the
real ones.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kllm.attention.context import ForwardContext
from kllm.core import Plan
from kllm.engine.graphs import MAX_GRAPHS, DecodeGraphs, batch_bucket
from kllm.engine.pipeline import SlicedStage, run_stages
from kllm.models import MODELS
from kllm.models.base import CausalLM, Groups, default_device_and_dtype
from kllm.models.random import fill_random
from kllm.parallel.communicator import Communicator
from kllm.parallel.emulated import EmulatedComm
from kllm.parallel.link import Link
from kllm.parallel.single import SingleComm
from tests.models.harness import Harness
from tests.parallel.relay import relays

PROMPTS = [5, 40, 18, 70, 9]
STEPS = [[0, 1, 2, 3, 4], [0, 1, 2], [4], [1, 2, 3, 4], [0, 1, 2, 3]]  # who decodes
MAX_LEN = 256


class Rerun:
    """Stands in for a captured graph."""

    def __init__(self, run: Callable[[], list[Tensor]], results: list[Tensor]) -> None:
        self.run, self.results = run, results

    def replay(self) -> None:
        for result, value in zip(self.results, self.run(), strict=True):
            result.copy_(value)


class RerunGraphs(DecodeGraphs):
    """Graphs whose replay runs the model."""

    def _record(self, run: Callable[[], list[Tensor]]) -> Any:
        results = run()  # all rows are padding, as in a capture's first run
        return Rerun(run, results), results


def tiny(family_name: str, device: torch.device, comm: Communicator | None = None) -> CausalLM:
    """The tiny network of a family in float32, or a stage of it, whose weights are the same."""
    one, family = SingleComm(), MODELS[family_name]()
    groups = Groups(one, one, one, one, one, comm or one)
    with default_device_and_dtype(device, torch.float32):
        model: CausalLM = family.build(family.tiny_config(), groups)
    model.use_attention("auto", "float32")
    fill_random(model, family, seed=0)
    return model.eval()


class Staged:
    """A pipeline whose stages run one after the other, with the states of a few requests.

    Args:
        size: stages; 1: the whole network.
    """

    def __init__(self, family_name: str, device: torch.device, size: int = 1) -> None:
        self.comms = relays(size)
        self.stages = [
            Harness(tiny(family_name, device, comm), num_requests=len(PROMPTS), max_len=MAX_LEN)
            for comm in self.comms
        ]
        generator = torch.Generator().manual_seed(1)
        for request, length in enumerate(PROMPTS):
            self.step({request: torch.randint(0, 90, (length,), generator=generator).tolist()})

    def step(
        self, tokens: dict[int, list[int]], graphs: Sequence[DecodeGraphs] | None = None
    ) -> Tensor:
        """Logits of all tokens, in the order of the plan.

        Args:
            graphs: of each stage, to replay the step with; None: it runs as it is.
        """
        each: Sequence[DecodeGraphs | None] = graphs or [None] * len(self.stages)
        for stage, comm, own in zip(self.stages, self.comms, each, strict=True):
            order, plan = stage.plan(tokens)
            logits = run_stage(stage, plan, comm, own)
            stage.lengths[order] += plan.query_lens
        assert logits is not None
        return logits


@torch.inference_mode()
def run_stage(
    stage: Harness, plan: Plan, comm: Communicator, graphs: DecodeGraphs | None = None
) -> Tensor | None:
    """One stage of a step; logits on the last stage."""
    if graphs is None:
        ctx = ForwardContext.from_plan(plan, stage.pool, stage.device)
        states = run_stages(stage.model, [ctx], comm)
        return None if states is None else stage.model.logits(states[0])
    captured = graphs.find(plan)
    assert captured is not None
    states = run_stages(captured, [captured.load(plan)], comm)
    return None if states is None else captured.logits(states[0], len(plan.query_lens))


def decode_graphs(
    kind: type[DecodeGraphs], stage: Harness, limit: int = MAX_GRAPHS
) -> DecodeGraphs:
    """Graphs of a network and its pool."""
    return kind(
        stage.model,
        stage.pool,
        scratch_page=stage.spare_page,
        scratch_row=stage.spare_row,
        max_pages=stage.tables.shape[1],
        limit=limit,
    )


def check_replayed_steps(
    kind: type[DecodeGraphs], staged: Callable[[], Staged], limit: int, atol: float
) -> None:
    """Batches that grow and shrink, so that rows turn into padding and back."""
    eager, replayed = staged(), staged()
    graphs = [decode_graphs(kind, stage, limit) for stage in replayed.stages]
    for number, requests in enumerate(STEPS):
        tokens = {request: [(7 * number + request) % 90] for request in requests}
        want, got = eager.step(tokens), replayed.step(tokens, graphs)
        torch.testing.assert_close(got, want, rtol=0, atol=atol)
    count = min(limit, len({batch_bucket(len(requests)) for requests in STEPS}))
    assert [len(own._captured) for own in graphs] == [count] * len(graphs)


@torch.inference_mode()
def check_slice(kind: type[DecodeGraphs], device: torch.device, rank: int) -> None:
    """A stage of GLM that would receive a selection, without the others.

    Every step has a new state, and as selected the newest tokens of its requests.
    """
    comm = EmulatedComm(Link(latency_s=1e-6, bytes_per_s=1e9), size=3, rank=rank, device=device)
    stage = Harness(tiny("glm_moe_dsa", device, comm), num_requests=len(PROMPTS), max_len=MAX_LEN)
    stage.pool.fill_random(0)
    stage.lengths[:] = PROMPTS
    graphs, sliced, page = decode_graphs(kind, stage), SlicedStage(comm), stage.pool.page_size
    before = torch.zeros(1, device=device)
    for requests in STEPS:
        order, plan = stage.plan({request: [3] for request in requests})
        captured = graphs.find(plan)
        assert captured is not None
        logits = sliced.run(captured, [captured.load(plan)])
        assert (logits is None) == (rank < 2)
        assert captured.results[0].isfinite().all()
        state, selected = captured.received
        assert not torch.equal(state[0], before)
        before = state[0].clone()
        for request, slots in zip(order, selected.tolist(), strict=False):  # then padding
            newest = np.arange(stage.lengths[request], -1, -1)[: len(slots)]
            want = stage.tables[request][newest // page] * page + newest % page
            assert [slot for slot in slots if slot >= 0] == want.tolist()
        stage.lengths[order] += 1
    assert comm.calls["receive"] == 2 * len(STEPS)
