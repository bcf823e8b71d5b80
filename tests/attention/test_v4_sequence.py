"""DeepSeek-V4's prompts shared by context-parallel ranks, against one rank that runs them alone."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kllm.attention.chunks import chunks
from kllm.attention.context import ForwardContext
from kllm.attention.indexing import IndexQuery
from kllm.attention.ring import find_shards
from kllm.attention.ring_selection import list_entries, select_travelling
from kllm.cache.shards import entry_ids
from kllm.kernels import reference
from kllm.models import deepseek_v4
from kllm.models.base import Groups
from kllm.models.random import fill_random
from kllm.parallel.sequence import LocalPlan
from tests.attention.sequence_harness import POISON, SequenceHarness
from tests.models.deepseek_v4_logits import models
from tests.models.deepseek_v4_tiny import TINY
from tests.models.harness import Harness
from tests.models.logit_cases import seeded_ids
from tests.tolerances import LOGITS

EXACT = {"rtol": 0, "atol": LOGITS["deepseek_v4"]}
PROMPT = seeded_ids(300, TINY["vocab_size"], seed=3)
OTHER = seeded_ids(130, TINY["vocab_size"], seed=4)
LAYERS = deepseek_v4.tiny_config().layer_kinds
KINDS = pytest.mark.parametrize("kind", ["ring", "all_gather", "replicated"])


@cache
def alone(token_ids: tuple[int, ...], kv_dtype: str = "float32") -> Tensor:
    """[T, V] of one rank, in one pass."""
    harness = Harness(models()[0], max_len=len(token_ids), kv_dtype=kv_dtype)
    return harness.run(token_ids, [len(token_ids)])


@KINDS
@pytest.mark.parametrize(
    ("ranks", "chunks"),
    [
        (2, [300]),
        (2, [101, 3, 77, 1, 118]),  # inside groups of 4 and 16, and of one token
        (4, [133, 31, 136]),
        (8, [300]),  # a whole deal of stripes and a part of the next
        (8, [9, 150, 141]),  # first a chunk shorter than a stripe: all but one rank have nothing
    ],
    ids=str,
)
def test_prompts_give_the_logits_of_one_rank(ranks: int, chunks: list[int], kind: str) -> None:
    harness = SequenceHarness(models()[0], ranks, kind=kind, owners=[ranks - 1], max_len=304)
    got = harness.run(PROMPT, chunks)
    torch.testing.assert_close(got, alone(tuple(PROMPT)), **EXACT)


@KINDS
@pytest.mark.parametrize(("ranks", "stripe_pages"), [(2, 2), (4, 1)])
def test_packed_prompts_are_decoded_by_their_owners(
    ranks: int, stripe_pages: int, kind: str
) -> None:
    """Two prompts in one step, then one decodes while the other goes on, then both decode."""
    prompts = {0: PROMPT, 1: OTHER, 2: OTHER[60:]}
    owners = [ranks - 1, 0, 1]
    harness = SequenceHarness(
        models()[0], ranks, kind=kind, owners=owners, stripe_pages=stripe_pages, max_len=304
    )
    plans: Sequence[tuple[dict[int, int], set[int]]] = (
        ({0: 97, 1: 43}, set()),
        ({0: 61, 1: 60, 2: 5}, set()),  # 1 is done after this step
        ({0: 120, 1: 1, 2: 1}, {1}),  # a prompt's chunk of one token is no decode
        ({0: 3, 1: 1, 2: 9}, {1}),  # 0 and 2 are done
        ({0: 1, 1: 1, 2: 1}, {0, 1, 2}),
        ({0: 1, 1: 1, 2: 1}, {0, 1, 2}),
        ({0: 1}, {0}),  # all ranks but one have nothing to do
    )
    ends = {1: [1], 3: [0, 2]}  # after which steps which prompts are done
    got: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    for i, (lengths, decodes) in enumerate(plans):
        starts = {r: int(harness.lengths[r]) for r in lengths}
        tokens = {r: prompts[r][starts[r] : starts[r] + n] for r, n in lengths.items()}
        for request, logits in harness.step(tokens, decodes).items():
            got[request].append(logits)
        if i in ends:
            harness.finish(ends[i])
    for request, parts in got.items():
        logits = torch.cat(parts)
        want = alone(tuple(prompts[request]))[: len(logits)]
        torch.testing.assert_close(logits, want, **EXACT)
    for pool in harness.pools:  # nobody wrote to pages that it does not hold
        for state in pool.spec.paged:
            for layer in state.layers:
                assert (pool.pages(state.name, layer)[0] == POISON).all()


@KINDS
def test_all_ranks_end_with_the_same_rings(kind: str) -> None:
    harness = SequenceHarness(models()[0], 4, kind=kind, max_len=304)
    harness.run(PROMPT, [133, 1, 31, 135])
    row = int(harness.rows[0])
    for state in harness.pools[0].spec.rings[:-1]:
        for layer in state.layers:
            first, *others = (pool.rings(state.name, layer)[row] for pool in harness.pools)
            if layer < TINY["num_hidden_layers"]:  # the MTP head did not run
                assert (first != POISON).all()
            for other in others:
                assert torch.equal(first, other)


@KINDS
def test_windows_may_be_longer_than_stripes(kind: str) -> None:
    """The rows before a stretch are several ranks' then. No released model needs this."""
    config = replace(deepseek_v4.tiny_config(), sliding_window=40)
    model = deepseek_v4.build(config, Groups.single())
    fill_random(model, deepseek_v4, seed=0)
    ids = [token % config.vocab_size for token in PROMPT[:150]]
    want = Harness(model).run(ids, [150])
    got = SequenceHarness(model, 4, kind=kind, owners=[2]).run(ids, [50, 1, 99])
    torch.testing.assert_close(got, want, **EXACT)


