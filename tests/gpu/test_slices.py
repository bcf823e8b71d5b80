"""Slices of layouts on one GPU: every rank's share runs, eagerly and as captured steps."""

import pytest
import torch

from kllm.config import CacheConfig, EngineConfig, SchedulerConfig
from kllm.core import SamplingParams
from kllm.engine.engine import Engine
from kllm.parallel.layout import parse

LAYOUTS = (
    "tp=4",
    "tp=4,ep=4",
    "dp=8,ep=8",
    "dp=4,ep=4,ep_backend=all_to_all",
    "dp=2,tp=2,ep=4",
    "pp=2",
    "cp=4,ep=4,cp_kind=ring",
    "cp=4,ep=4,cp_kind=all_gather",
    "cp=2,cp_kind=replicated",
    "cp=2,tp=2,cp_kind=ring",
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["llama-3-8b", "glm-5.2", "deepseek-v4"])
def test_a_slice_serves_its_requests(cuda: torch.device, model: str, layout: str) -> None:
    if model.startswith("llama"):
        layout = ",".join(part for part in layout.split(",") if not part.startswith("ep"))
    config = EngineConfig(
        model=model,
        scale="tiny",
        fidelity="rank-slice",
        parallel=parse(layout),
        scheduler=SchedulerConfig(max_batch=8, token_budget=512),
        cache=CacheConfig(memory_bytes=1 << 28),
        max_model_len=2048,
    )
    engine = Engine(config)
    try:
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        requests = [engine.add([5] * length, params) for length in (3, 300, 1500, 700)]
        while engine.has_work:
            engine.step()
        assert [len(request.output_ids) for request in requests] == [12] * 4
        pools = sum(len(group.holdings.pools) for group in engine._schedulers)
        assert engine.free_pages == engine.budget.num_pages * pools
    finally:
        engine.close()
