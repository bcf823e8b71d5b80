"""A rank alone is told its steps as one among others, whichever rank it is."""

from collections.abc import Sequence

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from kllm.attention.context import ForwardContext
from kllm.config import EngineConfig, ParallelConfig, SchedulerConfig
from kllm.core import Plan, Request, SamplingParams
from kllm.engine.engine import Engine
from kllm.engine.rank import Rank
from kllm.engine.sliced import SlicedExecutor, busiest
from kllm.engine.step import MicroStep, RankOutcome
from kllm.layers.moe import MoE
from kllm.models.load import resolve

STEPS = 6
PROMPTS = [[3, 5, 7], [11, 2, 9, 4, 8], list(range(20))]


def sliced(model: str, layout: ParallelConfig, number: int) -> Engine:
    config = EngineConfig(
        model=model,
        scale="tiny",
        load="random",
        device="cpu",
        fidelity="rank-slice",
        slice_rank=number,
        max_model_len=64,
        parallel=layout,
        scheduler=SchedulerConfig(max_batch=4, token_budget=64),
    )
    return Engine(config, executor=SlicedExecutor(config, resolve(config)))


@pytest.mark.parametrize(
    ("layout", "number", "samples"),
    [
        (ParallelConfig(tp=2), 0, True),
        (ParallelConfig(tp=2), 1, False),
        (ParallelConfig(pp=2), 0, False),
        (ParallelConfig(pp=2), 1, True),
        (ParallelConfig(cp=2, cp_kind="ring"), 1, True),
    ],
)
def test_a_slice_knows_its_requests_from_what_it_is_told(
    layout: ParallelConfig, number: int, samples: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[MicroStep, list[tuple[str, int]]]] = []
    run = Rank.run

    def watched(rank: Rank, micro: Sequence[MicroStep], requests: Sequence[Request]) -> RankOutcome:
        lengths = [(request.id, len(request.output_ids)) for request in requests]
        assert not any(request in mine for request in requests), "copies, as in another process"
        found = run(rank, micro, requests)
        seen.append((micro[0], lengths if len(found.token_ids) else []))
        return found

    monkeypatch.setattr(Rank, "run", watched)
    engine = sliced("llama-3-8b", layout, number)
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    mine: list[Request] = []
    try:
        mine += [engine.add(prompt, params) for prompt in PROMPTS]
        while engine.has_work:
            engine.step()
    finally:
        engine.close()
    assert [len(request.output_ids) for request in mine] == [STEPS] * len(PROMPTS)
    sampled = [lengths for _, lengths in seen if lengths]
    assert bool(sampled) == samples
    for step, lengths in enumerate(sampled):
        assert {length for _, length in lengths} == {step}, "its own copies get its own tokens"
    here = {name for lengths in sampled for name, _ in lengths}
    if layout.cp == 1:
        assert len(here) == (len(PROMPTS) if samples else 0)
        return
    assert 0 < len(here) < len(PROMPTS), "each rank has requests of its own"
    others = [request for request in mine if request.id not in here]
    assert all(np.array_equal(request.output_ids, [0] * STEPS) for request in others)


@pytest.mark.parametrize(
    "layout",
    [ParallelConfig(dp=4, ep=2), ParallelConfig(dp=2, tp=2, ep=2, ep_backend="all_gather")],
    ids=["dp4+ep2", "dp2·tp2+ep2"],
)
@pytest.mark.parametrize("number", range(4))
def test_a_slice_of_any_expert_group_has_peers(
    layout: ParallelConfig, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tokens as the groups that are absent have planned."""
    seen: list[tuple[int, ...]] = []
    forward = MoE.forward

    def watched(moe: MoE, x: Tensor, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        seen.append(ctx.peer_tokens)
        return forward(moe, x, token_ids, ctx)

    monkeypatch.setattr(MoE, "forward", watched)
    engine = sliced("deepseek-v4-flash", layout, number)
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    try:
        for _ in range(layout.dp):
            engine.add([3, 5, 7], params)
        while engine.has_work:
            engine.step()
    finally:
        engine.close()
    assert set(seen) == {(3, 3), (1, 1)}, "prompts, then decodes"


@pytest.mark.parametrize("number", range(3))
def test_each_step_is_that_of_the_busiest_group(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in the place of the rank's own group, whose tokens stand in that of the busiest."""
    seen: list[tuple[int, tuple[int, ...]]] = []
    run = Rank.run

    def watched(rank: Rank, micro: Sequence[MicroStep], requests: Sequence[Request]) -> RankOutcome:
        plan = micro[0].plan
        assert plan is not None
        seen.append((plan.num_tokens, micro[0].peer_tokens))
        return run(rank, micro, requests)

    monkeypatch.setattr(Rank, "run", watched)
    engine = sliced("deepseek-v4-flash", ParallelConfig(dp=3), number)
    prompts, outputs = [[3] * 9, [5] * 4, [7] * 6], [2, 6, 4]  # in the order of the groups
    requests = []
    try:
        for prompt, count in zip(prompts, outputs, strict=True):
            params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            requests.append(engine.add(prompt, params))
        while engine.has_work:
            engine.step()
    finally:
        engine.close()
    first = [9, 4, 6]
    first[number], first[0] = first[0], first[number]
    assert seen[0] == (9, tuple(first))
    assert [tokens for tokens, _ in seen[1:]] == [1] * 5, "as long as any group has work"
    assert [len(request.output_ids) for request in requests] == outputs
    assert not any(requests[1].output_ids[:2]), "tokens of absent ranks are 0"


def test_the_busiest_group_has_the_most_tokens_then_the_longest_contexts() -> None:
    def plan(tokens: int, context: int) -> Plan:
        one = np.ones(1, np.int32)
        ids = np.zeros(tokens, np.int64)
        return Plan(
            step=0,
            num_decodes=0,
            rows=one,
            query_lens=one * tokens,
            context_lens=one * context,
            token_ids=ids,
            positions=ids,
            block_tables=one[None],
            samples=np.ones(1, np.bool_),
        )

    assert busiest([plan(4, 9), plan(5, 5), None], 0) == 1
    assert busiest([plan(4, 9), plan(4, 10)], 0) == 1
    assert busiest([plan(4, 9), None, plan(4, 9)], 2) == 2, "its own among equals"
    assert busiest([None, plan(1, 1)], 0) == 1


def test_a_slice_without_memory_for_its_kv_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    before = psutil.Process().children()
    monkeypatch.setattr(Rank, "allocate", no_room)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        sliced("llama-3-8b", ParallelConfig(tp=2), 0)
    assert psutil.Process().children() == before, "also while the error is kept"
    assert caught.value
