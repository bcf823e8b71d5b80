"""The deal of tokens to ranks: complete, in order, balanced under a causal mask."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm.core import Plan
from kllm.parallel.sequence import local_plan
from kllm.parallel.stripes import Stripes, stripe_tokens

deals = st.builds(Stripes, st.integers(1, 8), st.integers(1, 9))


@given(deals, st.integers(0, 200), st.integers(0, 200))
def test_every_token_has_one_rank_and_one_place(stripes: Stripes, start: int, length: int) -> None:
    end = start + length
    seen: list[int] = []
    for rank in range(stripes.ranks):
        held = [p for a, b in stripes.runs(rank, 0, end) for p in range(a, b)]
        positions = np.array(held, np.int64)
        assert (stripes.rank_of(positions) == rank).all()
        assert stripes.local(positions).tolist() == list(range(len(held)))
        assert stripes.count(rank, end) == len(held)
        late = [p for a, b in stripes.runs(rank, start, end) for p in range(a, b)]
        assert late == [p for p in held if p >= start]
        seen += held
    assert sorted(seen) == list(range(end))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("length", "bound"), [(16_384, 1.05), (100_000, 1.1), (524_288, 1.05)])
def test_causal_work_is_balanced(ranks: int, length: int, bound: float) -> None:
    stripes = Stripes(ranks, stripe_tokens(ranks, token_budget=16_384, granule=64))
    work = [
        sum((a + 1 + b) * (b - a) / 2 for a, b in stripes.runs(rank, 0, length))
        for rank in range(ranks)
    ]
    assert max(work) <= bound * sum(work) / ranks


@given(deals, st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), max_size=3), st.data())
def test_local_plans_make_up_the_groups_plan(
    stripes: Stripes, chunks: list[tuple[int, int]], data: st.DataObject
) -> None:
    decodes = data.draw(st.integers(0 if chunks else 1, 4))
    lens = np.array([1] * decodes + [n for _, n in chunks], np.int32)
    starts = [7 * i for i in range(decodes)] + [s for s, _ in chunks]
    positions = np.concatenate(
        [np.arange(s, s + n) for s, n in zip(starts, lens, strict=True)]
    ).astype(np.int64)
    batch, width = len(lens), 4
    owners = np.arange(batch, dtype=np.int32) % stripes.ranks
    tables = np.arange(stripes.ranks * batch * width, dtype=np.int32)
    tables = tables.reshape(stripes.ranks, batch, width)
    plan = Plan(
        step=1,
        num_decodes=decodes,
        rows=np.arange(batch, dtype=np.int32),
        query_lens=lens,
        context_lens=np.array(starts, np.int32) + lens,
        token_ids=np.arange(len(positions), dtype=np.int64) + 100,
        positions=positions,
        block_tables=tables[0],
        samples=np.ones(batch, np.bool_),
        owners=owners,
        shard_tables=tables,
    )
    ran: list[tuple[int, int, int]] = []  # request, position, token
    sampled: list[int] = []
    for rank in range(stripes.ranks):
        local = local_plan(plan, stripes, rank, kind="ring", scratch_page=999, scratch_row=99)
        assert len(local.plan.token_ids) > 0
        at = 0
        for b, request in enumerate(local.origin.tolist()):
            for _ in range(int(local.plan.query_lens[b])):
                if request >= 0:
                    token = int(local.plan.token_ids[at])
                    ran.append((request, int(local.plan.positions[at]), token))
                at += 1
            if request < 0:
                assert not local.plan.samples[b]
                assert (local.plan.block_tables[b] == 999).all()
            else:
                assert (local.plan.block_tables[b] == tables[rank, request]).all()
                if local.plan.samples[b]:
                    sampled.append(request)
        for piece, i in zip(local.step.pieces, range(decodes, batch), strict=True):
            own = local.plan.query_lens[piece.entries].sum()
            assert own == sum(b - a for a, b in stripes.runs(rank, piece.start, piece.end))
            assert piece.owner == owners[i]
    index = np.repeat(np.arange(batch), lens)
    assert sorted(ran) == sorted(
        zip(index.tolist(), positions.tolist(), plan.token_ids.tolist(), strict=True)
    )
    assert sorted(sampled) == list(range(batch))
