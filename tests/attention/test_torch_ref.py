"""The torch backend against attention written out, for every way a request's pages can lie."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kllm.attention import torch_decode
from kllm.attention.context import ForwardContext
from kllm.attention.torch_decode import MOST_PADDING, group_requests
from kllm.attention.torch_ref import TorchAttention
from kllm.cache.pool import KVPool
from kllm.cache.spec import CacheSpec, PagedState
from kllm.core import Plan
from kllm.quant.entry import EntryFormat
from tests.tolerances import FP8_KV, TOLERANCE

PAGE, PAGES, KV_HEADS, HEADS, DIM = 4, 120, 2, 6, 16
CPU = torch.device("cpu")


def make_pool(kv_dtype: str, dtype: torch.dtype, pages: int = PAGES) -> KVPool:
    entry = EntryFormat(width=DIM, fp8_channels=DIM, group=DIM)
    state = PagedState(name="kv", layers=(0,), entry=entry, heads=2 * KV_HEADS)
    return KVPool(
        CacheSpec(paged=(state,)),
        num_pages=pages,
        page_size=PAGE,
        max_batch=4,
        kv_dtype=kv_dtype,
        compute_dtype=dtype,
        device=CPU,
    )


def make_plan(starts: list[int], queries: list[int], tables: list[list[int]]) -> Plan:
    block_tables = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
    spans = [np.arange(s, s + n) for s, n in zip(starts, queries, strict=True)]
    return Plan(
        step=0,
        num_decodes=sum(n == 1 for n in queries),
        rows=np.arange(len(tables), dtype=np.int32),
        query_lens=np.array(queries, np.int32),
        context_lens=np.array([s + n for s, n in zip(starts, queries, strict=True)], np.int32),
        token_ids=np.zeros(sum(queries), np.int64),
        positions=np.concatenate(spans).astype(np.int64),
        block_tables=block_tables,
        samples=np.ones(len(tables), bool),
    )


def written_out(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """q [n, H, D] at positions from `start`; k, v [start + n, K, D]; float64."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty_like(q)
    for i in range(q.shape[0]):
        for h in range(HEADS):
            seen, g = start + i + 1, h * KV_HEADS // HEADS
            weights = (k[:seen, g] @ q[i, h] / DIM**0.5).softmax(0)
            out[i, h] = weights @ v[:seen, g]
    return out


CASES = {
    "whole prompts": ([0, 0], [5, 9], [[3, 4], [9, 8, 7]]),
    "decodes on neighbour and scattered pages": ([6, 9], [1, 1], [[11, 12], [30, 2, 17]]),
    "a decode alone on neighbour pages": ([6], [1], [[11, 12]]),
    "chunks after a cached prefix": ([4, 7], [3, 6], [[20, 21], [5, 25, 1, 39]]),
    "decode, chunk and prompt": ([10, 3, 0], [1, 2, 7], [[0, 1, 2], [35, 6], [14, 13]]),
    "one token of an empty cache": ([0], [1], [[8]]),
}
DTYPES = pytest.mark.parametrize(
    ("kv_dtype", "dtype"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("fp8", torch.float32)],
    ids=["float32", "bfloat16", "fp8"],
)


@pytest.mark.parametrize("case", CASES)
@DTYPES
def test_attention_matches_the_formula(case: str, kv_dtype: str, dtype: torch.dtype) -> None:
    check(*CASES[case], kv_dtype, dtype)


