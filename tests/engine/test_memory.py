"""KV memory is divided so that state, pages and one request fit, or refused with numbers."""

from dataclasses import replace

import pytest
import torch

from kllm.cache.pool import KVPool
from kllm.cache.spec import CacheSpec, PagedState, RingState
from kllm.config import CacheConfig, EngineConfig, SchedulerConfig
from kllm.engine.memory import SCRATCH, KVBudget, page_size, plan_kv
from kllm.errors import CapacityError, ConfigError
from kllm.models.devices import CPU_KV_BYTES
from kllm.quant.entry import EntryFormat

CPU = torch.device("cpu")
ENTRY = EntryFormat(width=8, fp8_channels=8, group=8)
SPEC = CacheSpec(
    paged=(
        PagedState(name="kv", layers=(0, 1), entry=ENTRY, heads=2),
        PagedState(name="packed", layers=(1,), entry=ENTRY, tokens_per_entry=4),
    ),
    rings=(RingState(name="tail", layers=(0,), window=6, width=8, entry=ENTRY),),
)


def config(max_model_len: int = 0, batch: int = 3, **cache: int | str | float) -> EngineConfig:
    return EngineConfig(
        model="any",
        max_model_len=max_model_len,
        cache=CacheConfig(**cache),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(max_batch=batch),
    )


def plan(settings: EngineConfig, model_len: int = 1 << 20, kv_dtype: str = "float32") -> KVBudget:
    return plan_kv(
        settings, SPEC, kv_dtype=kv_dtype, model_len=model_len, device=CPU, activation_bytes=0
    )


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("rewind", [0, 5])
@pytest.mark.parametrize("memory", [20_000, 77_777])
def test_the_pool_fills_the_memory_it_was_given_and_no_more(
    kv_dtype: str, rewind: int, memory: int
) -> None:
    budget = plan(config(memory_bytes=memory, rewind_tokens=rewind), kv_dtype=kv_dtype)
    pool = KVPool(
        SPEC,
        num_pages=budget.num_pages + SCRATCH,
        page_size=budget.page_size,
        max_batch=budget.max_batch + SCRATCH,
        kv_dtype=kv_dtype,
        compute_dtype=torch.float32,
        device=CPU,
        rewind_tokens=rewind,
    )
    page = SPEC.bytes_per_token(kv_dtype) * budget.page_size
    assert memory - page < pool.nbytes() <= memory


def test_a_request_may_be_as_long_as_the_pool_when_no_length_is_said() -> None:
    budget = plan(config(memory_bytes=50_000))
    assert budget.max_model_len == budget.num_tokens < 1 << 20


def test_no_more_pages_are_taken_than_requests_can_fill() -> None:
    budget = plan(config(max_model_len=100, batch=3, memory_bytes=1 << 30))
    assert budget.num_pages == 3 * -(-100 // budget.page_size)
    assert plan(config(batch=3, memory_bytes=1 << 30), model_len=100).max_model_len == 100


def test_a_stage_without_paged_layers_has_as_many_pages_as_are_useful() -> None:
    spec = replace(SPEC, paged=tuple(replace(state, layers=()) for state in SPEC.paged))

    def pages(memory: int) -> int:
        settings = config(256, memory_bytes=memory)
        budget = plan_kv(
            settings, spec, kv_dtype="float32", model_len=1024, device=CPU, activation_bytes=0
        )
        return budget.num_pages * budget.page_size

    assert pages(10_000) == 3 * 256
    with pytest.raises(CapacityError, match="state of 3 requests"):
        pages(100)


def test_a_cpu_engine_takes_a_bounded_share_of_the_machine() -> None:
    budget = plan(config())
    assert budget.num_tokens * SPEC.bytes_per_token("float32") <= CPU_KV_BYTES


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (config(memory_bytes=100), "for the state of 3 requests"),
        (config(memory_bytes=20_000, batch=500), "for the state of 500 requests"),
        (config(memory_bytes=20_000, max_model_len=5000), "request of 5000 tokens"),
    ],
)
def test_too_little_memory_is_refused_with_numbers(settings: EngineConfig, message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        plan(settings)


def test_the_memory_that_a_refusal_names_is_enough() -> None:
    """One byte less than what the state, the spare page and one request need is refused."""
    page = 16 * SPEC.bytes_per_token("float32")
    state = SPEC.bytes_per_request("float32") * (3 + SCRATCH)
    enough = int(state + page * (SCRATCH + 4))
    assert plan(config(max_model_len=64, memory_bytes=enough)).num_pages == 4
    with pytest.raises(CapacityError):
        plan(config(max_model_len=64, memory_bytes=enough - 1))


def test_a_length_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len 65 is beyond the model's 64 positions"):
        plan(config(max_model_len=65), model_len=64)


def test_page_sizes_are_multiples_of_what_the_states_need() -> None:
    assert page_size(config(), SPEC) == 16
    assert page_size(config(page_size=4), SPEC) == 4
    with pytest.raises(ConfigError, match="page_size 2 does not suit this model"):
        page_size(config(page_size=2), SPEC)
    wide = CacheSpec(paged=(PagedState(name="c", layers=(0,), entry=ENTRY, tokens_per_entry=128),))
    assert page_size(config(), wide) == 128
