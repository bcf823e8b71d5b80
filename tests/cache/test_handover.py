"""After a shared prefill the owner has every entry of a request, at its position."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kllm.cache.pool import KVPool
from kllm.cache.shards import held_slots, page_slots
from kllm.cache.spec import CacheSpec, PagedState
from kllm.models.base import CausalLM
from kllm.parallel.sequence import Piece, SequenceStep
from kllm.quant.entry import EntryFormat
from tests.attention.sequence_harness import SequenceHarness

ENTRY = EntryFormat(width=8, fp8_channels=4, group=4)
LAYERS = {"a": (0, 2), "b": (1,), "c": ()}
LENGTHS = (93, 7, 40)  # of three requests; the second lies within one stripe


class Stateful(CausalLM):
    """No network, only states of different ratios, heads and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.cache_spec = CacheSpec(
            paged=(
                PagedState(name="a", layers=LAYERS["a"], entry=ENTRY, heads=2),
                PagedState(name="b", layers=LAYERS["b"], entry=ENTRY, tokens_per_entry=4),
                PagedState(name="c", layers=LAYERS["c"], entry=ENTRY),
            ),
            page_multiple=8,
        )


def values(state: PagedState, request: int, layer: int) -> Tensor:
    """[entries, heads, channels], all different, and such that fp8 does not change them twice."""
    generator = torch.Generator().manual_seed(10 * request + layer)
    count = LENGTHS[request] // state.tokens_per_entry
    return torch.randn(count, state.heads, ENTRY.width, generator=generator)


def all_pages(pool: KVPool) -> list[Tensor]:
    """Of every state and layer."""
    return [pool.pages(state.name, n) for state in pool.spec.paged for n in state.layers]


def step_of(harness: SequenceHarness, rank: int, request: int) -> tuple[SequenceStep, Tensor]:
    """A step that ends one request, and the rank's table of it."""
    table = harness.tables[rank, request : request + 1]
    piece = Piece(0, LENGTHS[request], int(harness.owners[request]), slice(0), True)
    step = SequenceStep(rank, harness.stripes, harness.kind, (piece,), np.zeros(1, np.int32), table)
    return step, torch.from_numpy(table)


@pytest.mark.parametrize("kv_dtype", ["float32", "fp8"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_owners_get_every_entry(ranks: int, kv_dtype: str) -> None:
    owners = [ranks - 1, 0, ranks - 1]
    harness = SequenceHarness(
        Stateful(), ranks, kind="ring", owners=owners, max_len=96, kv_dtype=kv_dtype
    )
    harness.lengths[:] = LENGTHS
    for rank, pool in enumerate(harness.pools):
        for request in range(3):
            for state in pool.spec.paged:
                ratio = state.tokens_per_entry
                step, table = step_of(harness, rank, request)
                slots = held_slots(step, 0, table, pool.page_size, ratio)
                starts = np.arange(LENGTHS[request] // ratio) * ratio
                own = torch.from_numpy(harness.stripes.rank_of(starts) == rank)
                for layer in state.layers:
                    pool.write(state.name, layer, slots, values(state, request, layer)[own])
    before = [[pages.clone() for pages in all_pages(pool)] for pool in harness.pools]
    harness.finish(range(3))
    for request, owner in enumerate(owners):
        pool = harness.pools[owner]
        for state in pool.spec.paged:
            count = LENGTHS[request] // state.tokens_per_entry
            table = torch.from_numpy(harness.tables[owner, request])
            per_page = pool.page_size // state.tokens_per_entry
            slots = page_slots(table, torch.arange(count), per_page)
            for layer in state.layers:
                want = pool.unpack(state.name, pool.pack(state.name, values(state, request, layer)))
                assert torch.equal(pool.read(state.name, layer, slots), want)
    for rank in set(range(ranks)) - set(owners):
        for pages, unchanged in zip(all_pages(harness.pools[rank]), before[rank], strict=True):
            assert torch.equal(pages, unchanged)
