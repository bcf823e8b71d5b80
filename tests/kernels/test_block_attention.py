"""Block attention against one softmax over all keys in float64."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kllm import kernels
from kllm.kernels import SoftmaxState, Span, reference
from kllm.kernels.block_attention_reference import joined, merge_softmax
from tests.tolerances import TOLERANCE

CLOSE = {"rtol": TOLERANCE[torch.float32], "atol": TOLERANCE[torch.float32]}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, sink: Tensor | None = None
) -> Tensor:
    """Each query over the keys that `seen` [n, s] names, in float64; zeros where it names none."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,shd->nhs", q.double(), k) * scale
    scores = scores.masked_fill(~seen.unsqueeze(1), -math.inf)
    if sink is not None:
        scores = torch.cat((scores, sink.double().view(1, -1, 1).expand(len(q), -1, 1)), dim=2)
    weights = scores.softmax(dim=2).nan_to_num(0.0)[:, :, : seen.shape[1]]
    return torch.einsum("nhs,shd->nhd", weights, v)


@dataclass(frozen=True)
class Block:
    """A block of keys and the spans that see it, with the visibility spelled out."""

    keys: slice
    spans: list[Span]


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, list[Block]]:
    """Queries, keys, and blocks in any order; spans leave gaps, and some see nothing."""
    queries = draw(st.integers(1, 40))
    cuts = sorted(draw(st.lists(st.integers(1, 90), min_size=1, max_size=6, unique=True)))
    blocks = []
    for begin, end in zip([0, *cuts], cuts, strict=False):
        edges = sorted(draw(st.lists(st.integers(0, queries), max_size=5)))
        spans = [
            Span(
                slice(start, stop),
                draw(st.integers(-20, 100)),
                draw(st.integers(0, end - begin)),
                draw(st.sampled_from([1, 1, 4, 7])),
            )
            for start, stop in itertools.pairwise(edges)
        ]
        blocks.append(Block(slice(begin, end), spans))
    return queries, cuts[-1], draw(st.permutations(blocks))


@given(
    cases(),
    st.sampled_from([(1, 1), (4, 1), (6, 2), (4, 4)]),
    st.booleans(),
    st.sampled_from([1 << 28, 1 << 10]),  # all rows at once, a few
)
@settings(deadline=None, max_examples=150)
def test_blocks_in_any_order_make_one_softmax(
    case: tuple[int, int, list[Block]], heads: tuple[int, int], with_sink: bool, workspace: int
) -> None:
    """Also with two states that are merged at the end, and with products cut into small ones."""
    queries, keys, blocks = case
    q, sink = normal(queries, heads[0], 8), normal(heads[0], seed=3) if with_sink else None
    k, v = normal(keys, heads[1], 8, seed=1), normal(keys, heads[1], 5, seed=2)
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    states = [SoftmaxState.empty(queries, heads[0], 5, "cpu") for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "WORKSPACE_BYTES", workspace)
        patch.setattr("kllm.kernels.block_attention_reference.WIDE", 16)
        for i, block in enumerate(blocks):
            kernels.block_attention(
                states[i % 2], q, k[block.keys], v[block.keys], block.spans, 0.5
            )
            for span in block.spans:
                for row in range(span.rows.start, span.rows.stop):
                    visible = (span.first + row - span.rows.start) // span.step
                    begin = block.keys.start
                    seen[row, begin : begin + max(0, min(span.keys, visible))] = True
    merge_softmax(*states)
    got = kernels.finish_softmax(states[0], torch.float64, sink)
    torch.testing.assert_close(got, softmax_attention(q, k, v, seen, 0.5, sink), **CLOSE)


