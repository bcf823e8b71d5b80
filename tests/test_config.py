"""Configs refuse what cannot be, with a sentence that names the field."""

from typing import Any

import pytest

from kllm import env
from kllm.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from kllm.core import SamplingParams
from kllm.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: CacheConfig(page_size=-1), "page_size"),
        (lambda: CacheConfig(memory_fraction=0.0), "memory_fraction"),
        (lambda: CacheConfig(memory_fraction=1.5), "memory_fraction"),
        (lambda: CacheConfig(dtype="fp3"), "fp3"),
        (lambda: SchedulerConfig(max_batch=0), "max_batch"),
        (lambda: SchedulerConfig(token_budget=0), "token_budget"),
        (lambda: ParallelConfig(tp=0), "tp"),
        (lambda: ParallelConfig(dp=10**12), "at most 4096"),
        (lambda: ParallelConfig(dp=2, ep=2, redundant_experts=-1), "redundant_experts"),
        (lambda: ParallelConfig(dp=2, redundant_experts=4), "ep is 1; raise ep"),
        (lambda: EngineConfig(model=""), "no model"),
        (lambda: EngineConfig(model="m", dtype="int3"), "int3"),
        (lambda: EngineConfig(model="m", max_model_len=-5), "max_model_len"),
    ],
)
def test_impossible_config_is_refused_by_name(make: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make()


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"top_k": -1},
        {"top_p": 0.0},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"presence_penalty": 1e300},
        {"frequency_penalty": -3e38},
        {"frequency_penalty": float("nan")},
        {"logprobs": 101},
        {"stop": ("",)},
    ],
)
def test_impossible_sampling_parameter_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        SamplingParams(**values)


def test_unreadable_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    env.read.cache_clear()
    monkeypatch.setenv("KLLM_DEBUG", "perhaps")
    try:
        with pytest.raises(ConfigError, match="KLLM_DEBUG='perhaps'"):
            env.debug()
    finally:
        env.read.cache_clear()
