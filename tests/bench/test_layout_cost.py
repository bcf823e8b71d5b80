"""The cost model of a layout: one rank is the plain model, and what is cut gets smaller."""

from dataclasses import replace

import pytest

from kllm.bench.costmodel import CostModel, steady_state
from kllm.bench.layout_cost import TRANSFERS, LayoutCost
from kllm.bench.workloads import Lengths, Workload
from kllm.config import EngineConfig, ParallelConfig, SchedulerConfig
from kllm.models.load import resolve
from kllm.models.shape import model_shape
from kllm.parallel.link import LINKS, Link
from tests.bench.test_costmodel import CEILINGS

CONFIG = EngineConfig(
    model="deepseek-v4", scale="layers:8", device="cpu", dtype="bfloat16", load="random"
)
STEP = {"decodes": 16.0, "context": 1000.0, "prefill_tokens": 512.0, "prefill_start": 256.0}
RESOLVED = resolve(CONFIG)
COST = CostModel.of(RESOLVED, CEILINGS)
SHAPE = model_shape(RESOLVED.family, RESOLVED.config)


def of(link: Link | None = None, **degrees: int) -> LayoutCost:
    return LayoutCost(cost=COST, shape=SHAPE, layout=ParallelConfig(**degrees), link=link)


def test_one_rank_is_the_plain_model() -> None:
    alone, plain = of(LINKS["nvlink4"]).step_floor(**STEP), COST.step_floor(**STEP)
    assert alone.parts == plain.parts


def test_tensor_parallelism_cuts_weights_and_not_latent_entries() -> None:
    whole, cut = of().step_floor(**STEP).parts, of(tp=4).step_floor(**STEP).parts
    for name in ("weights", "experts", "head"):
        assert cut[name].nbytes == pytest.approx(whole[name].nbytes / 4)
        assert cut[name].flops == pytest.approx(whole[name].flops / 4)
    assert cut["attention"].nbytes == whole["attention"].nbytes
    assert cut["attention"].flops == pytest.approx(whole["attention"].flops / 4)


def test_ranks_that_share_experts_read_few_of_them_for_the_tokens_of_all() -> None:
    """As much expert work a rank as alone; an eighth of what eight times the tokens touch."""
    whole = COST.step_floor(decodes=16, context=1000).parts["experts"]
    many = COST.step_floor(decodes=8 * 16, context=1000).parts["experts"]
    shared = of(dp=8, ep=8).step_floor(decodes=16, context=1000).parts["experts"]
    assert shared.flops == pytest.approx(whole.flops)
    assert shared.nbytes == pytest.approx(many.nbytes / 8)
    assert shared.nbytes < whole.nbytes


def test_stages_of_a_pipeline_work_in_turn() -> None:
    """A decode passes through all of them: no faster than one rank, and as much work a rank."""
    one = of().step_floor(decodes=16, context=1000)
    four = of(pp=4).step_floor(decodes=16, context=1000)
    assert four.seconds == pytest.approx(one.seconds)
    assert four.parts["weights"].nbytes == pytest.approx(one.parts["weights"].nbytes / 4)


def test_slower_links_cost_more_and_rings_hide() -> None:
    slow = Link(latency_s=1e-5, bytes_per_s=1e9)
    step = {"prefill_tokens": 4096.0}
    for degrees in ({"tp": 8}, {"dp": 8, "ep": 8}, {"cp": 8, "ep": 8}):
        fast = of(LINKS["nvlink5"], **degrees).step_floor(**step)
        assert of(slow, **degrees).step_floor(**step).seconds > fast.seconds
        assert TRANSFERS not in of(**degrees).step_floor(**step).parts
    ring = of(LINKS["nvlink4"], cp=8)
    ring = replace(ring, layout=replace(ring.layout, cp_kind="ring"))
    gather = replace(ring, layout=replace(ring.layout, cp_kind="all_gather"))
    assert ring.step_floor(**step).parts[TRANSFERS].seconds > 0
    assert gather.step_floor(**step).parts[TRANSFERS].seconds > 0


def test_steady_state_of_a_layout_is_that_of_its_floors() -> None:
    load = Workload(isl=Lengths(512), osl=Lengths(128), num_requests=64, concurrency=16)
    scheduler = SchedulerConfig(max_batch=16, token_budget=512)
    assert steady_state(of(), load, scheduler) == COST.predict(load, scheduler)
    faster = steady_state(of(tp=8), load, scheduler)
    assert faster.output_tokens_per_s > COST.predict(load, scheduler).output_tokens_per_s
