"""Whole networks whose experts are spread over ranks give the logits of one rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kllm import env
from kllm.attention.context import ForwardContext
from kllm.config import ParallelConfig
from kllm.models import deepseek_v4, glm_moe_dsa
from kllm.models.base import Groups
from kllm.models.weights import SafetensorsFolder, fill
from tests.models import deepseek_v4_tiny, glm_moe_dsa_tiny
from tests.models.harness import Harness
from tests.parallel.thread_layouts import run_layout
from tests.tolerances import LOGITS

# An even vocabulary, so that two ranks can split it.
V4 = {**deepseek_v4_tiny.TINY, "vocab_size": 98}
GLM = {**glm_moe_dsa_tiny.GLM, "vocab_size": 98}
FAMILIES: dict[str, tuple[Any, dict[str, Any], Callable[..., None]]] = {
    "deepseek_v4": (deepseek_v4, V4, deepseek_v4_tiny.write_checkpoint),
    "glm_moe_dsa": (glm_moe_dsa, GLM, glm_moe_dsa_tiny.write_checkpoint),
}
LAYOUTS = {
    "tp2": ParallelConfig(tp=2),
    "tp2 ep2": ParallelConfig(tp=2, ep=2),
    "dp2 ep2": ParallelConfig(dp=2, ep=2),
    "dp2 tp2 ep4, copies": ParallelConfig(dp=2, tp=2, ep=4, redundant_experts=4),
}
# Tokens that each request-DP rank runs, step by step: prompts of their own, then decodes.
STEPS = ((21, 1), (1, 9), (1, 1), (1, 1))
TOKENS = [[(7 * i + 3 * dp + i * i) % 98 for i in range(40)] for dp in range(2)]


@pytest.fixture(scope="module", params=FAMILIES)
def released(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A family and a checkpoint of it."""
    _, data, write = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    write(folder, data, seed=3)
    return request.param, folder


def network(family: str, folder: Path, groups: Groups) -> Any:
    module, data, _ = FAMILIES[family]
    config = module.read_config(data)
    model = module.build(config, groups)
    fill(model, module.manifest(config), SafetensorsFolder(folder), groups)
    return model.eval()


def run(model: Any, dp: int, layout: ParallelConfig) -> Tensor:
    """Logits of all tokens of one request-DP rank."""
    harness, out, start = Harness(model), [], 0
    for lengths in STEPS:
        n = lengths[dp]
        _, plan = harness.plan({0: TOKENS[dp][start : start + n]})
        peers = tuple(lengths[rank // layout.tp] for rank in range(layout.ep))
        ctx = ForwardContext.from_plan(
            plan,
            harness.pool,
            harness.device,
            peer_tokens=peers,
            decode_only=max(lengths) == 1,
        )
        with torch.inference_mode():
            model.prepare(ctx)
            out.append(model.logits(model(ctx)))
        harness.lengths += n
        start += n
    return torch.cat(out)


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_one_rank(
    released: tuple[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    layout, family = LAYOUTS[name], released[0]
    alone = network(*released, Groups.single())
    want = [run(alone, dp, ParallelConfig()) for dp in range(layout.dp)]

    def work(rank: int, groups: Groups) -> Tensor:
        return run(network(*released, groups), rank // layout.tp, layout)

    for rank, got in enumerate(run_layout(layout, work)):
        torch.testing.assert_close(got, want[rank // layout.tp], rtol=0, atol=LOGITS[family])