@st.composite
def mixed_steps(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]]]:
    """Decodes of any context lengths, then chunks, on pages in order or scattered."""
    decodes = draw(st.lists(st.integers(0, 59), min_size=1, max_size=6))
    chunks = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(2, 20)), max_size=2))
    starts = decodes + [start for start, _ in chunks]
    queries = [1] * len(decodes) + [length for _, length in chunks]
    scatter = draw(st.none() | st.integers(0, 1 << 16))
    order = (
        np.arange(PAGES) if scatter is None else np.random.default_rng(scatter).permutation(PAGES)
    )
    counts = [-(-(s + n) // PAGE) for s, n in zip(starts, queries, strict=True)]
    cuts = np.cumsum(counts)
    return starts, queries, [part.tolist() for part in np.split(order, cuts)[:-1]]


@DTYPES
@given(step=mixed_steps(), gathered=st.sampled_from([1, 1 << 12, 1 << 14, 8 << 20]))
@settings(max_examples=40, deadline=None)
def test_requests_of_any_lengths_attend_together(
    step: tuple[list[int], list[int], list[list[int]]],
    gathered: int,
    kv_dtype: str,
    dtype: torch.dtype,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_decode, "GATHERED_BYTES", gathered)
        check(*step, kv_dtype, dtype)


def check(
    starts: list[int],
    queries: list[int],
    tables: list[list[int]],
    kv_dtype: str,
    dtype: torch.dtype,
) -> None:
    """Run a step after its requests' prefixes, and compare; other requests' pages are NaN."""
    generator = torch.Generator().manual_seed(0)
    pool, backend = make_pool(kv_dtype, dtype), TorchAttention()
    pages = pool.pages("kv", 0)
    foreign = np.setdiff1d(np.arange(PAGES), np.concatenate(tables))
    pages[foreign] = 0x7F if kv_dtype == "fp8" else torch.nan
    keys, values = (
        [
            torch.randn(s + n, KV_HEADS, DIM, generator=generator).to(dtype)
            for s, n in zip(starts, queries, strict=True)
        ]
        for _ in range(2)
    )
    q = torch.randn(sum(queries), HEADS, DIM, generator=generator).to(dtype)
    if any(starts):  # an earlier step puts the prefixes into the cache
        earlier = zip(starts, tables, keys, values, strict=True)
        order = sorted((item for item in earlier if item[0]), key=lambda item: item[0])
        plan = make_plan([0] * len(order), [s for s, *_ in order], [t for _, t, *_ in order])
        ctx = ForwardContext.from_plan(plan, pool, CPU)
        backend.prepare(ctx)
        k, v = (torch.cat([item[i][: item[0]] for item in order]) for i in (2, 3))
        backend.attend(ctx, 0, q.new_zeros(k.shape[0], HEADS, DIM), k, v)
    ctx = ForwardContext.from_plan(make_plan(starts, queries, tables), pool, CPU)
    backend.prepare(ctx)
    k, v = (
        torch.cat([x[s:] for s, x in zip(starts, side, strict=True)]) for side in (keys, values)
    )
    got = backend.attend(ctx, 0, q, k, v)
    assert got.dtype == dtype
    # All keys and values are rounded as the cache stores them, also those of whole prompts.
    keys, values = ([as_stored(pool, x) for x in side] for side in (keys, values))
    parts = zip(q.split(queries), keys, values, starts, strict=True)
    want = torch.cat([written_out(*part) for part in parts])
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("length", [1 << 10, 1 << 17])
def test_fp8_entries_are_as_exact_in_long_contexts(length: int) -> None:
    """Values are small, so that a scale of 1 would lose them, and of both signs: they cancel out
    as much as their errors do."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, length, KV_HEADS, DIM, generator=generator)
    values *= 1e-3
    q = torch.randn(1, HEADS, DIM, generator=generator)
    pages = length // PAGE
    plan = make_plan([length - 1], [1], [list(range(pages))])
    found = []
    for kv_dtype in ("float32", "fp8"):
        pool, backend = make_pool(kv_dtype, torch.float32, pages), TorchAttention()
        pool.write("kv", 0, torch.arange(length), torch.cat((keys, values), dim=1))
        ctx = ForwardContext.from_plan(plan, pool, CPU)
        backend.prepare(ctx)
        found.append(backend.attend(ctx, 0, q, keys[-1:], values[-1:]))
    exact, rounded = found
    assert 0 < (rounded - exact).norm() / exact.norm() < 2 * FP8_KV


def as_stored(pool: KVPool, values: Tensor) -> Tensor:
    return pool.unpack("kv", pool.pack("kv", values))


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.integers(0, 500))
def test_a_group_is_alike_and_bounded(pages: list[int], most: int) -> None:
    groups = group_requests(np.array(pages), most)
    assert sorted(request for group in groups for request in group) == list(range(len(pages)))
    for group in groups:
        assert group == sorted(group)
        lengths = [pages[request] for request in group]
        assert max(lengths) <= MOST_PADDING * min(lengths)
        assert len(group) == 1 or len(group) * max(lengths) <= most


def test_requests_of_one_length_are_one_group() -> None:
    assert group_requests(np.full(5, 7), 35) == [[0, 1, 2, 3, 4]]
