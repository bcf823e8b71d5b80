"""The engine on real tiny networks: tokens do not depend on company, and nothing leaks."""

import gc
import tracemalloc
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from kllm.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from kllm.core import FinishReason, Request, SamplingParams
from kllm.engine.engine import Engine
from kllm.errors import CapacityError, ConfigError
from kllm.models import devices
from kllm.models.base import CausalLM, Groups
from kllm.models.load import load_model, resolve

FAMILIES = ["llama-3-8b", "deepseek-v4", "glm-5.2"]
LENGTHS = [1, 5, 17, 33, 64, 90]


def config(model: str = "llama-3-8b", **options: Any) -> EngineConfig:
    cache_options = {"memory_bytes": 32 << 20, **options.pop("cache", {})}
    batch = options.pop("batch", 4)
    return EngineConfig(
        model=model,
        scale="tiny",
        load="random",
        device="cpu",
        cache=CacheConfig(**cache_options),
        scheduler=SchedulerConfig(max_batch=batch, token_budget=options.pop("budget", 64)),
        max_model_len=options.pop("max_model_len", 256),
        **options,
    )


@cache
def network(model: str) -> CausalLM:
    """Loaded once: the engines of a test differ only in their settings."""
    return load_model(
        resolve(config(model)),
        device=torch.device("cpu"),
        dtype=torch.float32,
        groups=Groups.single(),
    )


def make(model: str = "llama-3-8b", **options: Any) -> Engine:
    return Engine(config(model, **options), model=network(model))


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = make()
    yield made
    made.close()
    assert made.free_pages == made.budget.num_pages


def greedy(max_tokens: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **options)


def prompts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 90, size).tolist() for size in LENGTHS]


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def outputs(engine: Engine, params: list[SamplingParams]) -> list[list[int]]:
    requests = [engine.add(p, q) for p, q in zip(prompts(), params, strict=True)]
    run(engine)
    engine.close()
    assert engine.free_pages == engine.budget.num_pages
    return [request.output_ids for request in requests]


@cache
def alone(model: str) -> list[list[int]]:
    """Each prompt by itself, in one chunk."""
    params = [greedy(10 + 3 * i) for i in range(len(LENGTHS))]
    return outputs(make(model, batch=1, budget=128), params)


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"batch": 6, "budget": 128},
        {"batch": 3, "budget": 7},  # odd chunks, shorter than a page
        {"batch": 1, "budget": 1},  # every prompt token a step of its own
        {"batch": 4, "budget": 16, "cache": {"page_size": 64}},
    ],
    ids=["together", "odd-chunks", "single-tokens", "wide-pages"],
)
def test_greedy_tokens_do_not_depend_on_company_or_chunks(
    model: str, options: dict[str, Any]
) -> None:
    params = [greedy(10 + 3 * i) for i in range(len(LENGTHS))]
    assert outputs(make(model, **options), params) == alone(model)


@pytest.mark.parametrize("model", FAMILIES)
def test_preempted_requests_continue_with_the_same_tokens(model: str) -> None:
    """Five requests of a page each grow to two pages at once, and nine pages are there."""
    spec = network(model).cache_spec
    page = max(16, spec.page_granule)
    memory = spec.bytes_per_request("float32") * 6 + 10 * page * spec.bytes_per_token("float32")
    rng = np.random.default_rng(4)
    texts = [rng.integers(3, 90, page - 4).tolist() for _ in range(5)]

    def answers(**options: Any) -> list[Request]:
        engine = make(model, budget=512, max_model_len=2 * page, **options)
        requests = [engine.add(text, greedy(16)) for text in texts]
        run(engine)
        engine.close()
        return requests

    cache_options = {"memory_bytes": int(memory), "page_size": page}
    crowded, calm = answers(batch=5, cache=cache_options), answers(batch=1)
    assert [r.output_ids for r in crowded] == [r.output_ids for r in calm]
    assert sum(r.preemptions for r in crowded) > 0
    assert sum(r.preemptions for r in calm) == 0


def test_seeded_samples_do_not_depend_on_company_or_preemption() -> None:
    def params(seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=15, temperature=1.3, top_p=0.9, seed=seed, ignore_eos=True)

    seeds = [params(i) for i in range(len(LENGTHS))]
    together = outputs(make(batch=6, budget=128), seeds)
    assert together == outputs(make(batch=2, budget=13), seeds)
    assert len({tuple(ids) for ids in together}) == len(together)


def test_unseeded_samples_repeat_with_the_engine_seed() -> None:
    drawn = [SamplingParams(max_tokens=8, ignore_eos=True)] * len(LENGTHS)
    first = outputs(make(), drawn)
    assert outputs(make(), drawn) == first
    assert outputs(Engine(config(seed=1), model=network("llama-3-8b")), drawn) != first


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 8])
def test_abort_at_any_moment_frees_everything(engine: Engine, steps: int) -> None:
    """Waiting, in the middle of a prompt, and decoding."""
    requests = [engine.add(p, greedy(30)) for p in prompts()]
    for _ in range(steps):
        engine.step()
    for request in requests:
        engine.abort(request.id)
        assert request.finish_reason is FinishReason.ABORT
    assert engine.free_pages == engine.budget.num_pages
    assert not engine.has_work
    survivor = engine.add(prompts()[2], greedy(16))
    run(engine)
    assert survivor.output_ids == alone("llama-3-8b")[2]