@given(st.data(), st.booleans(), st.booleans(), st.sampled_from([1 << 28, 1 << 10]))
@settings(deadline=None, max_examples=80)
def test_listed_keys_of_blocks_make_one_softmax(
    data: st.DataObject, with_sink: bool, split: bool, workspace: int
) -> None:
    """Each query lists any keys; every block gets its share of the lists, with holes.

    Or the lists are split once, and every block gets all of them and what it has to look at.
    """
    queries, keys = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 50))
    cuts = sorted({*data.draw(st.lists(st.integers(1, keys), max_size=4)), keys})
    seed = data.draw(st.integers(0, 999))
    share = data.draw(st.sampled_from([0.05, 0.5, 1.0]))
    seen = torch.rand(queries, keys, generator=torch.Generator().manual_seed(seed)) < share
    q, kv = normal(queries, 3, 8, seed=1), normal(keys, 8, seed=2)
    sink = normal(3, seed=3) if with_sink else None
    state = SoftmaxState.empty(queries, 3, 6, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "WORKSPACE_BYTES", workspace)
        shuffled = torch.randperm(keys, generator=torch.Generator().manual_seed(seed))
        lists = torch.arange(keys).masked_fill(~seen, -1)[:, shuffled]
        if split:
            size = data.draw(st.integers(1, keys))
            parts = -(-keys // size)
            places, starts = kernels.split_lists(lists.int(), size, parts)
            for i in data.draw(st.permutations(range(parts))):
                block, bounds = kv[i * size : (i + 1) * size], (starts[:, i], starts[:, i + 1])
                kernels.sparse_block_attention(state, q, block, places, 0.5, 6, bounds)
        else:
            for begin, end in data.draw(st.permutations(list(zip([0, *cuts], cuts, strict=False)))):
                idx = torch.where((lists >= begin) & (lists < end), lists - begin, -1)
                kernels.sparse_block_attention(state, q, kv[begin:end], idx, 0.5, 6)
    got = kernels.finish_softmax(state, torch.float64, sink)
    want = softmax_attention(q, kv.unsqueeze(1), kv[:, None, :6], seen, 0.5, sink)
    torch.testing.assert_close(got, want, **CLOSE)


@given(cases())
@settings(deadline=None, max_examples=60)
def test_joined_spans_see_the_same(case: tuple[int, int, list[Block]]) -> None:
    _, _, blocks = case
    for block in blocks:
        found = [
            {
                row: span.seen(row - span.rows.start)
                for span in spans
                for row in range(span.rows.start, span.rows.stop)
            }
            for spans in (block.spans, joined(block.spans))
        ]
        assert found[0] == found[1]


def test_stretches_that_see_the_same_prefix_are_joined() -> None:
    full = [Span(slice(0, 4), 9, 9), Span(slice(4, 6), 12, 9), Span(slice(6, 7), 36, 9, 4)]
    behind = [Span(slice(7, 9), 8, 8), Span(slice(10, 12), 8, 8), Span(slice(12, 15), 3, 8)]
    assert joined([*full, *behind]) == [Span(slice(0, 7), 9, 9), *behind]


def filled_state() -> SoftmaxState:
    return SoftmaxState(normal(5, 2), normal(5, 2, seed=1).exp(), normal(5, 2, 4, seed=2))


@pytest.mark.parametrize("empty", [True, False])
def test_masked_block_changes_nothing(empty: bool) -> None:
    state = SoftmaxState.empty(5, 2, 4, "cpu") if empty else filled_state()
    before = [x.clone() for x in (state.m, state.l, state.o)]
    q, k = normal(5, 2, 4, seed=4), normal(6, 1, 4, seed=5)
    for span in (Span(slice(0, 5), -9, 6), Span(slice(0, 5), 9, 0), Span(slice(0, 5), 0, 6, 8)):
        kernels.block_attention(state, q, k, k, [span], 0.5)
    kernels.sparse_block_attention(state, q, k[:, 0], torch.full((5, 3), -1), 0.5)
    kernels.sparse_block_attention(state, q, k[:, 0], torch.empty(5, 0, dtype=torch.int64), 0.5)
    merge_softmax(state, SoftmaxState.empty(5, 2, 4, "cpu"))
    for old, new in zip(before, (state.m, state.l, state.o), strict=True):
        assert torch.equal(old, new)


def test_partly_masked_block_leaves_the_other_rows() -> None:
    state, q, k = filled_state(), normal(5, 2, 4, seed=4), normal(6, 1, 4, seed=5)
    before = state.o.clone()
    # Rows 2 and 3 see nothing, row 4 sees one key, rows 0 and 1 are in no span.
    kernels.block_attention(state, q, k, k, [Span(slice(2, 5), -1, 6)], 0.5)
    assert torch.equal(state.o[:4], before[:4])
    assert not torch.equal(state.o[4], before[4])


def test_error_does_not_grow_with_the_number_of_blocks() -> None:
    """64 blocks of bfloat16 keys are as exact as one: partial results are never rounded."""
    q, k, v = (normal(16, 2, 32, seed=1), normal(4096, 2, 32, seed=2), normal(4096, 2, 32, seed=3))
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    want = softmax_attention(q, k, v, torch.ones(16, 4096, dtype=torch.bool), 0.2)
    errors = []
    for size in (4096, 64):
        state = SoftmaxState.empty(16, 2, 32, "cpu")
        for begin in range(0, 4096, size):
            block = slice(begin, begin + size)
            spans = [Span(slice(0, 16), size, size)]
            kernels.block_attention(state, q, k[block], v[block], spans, 0.2)
        errors.append(float((kernels.finish_softmax(state, torch.float64) - want).abs().max()))
    assert max(errors) < 1e-6
    assert errors[1] < 2 * errors[0] + 1e-8


def test_large_scores_and_sinks_do_not_overflow() -> None:
    state = SoftmaxState.empty(3, 2, 8, "cpu")
    q, k = 100 * normal(3, 2, 8), 100 * normal(9, 1, 8, seed=1)
    kernels.block_attention(state, q, k, k, [Span(slice(0, 3), 9, 9)], 1.0)
    for sink in (None, torch.tensor([-1e4, 1e5])):
        assert kernels.finish_softmax(state, torch.float32, sink).isfinite().all()
    assert not kernels.finish_softmax(state, torch.float32, torch.tensor([0.0, 1e6]))[:, 1].any()


def test_top_entries_prefer_the_lower_index_on_a_tie() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, 2.0], [-math.inf, -math.inf, 1.0, 1.0, 1.0]])
    best, indices = kernels.top_entries(scores, 3)
    assert indices.tolist() == [[1, 4, 0], [2, 3, 4]]
    assert torch.equal(best, scores.gather(1, indices))
    assert kernels.top_entries(scores, 9)[1].shape == (2, 5)


def test_lists_are_split_by_part_in_their_order() -> None:
    lists = torch.tensor([[7, 3, -1, 0, 8, 2], [-1] * 6, [5, 4, 3, 2, 1, 0]], dtype=torch.int32)
    places, starts = kernels.split_lists(lists, 3, 4)
    assert starts.tolist() == [[0, 2, 3, 5, 5], [0] * 5, [0, 3, 6, 6, 6]]
    assert [row[: starts[i, -1]].tolist() for i, row in enumerate(places)] == [
        [0, 2, 0, 1, 2],
        [],
        [2, 1, 0, 2, 1, 0],
    ]
    assert kernels.split_lists(lists[:0], 3, 4)[1].shape == (0, 5)
