"""The engine on a GPU: the same tokens with and without CUDA graphs, however prompts are cut."""

import pytest
import torch

from kllm.config import CacheConfig, EngineConfig, SchedulerConfig
from kllm.core import SamplingParams
from kllm.engine.engine import Engine

PRESETS = ["smollm2-135m", "deepseek-v4-flash", "glm-5.2"]
LENGTHS = [5, 90, 33, 1, 18, 64, 7]


def generate(preset: str, device: str, graphs: bool, budget: int = 64) -> list[list[int]]:
    """Greedy tokens of requests that start and end at different steps."""
    engine = Engine(
        EngineConfig(
            model=preset,
            scale="tiny",
            load="random",
            device=device,
            dtype="float32",
            graphs=graphs,
            cache=CacheConfig(memory_bytes=64 << 20),
            scheduler=SchedulerConfig(max_batch=5, token_budget=budget),
            max_model_len=512,
        )
    )
    generator = torch.Generator().manual_seed(3)
    requests = []
    for i, length in enumerate(LENGTHS):
        ids = torch.randint(3, 90, (length,), generator=generator).tolist()
        params = SamplingParams(max_tokens=8 + 5 * i, temperature=0, ignore_eos=True)
        requests.append(engine.add(ids, params))
    while engine.has_work:
        engine.step()
    engine.close()
    return [request.output_ids for request in requests]


@pytest.mark.parametrize("preset", PRESETS)
def test_graphs_do_not_change_the_tokens(cuda: torch.device, preset: str) -> None:
    assert generate(preset, "cuda", graphs=True) == generate(preset, "cuda", graphs=False)


@pytest.mark.parametrize("preset", PRESETS)
def test_results_do_not_depend_on_the_chunk_size(cuda: torch.device, preset: str) -> None:
    whole = generate(preset, "cuda", graphs=True, budget=512)
    assert generate(preset, "cuda", graphs=True, budget=23) == whole
