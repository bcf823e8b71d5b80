"""Paged attention kernel: decode with split keys, prefill tiles, mixed lengths, FP8 entries."""

import importlib

import pytest
import torch
from torch import Tensor

from kllm.quant import kv_fp8
from kllm.quant.entry import EntryFormat
from tests.gpu.cases import DTYPES, assert_near, randn
from tests.tolerances import FP8_KV

PAGE = 16


def kernel():  # type: ignore[no-untyped-def]
    return importlib.import_module("kllm.kernels.paged_attention_triton")


class Batch:
    """Requests with shuffled pages, and the answer by plain softmax over gathered keys."""

    def __init__(
        self,
        query_lens: list[int],
        context_lens: list[int],
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.query_lens, self.lens = query_lens, context_lens
        each = -(-max(context_lens) // PAGE)
        count = len(query_lens) * each
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        self.tables = order.view(len(query_lens), each).int().to(device)
        # Slots that no request owns are poisoned: a kernel that reads them shows NaN.
        self.pages = torch.full(
            (count + 1, PAGE, 2 * kv_heads, dim), float("nan"), dtype=dtype, device=device
        )
        for request, length in enumerate(context_lens):
            slots = self.slots(request, length)
            values = randn(length, 2 * kv_heads, dim, dtype=dtype, device=device, seed=request)
            self.pages.view(-1, 2 * kv_heads, dim)[slots] = values
        self.q = randn(sum(query_lens), heads, dim, dtype=dtype, device=device, seed=99)
        self.context_lens = torch.tensor(context_lens, dtype=torch.int32, device=device)
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        self.cu_seqlens = starts.int().to(device)

    def slots(self, request: int, length: int) -> Tensor:
        key = torch.arange(length, device=self.tables.device)
        return self.tables[request, key // PAGE].long() * PAGE + key % PAGE

    def expected(self, pages: Tensor) -> Tensor:
        out, heads, dim = [], self.q.shape[1], self.q.shape[2]
        kv_heads = pages.shape[2] // 2
        for request, q in enumerate(self.q.float().split(self.query_lens)):
            length = self.lens[request]
            kv = pages.reshape(-1, *pages.shape[2:])[self.slots(request, length)].float()
            k = kv[:, :kv_heads].repeat_interleave(heads // kv_heads, 1)
            v = kv[:, kv_heads:].repeat_interleave(heads // kv_heads, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
            key = torch.arange(length, device=q.device)
            query = length - len(q) + torch.arange(len(q), device=q.device)
            scores.masked_fill_(key > query[:, None], float("-inf"))
            out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        return torch.cat(out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 2, 128), (4, 4, 32)])
@pytest.mark.parametrize("lens", [[1], [1, 700, 63, 64, 65]], ids=str)
def test_decode_matches_plain_softmax(
    device: torch.device, lens: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    """Lengths of one token, on both sides of a key block, and long enough to be split."""
    batch = Batch([1] * len(lens), lens, heads, kv_heads, dim, dtype, device)
    found = kernel().paged_attention(
        batch.q, batch.pages, batch.tables, batch.context_lens, max(lens)
    )
    assert_near(found, batch.expected(batch.pages))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 128)])
def test_prefill_chunks_match_plain_softmax(
    device: torch.device, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    """First chunks, later chunks and single tokens of different requests in one launch."""
    queries, lens = [1, 5, 70, 33], [40, 5, 130, 33]
    batch = Batch(queries, lens, heads, kv_heads, dim, dtype, device)
    step = kernel().tile_queries(heads // kv_heads, dtype)
    tiles = [(r, first) for r, n in enumerate(queries) for first in range(0, n, step)]
    found = kernel().paged_attention(
        batch.q,
        batch.pages,
        batch.tables,
        batch.context_lens,
        max(lens),
        batch.cu_seqlens,
        torch.tensor(tiles, dtype=torch.int32, device=device),
    )
    assert_near(found, batch.expected(batch.pages))


def test_decode_of_fp8_entries_matches_the_unpacked_ones(device: torch.device) -> None:
    lens, dim = [1, 300, 77], 64
    batch = Batch([1] * len(lens), lens, 6, 2, dim, torch.float32, device)
    entry = EntryFormat(width=dim, fp8_channels=dim, group=dim)
    packed = kv_fp8.pack(batch.pages.nan_to_num(0.0), entry)
    found = kernel().paged_attention(
        batch.q, packed, batch.tables, batch.context_lens, max(lens), fp8=True
    )
    unpacked = kv_fp8.unpack(packed, entry, torch.float32)
    assert_near(found, batch.expected(unpacked))
    torch.testing.assert_close(found, batch.expected(batch.pages), rtol=FP8_KV, atol=FP8_KV)


def test_an_empty_batch_gives_an_empty_result(device: torch.device) -> None:
    q = torch.empty(0, 4, 64, device=device)
    pages = torch.zeros(1, PAGE, 4, 64, device=device)
    none = torch.empty(0, 1, dtype=torch.int32, device=device)
    assert kernel().paged_attention(q, pages, none, none[:, 0], 0).shape == q.shape
