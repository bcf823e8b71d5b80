"""Steps of a prompt on the ranks of a layout, against the engine running all of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kllm.bench.prompt_time import Place, places, prompt_cost
from kllm.bench.shared_prompt import KINDS, SharedPrompt, buffer_bytes
from kllm.cache.pool import KVPool
from kllm.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from kllm.core import SamplingParams
from kllm.engine.engine import Engine
from kllm.engine.sliced import SlicedExecutor
from kllm.models.load import resolve
from kllm.parallel.emulated import EmulatedComm
from kllm.parallel.link import Link
from kllm.parallel.stripes import Stripes
from tests.tolerances import PROMPT_TIME

CHUNK = 128
# So slow that transfers take most of the time: they do not depend on who else uses the machine.
SLOW = {"ring": 3e6, "all_gather": 3e6, "replicated": 1e6}  # bytes a second
SLICE = EngineConfig(
    model="llama-3-8b",
    scale="tiny",
    load="random",
    device="cpu",
    fidelity="rank-slice",
    max_model_len=CHUNK,
    scheduler=SchedulerConfig(max_batch=1, token_budget=CHUNK),
    parallel=ParallelConfig(cp=2, cp_kind="ring"),
)


def whole_prompt(kind: str, tokens: int, link: Link) -> tuple[float, float]:
    """Seconds of all steps of a prompt, and those that its transfers take, from the engine."""
    config = replace(
        SLICE, max_model_len=tokens + 1, parallel=replace(SLICE.parallel, cp_kind=kind)
    )
    executor = SlicedExecutor(config, resolve(config))
    cp = executor.groups.cp
    assert isinstance(cp, EmulatedComm)
    cp.link = link
    engine = Engine(config, executor=executor)
    try:
        prompt = np.random.default_rng(0).integers(0, engine.vocab_size, tokens).tolist()
        seconds = []
        for _ in range(2):  # the first one warms up
            cp.busy_s = 0.0
            engine.add(prompt, SamplingParams(max_tokens=1))
            steps = []
            while engine.has_work:
                steps.append(engine.step().stats.execute_s)
            seconds.append(sum(steps))
        return seconds[1], cp.busy_s
    finally:
        engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_some_steps_tell_what_a_whole_prompt_takes(kind: str) -> None:
    tokens = 8 * CHUNK + 77
    link = Link(latency_s=2e-4, bytes_per_s=SLOW[kind])
    prompt = SharedPrompt(SLICE, resolve(SLICE), None)
    try:
        prompt.arrange(kind, tokens)
        found = places([tokens], CHUNK)
        prompt.run(found[0], link)
        costs = {place: prompt.run(place, link) for place in found}
    finally:
        prompt.close()
    assert len(costs) < tokens // CHUNK
    cost = prompt_cost(tokens, CHUNK, costs)
    seconds, transfer_s = whole_prompt(kind, tokens, link)
    assert cost.transfer_s == pytest.approx(transfer_s, rel=0.02)
    assert cost.transfer_s > 0.5 * cost.seconds
    if kind != "ring":
        assert cost.exposed_s >= 0.95 * cost.transfer_s, "nothing is computed meanwhile"
    assert cost.seconds == pytest.approx(seconds, rel=PROMPT_TIME)


def test_prompts_need_their_share_and_replicated_ones_everything() -> None:
    config = replace(SLICE, parallel=replace(SLICE.parallel, cp=4))
    prompt = SharedPrompt(config, resolve(config), None)
    try:
        tokens = 16 * CHUNK
        ring, gathered, replicated = (prompt.need(kind, tokens) for kind in KINDS)
        assert gathered == ring
        assert replicated.typical == replicated.owner == ring.owner
        assert ring.typical == pytest.approx(replicated.typical / 4, rel=1e-6)
        prompt.arrange("ring", tokens)
        assert prompt.ranks.sharing.budget.num_tokens == tokens / 4
    finally:
        prompt.close()


def test_buffers_grow_with_the_prompt_unless_it_is_replicated() -> None:
    resolved = resolve(SLICE)
    spec = resolved.family.cache_spec(resolved.config)
    stripes, per_token = Stripes(4, 16), spec.bytes_per_token("float32") / len(spec.paged[0].layers)

    def at(kind: str, start: int) -> float:
        place = Place(start, start + CHUNK, False)
        return buffer_bytes(spec, stripes, kind, place, "float32")

    assert at("ring", 0) == 2 * CHUNK / 4 * per_token
    assert at("ring", 7 * CHUNK) == 2 * 8 * CHUNK / 4 * per_token
    # A part to send, the parts of four ranks, and all of them in order.
    gathered = (1 / 4 + 2) * CHUNK * per_token
    assert at("all_gather", 7 * CHUNK) == 8 * at("all_gather", 0) == 8 * gathered
    assert at("replicated", 7 * CHUNK) == at("replicated", 0) == gathered


@pytest.mark.parametrize("model", ["llama-3-8b", "glm-5.2", "deepseek-v4"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "fp8"])
def test_random_entries_are_numbers_that_differ(model: str, kv_dtype: str) -> None:
    resolved = resolve(replace(SLICE, model=model, cache=CacheConfig(dtype=kv_dtype)))
    spec = resolved.family.cache_spec(resolved.config)
    pool = KVPool(
        spec,
        num_pages=3,
        page_size=2 * spec.page_granule,
        max_batch=2,
        kv_dtype=kv_dtype,
        compute_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    pool.fill_random(seed=1)
    for state in spec.paged:
        for layer in state.layers:
            stored = pool.pages(state.name, layer)
            values = pool.unpack(state.name, stored.view(-1, *stored.shape[2:])).float()
            assert values.isfinite().all()
            assert 0.7 < values.std().item() < 1.3
            assert len(values.flatten(1).unique(dim=0)) == len(values)
