"""The cost model against numbers worked out by hand, and its directions."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.bench.costmodel import CostModel, touched_experts
from kllm.bench.workloads import Lengths, Workload
from kllm.cache.spec import CacheSpec, PagedState, RingState
from kllm.config import EngineConfig, SchedulerConfig
from kllm.hardware import Ceilings
from kllm.models.base import WorkShape
from kllm.models.load import resolve
from kllm.quant.entry import EntryFormat

CEILINGS = Ceilings(
    device="cuda",
    copy_bytes_per_s=4.0e12,
    read_bytes_per_s=4.35e12,
    matmul_flops_per_s={"float32": 50e12, "bfloat16": 760e12},
    launch_s=2e-6,
)
SMOLLM2 = EngineConfig(model="smollm2-135m", load="random", scale="full", device="cpu")


def smollm2(dtype: str = "bfloat16") -> CostModel:
    return CostModel.of(resolve(replace(SMOLLM2, dtype=dtype)), CEILINGS)


def moe() -> CostModel:
    shape = WorkShape(
        token_params=1000,
        head_params=500,
        expert_params=100,
        num_experts=8,
        experts_per_token=2,
        moe_layers=3,
        attention_flops=lambda context: 10.0 * context,
        attention_entries=lambda context: {"kv": 2.0 * context, "tail": 4.0},
    )
    entry = EntryFormat(width=16, fp8_channels=16, group=16)
    cache = CacheSpec(
        paged=(PagedState(name="kv", layers=(0, 1), entry=entry, heads=2),),
        rings=(RingState(name="tail", layers=(0,), window=4, width=6),),
    )
    ceilings = replace(CEILINGS, read_bytes_per_s=1e3, matmul_flops_per_s={"float32": 1e4})
    return CostModel(
        shape=shape, cache=cache, ceilings=ceilings, dtype="float32", kv_dtype="float32"
    )


def test_smollm2_batch_1_floor_is_its_weights_over_the_read_bandwidth() -> None:
    """134,515,008 parameters, tied embedding read once as the head, norms left out."""
    layer = 576 * 576 * 2 + 576 * 192 * 2 + 3 * 576 * 1536
    weights = 30 * layer + 49152 * 576
    assert weights == 134_515_008 - 61 * 576
    kv_bytes = 128 * 30 * 2 * 3 * 64 * 2
    floor = smollm2().decode_floor(1, 128)
    assert floor.seconds == pytest.approx((2 * weights + kv_bytes) / 4.35e12, rel=1e-12)
    assert floor.seconds == pytest.approx(0.062e-3, rel=0.05)
    assert floor.largest == "weights"


def test_every_part_of_a_mixed_moe_step_by_hand() -> None:
    floor = moe().step_floor(decodes=2, context=10, prefill_tokens=3, prefill_start=4, samples=2)
    kv = 2 * (20 * 2 * 64 + 4 * 24) + (14 * 2 * 64 + 4 * 24)
    touched = 8 * (1 - 0.75**5)
    assert floor.parts["weights"].seconds == pytest.approx(max(4000 / 1e3, 2000 * 5 / 1e4))
    assert floor.parts["experts"].nbytes == pytest.approx(3 * touched * 100 * 4)
    assert floor.parts["experts"].flops == pytest.approx(2 * 3 * 2 * 100 * 5)
    assert floor.parts["attention"].nbytes == pytest.approx(kv)
    assert floor.parts["attention"].flops == pytest.approx(2 * 100 + 3 * 60)
    assert floor.parts["head"].seconds == pytest.approx(max(2000 / 1e3, 1000 * 2 / 1e4))
    assert floor.seconds == pytest.approx(sum(p.seconds for p in floor.parts.values()))


def test_large_batches_are_bound_by_arithmetic() -> None:
    floor = smollm2().decode_floor(100_000, 1)
    weights = floor.parts["weights"]
    assert weights.seconds == pytest.approx(weights.flops / 760e12)


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0.0), (1, 2.0), (2, 3.5), (1e6, 8.0)])
def test_touched_experts_by_hand(tokens: float, expected: float) -> None:
    assert touched_experts(8, 2, tokens) == pytest.approx(expected)


def test_dense_models_touch_no_experts() -> None:
    assert touched_experts(0, 0, 5) == 0
    assert "experts" not in smollm2().decode_floor(4, 100).parts


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(1, 4000), st.integers(0, 2000))
def test_floors_grow_with_batch_context_and_chunk(batch: int, context: int, chunk: int) -> None:
    for model in (smollm2(), moe()):
        here = model.step_floor(decodes=batch, context=context, prefill_tokens=chunk).seconds
        for change in (
            {"decodes": batch + 1},
            {"context": context + 1},
            {"prefill_tokens": chunk + 1},
        ):
            step = {"decodes": batch, "context": context, "prefill_tokens": chunk, **change}
            assert model.step_floor(**step).seconds >= here


def test_float32_costs_twice_the_bytes_of_bfloat16() -> None:
    half, full = smollm2().decode_floor(1, 100), smollm2("float32").decode_floor(1, 100)
    assert full.parts["weights"].nbytes == 2 * half.parts["weights"].nbytes
    assert full.parts["attention"].nbytes == 2 * half.parts["attention"].nbytes


def load(concurrency: int | None = 16, rate: float | None = None) -> Workload:
    return Workload(
        isl=Lengths(512), osl=Lengths(128), num_requests=64, concurrency=concurrency, rate=rate
    )


def test_prediction_obeys_littles_law() -> None:
    found = smollm2().predict(load(40), SchedulerConfig(max_batch=16, token_budget=512))
    in_system = found.requests_per_s * (found.ttft_s + 127 * found.tpot_s)
    assert in_system == pytest.approx(40)
    assert found.running <= 16


def test_batch_1_prediction_is_one_prefill_and_then_decode_steps() -> None:
    model = smollm2()
    found = model.predict(load(1), SchedulerConfig(max_batch=1, token_budget=4096))
    prefill = model.step_floor(decodes=127 / 128, context=576, prefill_tokens=512).seconds
    decode = model.step_floor(decodes=127 / 128, context=576).seconds
    assert found.tpot_s == pytest.approx((prefill + 127 * decode) / 128, rel=1e-3)
    assert found.requests_per_s == pytest.approx(1 / (128 * found.tpot_s), rel=1e-3)


def test_more_batch_gives_more_throughput_and_longer_steps() -> None:
    found = [
        smollm2().predict(load(256), SchedulerConfig(max_batch=batch, token_budget=2048))
        for batch in (1, 4, 16, 64)
    ]
    rates = [p.output_tokens_per_s for p in found]
    assert rates == sorted(rates)
    assert found[-1].tpot_s > found[0].tpot_s
    assert found[-1].ttft_s < found[0].ttft_s


def test_kv_memory_limits_the_batch() -> None:
    wide = SchedulerConfig(max_batch=64)
    found = smollm2().predict(load(64), wide, kv_tokens=5 * 640)
    assert found.running == pytest.approx(5)
    assert found.ttft_s > smollm2().predict(load(64), wide).ttft_s


def test_overhead_adds_to_every_step() -> None:
    plain = smollm2().predict(load(4), SchedulerConfig())
    slow = smollm2().predict(load(4), SchedulerConfig(), step_overhead_s=1e-3)
    assert slow.step_s == pytest.approx(plain.step_s + 1e-3)


def test_open_loop_beyond_capacity_never_answers() -> None:
    capacity = smollm2().predict(load(10_000), SchedulerConfig()).requests_per_s
    under = smollm2().predict(load(None, 0.5 * capacity), SchedulerConfig())
    over = smollm2().predict(load(None, 2 * capacity), SchedulerConfig())
    assert under.requests_per_s == pytest.approx(0.5 * capacity, rel=1e-3)
    assert under.ttft_s < 1
    assert over.ttft_s == float("inf")
    assert over.requests_per_s == pytest.approx(capacity)
