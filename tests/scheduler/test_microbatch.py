"""Micro-batches in order do what the whole step does."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kllm.core import Plan, Request, SamplingParams
from kllm.scheduler.microbatch import split_plan


def make_plan(lens: list[int], starts: list[int], samples: list[bool], cp: int = 1) -> Plan:
    """A plan whose token ids, tables and rows tell requests and positions apart."""
    spans = [np.arange(s, s + n) for s, n in zip(starts, lens, strict=True)]
    batch = len(lens)
    tables = np.arange(batch * 3, dtype=np.int32).reshape(batch, 3)
    plan = Plan(
        step=5,
        num_decodes=lens.count(1),
        rows=np.arange(batch, dtype=np.int32)[::-1].copy(),
        query_lens=np.array(lens, np.int32),
        context_lens=np.array([s + n for s, n in zip(starts, lens, strict=True)], np.int32),
        token_ids=np.concatenate([1000 * i + span for i, span in enumerate(spans)]),
        positions=np.concatenate(spans),
        block_tables=tables,
        samples=np.array(samples),
        requests=tuple(Request(f"r{i}", [], SamplingParams()) for i in range(batch)),
    )
    if cp > 1:
        plan.owners = np.arange(batch, dtype=np.int32) % cp
        plan.shard_tables = np.stack([tables + 100 * rank for rank in range(cp)])
    return plan


@st.composite
def plans(draw: st.DrawFn, cp: int = 1) -> Plan:
    decodes = draw(st.integers(0, 6))
    chunks = draw(st.lists(st.integers(2, 40), min_size=not decodes, max_size=4))
    lens = [1] * decodes + sorted(chunks)
    starts = draw(st.lists(st.integers(0, 90), min_size=len(lens), max_size=len(lens)))
    samples = draw(st.lists(st.booleans(), min_size=len(lens), max_size=len(lens)))
    return make_plan(lens, starts, samples, cp)


@given(plans(), st.integers(1, 9))
def test_each_request_runs_its_tokens_in_order_and_is_sampled_at_the_end(
    plan: Plan, count: int
) -> None:
    before = plan.context_lens - plan.query_lens
    stored = {int(row): list(range(n)) for row, n in zip(plan.rows, before, strict=True)}
    tokens: dict[int, list[int]] = {int(row): [] for row in plan.rows}
    sampled: list[int] = []
    index = {int(row): i for i, row in enumerate(plan.rows)}
    for part in split_plan(plan, count):
        first = 0
        for b, row in enumerate(part.rows.tolist()):
            rows = slice(first, first := first + int(part.query_lens[b]))
            stored[row] += part.positions[rows].tolist()
            tokens[row] += part.token_ids[rows].tolist()
            assert part.context_lens[b] == len(stored[row])
            assert row not in sampled
            if part.samples[b]:
                sampled.append(row)
            assert part.requests[b] is plan.requests[index[row]]
            assert (part.block_tables[b] == plan.block_tables[index[row]]).all()
        assert first == part.num_tokens
    assert sorted(sampled) == sorted(plan.rows[plan.samples].tolist())
    assert [t for row in plan.rows.tolist() for t in tokens[row]] == plan.token_ids.tolist()
    for row, i in index.items():
        assert stored[row] == list(range(plan.context_lens[i]))


@given(plans(), st.integers(1, 9))
def test_micro_batches_are_plans_of_equal_size(plan: Plan, count: int) -> None:
    parts = split_plan(plan, count)
    assert len(parts) == min(count, plan.num_tokens)
    sizes = [part.num_tokens for part in parts]
    assert max(sizes) - min(sizes) <= 1
    decodes = [int(np.isin(part.rows, plan.rows[: plan.num_decodes]).sum()) for part in parts]
    assert max(decodes) - min(decodes) <= 2
    for part in parts:
        lens = part.query_lens.tolist()
        assert lens == sorted(lens)
        assert part.num_decodes == lens.count(1)
        assert part.step == plan.step


@given(plans(cp=3), st.integers(2, 9))
def test_with_context_parallelism_only_decoding_requests_count_as_decodes(
    plan: Plan, count: int
) -> None:
    decoding = set(plan.rows[: plan.num_decodes].tolist())
    index = {int(row): i for i, row in enumerate(plan.rows)}
    for part in split_plan(plan, count):
        where = [index[row] for row in part.rows.tolist()]
        assert decoding.issuperset(part.rows[: part.num_decodes].tolist())
        assert decoding.isdisjoint(part.rows[part.num_decodes :].tolist())
        assert plan.owners is not None
        assert part.owners is not None
        assert plan.shard_tables is not None
        assert part.shard_tables is not None
        assert (part.owners == plan.owners[where]).all()
        assert (part.shard_tables == plan.shard_tables[:, where]).all()


def test_a_single_token_of_the_last_chunk_stands_with_the_decodes() -> None:
    plan = make_plan([1, 4, 5], [7, 0, 10], [True, True, False])
    first, second = split_plan(plan, 2)
    assert first.num_decodes == second.num_decodes == 1
    assert first.positions.tolist() == [10, 0, 1, 2, 3]
    assert first.samples.tolist() == [False, True]
    assert second.positions.tolist() == [7, 11, 12, 13, 14]
    assert second.samples.tolist() == [True, False]


def test_requests_are_optional() -> None:
    plan = replace(make_plan([1, 8], [3, 0], [True, True]), requests=())
    assert [part.requests for part in split_plan(plan, 2)] == [(), ()]


def test_one_micro_batch_is_the_plan_itself() -> None:
    plan = make_plan([1, 8], [3, 0], [True, True])
    (only,) = split_plan(plan, 1)
    assert only is plan
