"""What FlashInfer is told about a step's pages; the library itself needs a GPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kllm.attention.context import ForwardContext
from kllm.attention.flashinfer import FlashInferAttention, page_indices, page_spans
from kllm.cache.pool import KVPool
from kllm.cache.spec import CacheSpec, PagedState
from kllm.core import Plan
from kllm.quant.entry import EntryFormat

PAGE, HEADS, KV_HEADS, DIM = 4, 4, 2, 8


class Wrapper:
    """Records how it was made and planned, and answers with a marker for each query."""

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        assert layout == "NHD"
        self.options = options
        self.plans: list[tuple[Any, ...]] = []

    def plan(self, *arguments: Any, **options: Any) -> None:
        self.plans.append(arguments)

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        keys, values = cache
        assert keys.stride() == values.stride(), "the kernels take one set of strides for both"
        assert keys.shape[2:] == values.shape[2:] == (KV_HEADS, DIM)
        return q * 0 + len(self.plans[-1])


def backend() -> FlashInferAttention:
    made = FlashInferAttention.__new__(FlashInferAttention)
    library = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Wrapper, BatchPrefillWithPagedKVCacheWrapper=Wrapper
    )
    made.library, made.query_heads = library, HEADS
    made._workspace, made._copied, made._eager, made._static = None, None, {}, {}
    return made


def context(query_lens: list[int], context_lens: list[int], static: bool = False) -> ForwardContext:
    entry = EntryFormat(width=DIM, fp8_channels=DIM, group=DIM)
    state = PagedState(name="kv", layers=(0,), entry=entry, heads=2 * KV_HEADS)
    pool = KVPool(
        CacheSpec(paged=(state,)),
        num_pages=32,
        page_size=PAGE,
        max_batch=4,
        kv_dtype="bfloat16",
        compute_dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    batch = len(query_lens)
    tables = np.arange(1, 1 + batch * 4, dtype=np.int32).reshape(batch, 4)[:, ::-1]
    tokens = sum(query_lens)
    starts = np.array(context_lens) - query_lens
    plan = Plan(
        step=0,
        num_decodes=query_lens.count(1),
        rows=np.arange(batch, dtype=np.int32),
        query_lens=np.array(query_lens, np.int32),
        context_lens=np.array(context_lens, np.int32),
        token_ids=np.zeros(tokens, np.int64),
        positions=np.concatenate(
            [np.arange(s, s + n) for s, n in zip(starts, query_lens, strict=True)]
        ),
        block_tables=tables,
        samples=np.ones(batch, bool),
    )
    ctx = ForwardContext.from_plan(plan, pool, torch.device("cpu"))
    ctx.static = static
    return ctx


def test_page_spans_count_the_tokens_of_the_last_page() -> None:
    indptr, last = page_spans(np.array([1, 4, 5, 12], np.int32), PAGE)
    assert indptr.tolist() == [0, 1, 2, 4, 7]
    assert last.tolist() == [1, 4, 1, 4]


def test_page_lists_hold_only_the_pages_in_use() -> None:
    ctx = context([1, 1, 3], [5, 4, 9])
    indptr, _ = page_spans(ctx.context_lens_host[1:], PAGE)
    assert page_indices(ctx, 1, 3, indptr).tolist() == [8, 12, 11, 10]


def test_a_mixed_step_plans_decodes_and_prefills_apart() -> None:
    attention, ctx = backend(), context([1, 1, 3], [5, 4, 9])
    attention.prepare(ctx)
    decode, prefill = attention._eager["decode"].plans, attention._eager["prefill"].plans
    assert [part.tolist() for part in decode[0][:3]] == [[0, 2, 3], [4, 3, 8], [1, 4]]
    assert [part.tolist() for part in prefill[0][:4]] == [[0, 3], [0, 3], [12, 11, 10], [1]]
    assert decode[0][3:] == prefill[0][4:] == (HEADS, KV_HEADS, DIM, PAGE)
    q = torch.ones(5, HEADS, DIM, dtype=torch.bfloat16)
    out = attention.attend(ctx, 0, q, q[:, :KV_HEADS], q[:, :KV_HEADS])
    assert out[:, 0, 0].tolist() == [7, 7, 8, 8, 8], "decodes first, then prefills"


def test_captured_steps_of_one_size_share_a_planner() -> None:
    attention = backend()
    for lens in ([5, 4], [6, 5]):
        attention.prepare(context([1, 1], lens, static=True))
    attention.prepare(context([1, 1, 1], [1, 2, 3], static=True))
    assert sorted(attention._static) == [(2, 4), (3, 4)]
    shared = attention._static[2, 4]
    assert len(shared.plans) == 2
    assert shared.options["use_cuda_graph"]
    assert len(shared.options["paged_kv_indices_buffer"]) == 8