def test_requests_that_have_ended_leave_nothing_behind(engine: Engine) -> None:
    """A process that serves for weeks is no larger than after its first requests."""
    kinds = [
        greedy(2, stop_token_ids=(5,)),
        SamplingParams(max_tokens=2, seed=3, top_p=0.9, presence_penalty=1.0),
        greedy(3, logprobs=2),
    ]

    def grown(rounds: int) -> int:
        """Bytes of Python objects that so many rounds add."""
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(rounds):
            for params in kinds:
                engine.add([5, 6, 7, 8], params)
            engine.abort(engine.add([5] * 70, greedy()).id)
            engine.step()
            engine.abort(engine.add([5] * 70, greedy()).id)
            run(engine)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        grown(20)
        assert grown(60) < 60 * 5 * 100, "an id in a dictionary takes more than 100 bytes"
    finally:
        tracemalloc.stop()


def test_abort_of_an_ended_request_is_nothing(engine: Engine) -> None:
    request = engine.add([5, 6], greedy(2))
    run(engine)
    assert engine.abort(request.id) is None
    assert request.finish_reason is FinishReason.LENGTH


def test_stop_token_ends_the_request(engine: Engine) -> None:
    free = engine.add([5, 6, 7], greedy(12))
    run(engine)
    stop = free.output_ids[4]
    first = free.output_ids.index(stop)
    request = engine.add([5, 6, 7], greedy(12, stop_token_ids=(stop,)))
    run(engine)
    assert request.output_ids == free.output_ids[: first + 1]
    assert request.finish_reason is FinishReason.STOP


def test_output_ends_where_the_engine_has_no_more_room() -> None:
    engine = make(max_model_len=32, batch=2)
    request = engine.add(list(range(3, 30)), greedy(1000))
    run(engine)
    assert len(request.output_ids) == 5
    assert request.finish_reason is FinishReason.LENGTH


def test_logprobs_are_those_of_the_greedy_choice(engine: Engine) -> None:
    request = engine.add([5, 6, 7], greedy(6, logprobs=3))
    plain = engine.add([5, 6, 7], greedy(6))
    run(engine)
    assert request.output_ids == plain.output_ids
    assert [entry.token_id for entry in request.logprobs] == request.output_ids
    for entry in request.logprobs:
        assert entry.top[0] == (entry.token_id, entry.logprob)
        assert entry.logprob < 0
    assert plain.logprobs == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([5, 10**6], "token ids must be in 0"),
        ([-1], "token ids must be in 0"),
        ([5] * 256, "256 tokens a request"),
    ],
)
def test_impossible_prompt_is_refused_and_changes_nothing(
    engine: Engine, prompt: list[int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine.add(prompt, greedy())
    assert not engine.has_work


def test_stop_strings_need_a_tokenizer(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        engine.add([5], greedy(stop=("x",)))


def test_request_id_in_use_is_refused(engine: Engine) -> None:
    engine.add([5], greedy(), request_id="same")
    with pytest.raises(ConfigError, match="'same' is in use"):
        engine.add([5], greedy(), request_id="same")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cache": {"memory_bytes": 1 << 10}}, CapacityError, "KV memory is"),
        ({"max_model_len": 10**9}, ConfigError, "beyond the model's"),
        ({"model": "deepseek-v4", "cache": {"page_size": 24}}, ConfigError, "multiple of 16"),
        ({"budget": 2}, ConfigError, "token_budget 2 is smaller"),
        ({"parallel": ParallelConfig(tp=3)}, ConfigError, "tp 3 does not divide"),
    ],
)
def test_impossible_engine_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(**options)


HUGE = 2**70  # does not fit any array
EXTREMES = [
    {"max_tokens": HUGE},
    {"top_k": HUGE},
    {"top_p": 1e-320},
    {"min_p": 1.0},
    {"temperature": 1e-320},
    {"temperature": 1e300},
    {"repetition_penalty": 0.01, "presence_penalty": 100.0, "frequency_penalty": -100.0},
    {"repetition_penalty": 100.0, "presence_penalty": -100.0, "frequency_penalty": 100.0},
    {"seed": -HUGE},
    {"logprobs": 100},
    {"stop_token_ids": (HUGE, -1)},
]


def test_parameters_at_their_limits_cost_the_others_nothing() -> None:
    """Every value that is accepted runs to the end, in one batch with a plain request."""
    engine = make(batch=len(EXTREMES) + 1, budget=128, max_model_len=96)
    other = engine.add(prompts()[2], greedy(16))
    extremes = [
        engine.add(prompts()[1], SamplingParams(**{"ignore_eos": True, "max_tokens": 40, **values}))
        for values in EXTREMES
    ]
    run(engine)
    assert other.output_ids == alone("llama-3-8b")[2]
    for request in extremes:
        room = engine.budget.max_model_len - len(request.prompt_ids)
        assert len(request.output_ids) == min(request.params.max_tokens, room)
        assert all(0 <= token < engine.vocab_size for token in request.output_ids)


def test_step_counts_what_ran(engine: Engine) -> None:
    engine.add(list(range(3, 43)), greedy(3))
    first = engine.step().stats
    assert (first.num_tokens, first.num_decodes) == (40, 0)
    second = engine.step().stats
    assert (second.num_tokens, second.num_decodes) == (1, 1)


def every_request_once(requests: list[Request]) -> bool:
    return len({id(request) for request in requests}) == len(requests)


def test_each_request_is_reported_finished_exactly_once(engine: Engine) -> None:
    added = [engine.add(p, greedy(5)) for p in prompts()]
    ended: list[Request] = []
    while engine.has_work:
        ended += engine.step().finished
    assert every_request_once(ended)
    assert set(map(id, ended)) == set(map(id, added))


def test_small_networks_get_one_thread_and_large_ones_all() -> None:
    make().close()
    assert torch.get_num_threads() == 1
    devices.fit_threads(devices.SMALL_NETWORK_BYTES)
    assert torch.get_num_threads() == devices.THREADS