@KINDS
@pytest.mark.parametrize("layer", [0, 1, 2], ids=lambda layer: LAYERS[layer])
def test_fp8_attention_is_that_of_one_rank(layer: int, kind: str) -> None:
    """One attention layer, in norm: a float32 rounding can push a channel over an e4m3 boundary,
    which changes an output by less than 1e-3, but what deeper layers select by more."""
    harness = SequenceHarness(models()[0], 4, kind=kind, owners=[1], kv_dtype="fp8", max_len=304)
    single = Harness(models()[0], max_len=304, kv_dtype="fp8")
    attention = models()[0].layers[str(layer)].attn
    x = torch.randn(300, TINY["hidden_size"], generator=torch.Generator().manual_seed(1))

    def work(_: LocalPlan, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        return ctx.positions, attention(x[ctx.positions], ctx)

    whole = ForwardContext.from_plan(single.plan({0: PROMPT})[1], single.pool, x.device)
    want = attention(x, whole)
    for positions, got in harness.on_ranks(harness.plan({0: PROMPT}, ())[1], work):
        assert (got - want[positions]).norm() < 1e-3 * want[positions].norm()


def test_selection_over_a_ring_breaks_ties_as_one_rank_does() -> None:
    """All scores are equal: the lowest entries win, on whichever rank they lie."""
    harness = SequenceHarness(models()[0], 4, kind="ring", owners=[2], max_len=304)
    layer, ratio, topk = LAYERS.index("csa"), TINY["compress_rate_csa"], 37
    heads, dim = TINY["index_n_heads"], TINY["index_head_dim"]

    def work(_: LocalPlan, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        q, weights = torch.zeros(ctx.num_tokens, heads, dim), torch.ones(ctx.num_tokens, heads)
        shards = find_shards(ctx, ratio)
        index = IndexQuery("csa_index", q, weights, topk)
        (ids,) = select_travelling(ctx, layer, shards, index)
        assert ids is not None
        listed = list_entries(ctx, shards, ids)
        for row, places, starts in zip(ids, listed.places, listed.starts.tolist(), strict=True):
            found = [
                entry_ids(shards.entries, source, places[starts[source] : starts[source + 1]])
                for source in range(4)
            ]
            assert torch.equal(torch.cat(found).sort()[0], row[row >= 0].sort()[0])
        return ctx.positions, ids

    for positions, ids in harness.on_ranks(harness.plan({0: PROMPT}, ())[1], work):
        for position, row in zip(positions.tolist(), ids, strict=True):
            want = list(range(min(topk, (position + 1) // ratio)))
            assert sorted(row[row >= 0].tolist()) == want


@pytest.mark.parametrize("kind", ["all_gather", "replicated"])
def test_stretches_of_a_prompt_are_attended_to_together(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many stripes a rank has of a prompt, a layer attends once to each prompt."""
    rows: list[int] = []
    attention = reference.sparse_attention

    def count(q: Tensor, *args: Any) -> Tensor:
        rows.append(len(q))
        return attention(q, *args)

    monkeypatch.setattr(reference, "sparse_attention", count)
    harness = SequenceHarness(models()[0], 2, kind=kind, owners=[0, 1], max_len=304)
    harness.step({0: PROMPT, 1: OTHER})
    # Window layers take both prompts in one call.
    calls = sum(1 if layer == "window" else 2 for layer in LAYERS)
    assert len(rows) == 2 * calls
    assert sum(rows) == len(LAYERS) * (len(PROMPT) + len(OTHER))


def test_stripes_that_follow_one_another_are_one_chunk() -> None:
    """Of two ranks each has two stripes in a row, but for the first rank's first."""
    harness = SequenceHarness(models()[0], 2, kind="ring", owners=[1], max_len=304)
    tokens = harness.stripes.tokens

    def work(_: LocalPlan, ctx: ForwardContext) -> list[tuple[int, int]]:
        return [(chunk.start // tokens, chunk.end // tokens) for chunk in chunks(ctx)]

    plan = harness.plan({0: PROMPT[: 8 * tokens]}, ())[1]
    assert harness.on_ranks(plan, work) == [[(0, 1), (3, 5), (7, 8)], [(1, 3), (5, 7)]]
