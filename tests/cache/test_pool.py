"""The pool's tensors have the declared sizes, and entries come back as written."""

import pytest
import torch

from kllm.cache.pool import KVPool
from kllm.cache.spec import CacheSpec, PagedState, RingState
from kllm.quant.entry import EntryFormat
from tests.tolerances import FP8_KV

ENTRY = EntryFormat(width=32, fp8_channels=24, group=8, scale="ue8m0", pad=1)
SPEC = CacheSpec(
    paged=(
        PagedState(name="kv", layers=(0, 2), entry=ENTRY, heads=2),
        PagedState(name="compressed", layers=(1,), entry=ENTRY, tokens_per_entry=4),
    ),
    rings=(
        RingState(name="window", layers=(0, 1, 2), window=8, width=32, entry=ENTRY),
        RingState(name="tail", layers=(1,), window=4, width=6),
    ),
    page_multiple=2,
)


def make_pool(kv_dtype: str, rewind: int = 0) -> KVPool:
    return KVPool(
        SPEC,
        num_pages=5,
        page_size=8,
        max_batch=3,
        kv_dtype=kv_dtype,
        compute_dtype=torch.float32,
        device=torch.device("cpu"),
        rewind_tokens=rewind,
    )


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "fp8"])
def test_pool_holds_exactly_the_declared_bytes(kv_dtype: str) -> None:
    pool = make_pool(kv_dtype, rewind=2)
    tokens, requests = 5 * 8, 3
    declared = tokens * SPEC.bytes_per_token(kv_dtype)
    declared += requests * SPEC.bytes_per_request(kv_dtype, rewind_tokens=2)
    assert pool.nbytes() == declared


def test_page_granule_holds_whole_entries_of_every_state() -> None:
    assert SPEC.page_granule == 4


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "fp8"])
def test_entries_come_back_as_written(kv_dtype: str) -> None:
    pool = make_pool(kv_dtype)
    tolerance = {"float32": 0.0, "bfloat16": 1e-2, "fp8": FP8_KV * 2}[kv_dtype]
    values = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(1))
    slots = torch.tensor([39, 0, 17, 8])
    pool.write("kv", 2, slots, values)
    read = pool.read("kv", 2, slots.view(2, 2)).view(4, 2, 32)
    assert torch.allclose(read, values, rtol=tolerance, atol=tolerance)
    assert pool.pages("kv", 0).count_nonzero() == 0  # the other layer is untouched


def test_ring_without_a_format_stays_float32_in_every_kv_dtype() -> None:
    pool = make_pool("fp8")
    rows = torch.randn(3, 6)
    pool.write("tail", 1, torch.tensor([0, 5, 11]), rows)
    assert torch.equal(pool.read("tail", 1, torch.tensor([0, 5, 11])), rows)
