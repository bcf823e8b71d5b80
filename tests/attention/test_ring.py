"""Prompts that ranks share, ring and all-gather, against naive attention in float64."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kllm.attention import latent, mla, mla_ring, ring, ring_selection, workspace
from kllm.attention.context import ForwardContext
from kllm.attention.ring import travel
from kllm.attention.sequence_parallel import SequenceAttention
from kllm.kernels import block_attention_reference
from kllm.parallel.communicator import Communicator
from kllm.parallel.sequence import local_plan
from kllm.parallel.single import Done
from tests.attention.attention_only import VOCAB, GroupedQueries, Latents
from tests.attention.sequence_harness import SequenceHarness
from tests.models.harness import without_data
from tests.parallel.threads import ThreadComm, run_ranks
from tests.tolerances import TOLERANCE

CLOSE = {"rtol": TOLERANCE[torch.float32], "atol": TOLERANCE[torch.float32]}
KINDS = pytest.mark.parametrize("kind", ["ring", "all_gather", "replicated"])
# Lengths of a prompt's chunks: later ones find a prefix in the cache.
PROMPTS = st.lists(st.lists(st.integers(1, 171), min_size=1, max_size=3), min_size=1, max_size=2)


@cache
def network(name: str) -> GroupedQueries | Latents:
    """Sparse attention selects among fewer entries than most prompts have."""
    if name == "gqa":
        return GroupedQueries()
    return Latents(topk=20 if name == "dsa" else None)


@contextmanager
def forms(expanded: bool | None) -> Iterator[None]:
    """MLA in one form only, in small pieces; None: GQA, which has one form."""
    with (
        patch.object(latent, "EXPANDED_BYTES", 1 << 12),
        patch.object(workspace, "BLOCK_BYTES", 1 << 12),
        patch.object(ring_selection, "KEPT_BLOCKS", 3),
        patch.object(ring, "UNPACK_BYTES", 1 << 10),
    ):
        if expanded is None:
            yield
            return
        with (
            patch.object(mla, "expanding_pays", lambda *_: expanded),
            patch.object(mla_ring, "expanding_pays", lambda *_: expanded),
        ):
            yield


def run_prompts(
    model: GroupedQueries | Latents,
    prompts: list[list[int]],
    ranks: int,
    stripe_pages: int,
    kind: str,
    kv_dtype: str = "float32",
) -> list[tuple[Tensor, Tensor]]:
    """(ours, naive) of requests whose k-th chunks run together, and of three decodes each."""
    owners = [(3 * r + 1) % ranks for r in range(len(prompts))]
    longest = max(map(sum, prompts)) + 3
    harness = SequenceHarness(
        model,
        ranks,
        kind=kind,
        owners=owners,
        max_len=longest,
        stripe_pages=stripe_pages,
        kv_dtype=kv_dtype,
    )
    ids = [torch.randperm(VOCAB, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    got: list[list[Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    for step in range(3):
        tokens = {
            r: ids[r][done[r] : done[r] + chunks[step]].tolist()
            for r, chunks in enumerate(prompts)
            if step < len(chunks)
        }
        for r, rows in harness.step(tokens).items() if tokens else ():
            got[r].append(rows)
            done[r] += len(rows)
    harness.finish(range(len(prompts)))
    for _ in range(3):
        tokens = {r: [int(ids[r][done[r]])] for r in range(len(prompts))}
        for r, rows in harness.step(tokens, decodes=set(tokens)).items():
            got[r].append(rows)
            done[r] += 1
    pool = harness.pools[0]
    return [
        (torch.cat(rows).double(), model.naive(ids[r][: done[r]], pool))
        for r, rows in enumerate(got)
    ]


@KINDS
@pytest.mark.parametrize(
    ("name", "expanded"),
    [("gqa", None), ("mla", True), ("mla", False), ("dsa", False)],
    ids=["gqa", "mla expanded", "mla absorbed", "dsa"],
)
@settings(max_examples=12, deadline=None)
@given(prompts=PROMPTS, ranks=st.integers(1, 8), stripe_pages=st.integers(1, 3))
def test_shared_prompts_agree_with_naive_attention(
    name: str,
    expanded: bool | None,
    kind: str,
    prompts: list[list[int]],
    ranks: int,
    stripe_pages: int,
) -> None:
    """Lengths of 1 to 513 that divide by nothing, packed, chunked, then decoded by the owners."""
    model = network(name)
    with forms(expanded):
        results = run_prompts(model, prompts, ranks, stripe_pages, kind)
    for got, want in results:
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("name", ["gqa", "mla", "dsa"])
def test_the_longest_prompt_on_each_number_of_ranks(name: str, ranks: int) -> None:
    [(got, want)] = run_prompts(network(name), [[513]], ranks, 2, kind="ring")
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_fp8_entries_travel_packed(name: str) -> None:
    """What every rank sees is what a decode would read."""
    with forms(None):
        results = run_prompts(network(name), [[90, 70], [33]], 3, 2, kind="ring", kv_dtype="fp8")
    for got, want in results:
        torch.testing.assert_close(got, want, **CLOSE)


def test_error_does_not_grow_with_the_ring() -> None:
    """Partial results are float32: eight ranks are at most twice as far off as one."""
    errors = []
    for ranks in (1, 8):
        [(got, want)] = run_prompts(network("gqa"), [[513]], ranks, 2, kind="ring")
        errors.append((got - want).abs().max().item())
    assert errors[1] <= 2 * errors[0]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_blocks_travel_once_round_in_two_buffers(size: int) -> None:
    """Each rank sees every block once, its own first, and sends one time fewer."""

    class Counting:
        def __init__(self, comm: Communicator) -> None:
            self.comm, self.rank, self.size = comm, comm.rank, comm.size
            self.buffers: set[int] = set()
            self.shifts = 0

        def ring_shift(self, out: Tensor, x: Tensor) -> Done:
            self.shifts += 1
            self.buffers |= {out.data_ptr(), x.data_ptr()}
            self.comm.ring_shift(out, x)
            return Done()

    def work(comm: Communicator) -> tuple[list[int], list[int], int, int]:
        counting = Counting(comm)
        own = torch.full((3,), comm.rank)
        seen = [(source, int(block[0])) for source, block in travel(counting, own)]
        assert all(source == value for source, value in seen)
        return [source for source, _ in seen], [comm.rank], len(counting.buffers), counting.shifts

    for sources, [rank], buffers, shifts in run_ranks(size, work):
        assert sources == [(rank - hop) % size for hop in range(size)]
        assert shifts == size - 1
        assert buffers == (2 if size > 1 else 0)


class Allocations:
    """Bytes of the KV that each rank hands to a collective, buffers counted once."""

    def __init__(self) -> None:
        self.buffers: dict[int, dict[int, int]] = {}

    def counting(self, collective: Any) -> Any:
        """The method of `ThreadComm`, which then counts."""

        def call(comm: ThreadComm, out: Tensor, x: Tensor) -> Done:
            seen = self.buffers.setdefault(comm.rank, {})
            seen.update({t.untyped_storage().data_ptr(): t.nbytes for t in (out, x)})
            done: Done = collective(comm, out, x)
            return done

        return call

    @property
    def most(self) -> int:
        """Bytes on the rank with the most."""
        return max(sum(seen.values()) for seen in self.buffers.values())


def kv_bytes(name: str, ranks: int, local: int, kind: str) -> tuple[int, int]:
    """(bytes of buffers, bytes of pages) that a prompt of ranks * local tokens takes on a rank.

    The pages are those of a rank that will not decode the request.
    """
    counted = Allocations()
    model = network(name)
    harness = SequenceHarness(model, ranks, kind=kind, max_len=ranks * local, stripe_pages=2)
    ring_shift, all_gather = ThreadComm.ring_shift, ThreadComm.all_gather
    with (
        patch.object(ThreadComm, "ring_shift", counted.counting(ring_shift)),
        patch.object(ThreadComm, "all_gather", counted.counting(all_gather)),
    ):
        harness.step({0: range(ranks * local)})
    pages = int((harness.tables[-1, 0] > 0).sum())
    pool = harness.pools[-1]
    return counted.most, pages * pool.nbytes() // pool.num_pages


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_a_ring_needs_no_more_memory_on_more_ranks(name: str) -> None:
    """At 64 tokens a rank; `pytest -s` prints the table."""
    degrees = (2, 4, 8)
    table = {
        kind: [kv_bytes(name, ranks, 64, kind) for ranks in degrees]
        for kind in ("ring", "all_gather", "replicated")
    }
    print(f"\n\n{name}, 64 tokens a rank: KV bytes a rank, buffers + pages")
    print(f"{'':<12}" + "".join(f"{f'cp {ranks}':>18}" for ranks in degrees))
    for kind, row in table.items():
        print(f"{kind:<12}" + "".join(f"{f'{a:,} + {b:,}':>18}" for a, b in row))
    assert len(set(table["ring"])) == 1
    token = table["ring"][0][1] // 64
    assert table["ring"][0] == (2 * 64 * token, 64 * token)
    for i, ranks in enumerate(degrees):
        gathered = (ranks + 1) * 64 * token  # what a rank sends and what comes
        assert table["all_gather"][i] == (gathered, 64 * token)
        assert table["replicated"][i] == (gathered, ranks * 64 * token)


class NoBackend:
    """A backend that attends to nothing."""

    def prepare(self, ctx: ForwardContext) -> None: ...

    def attend(self, ctx: ForwardContext, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.empty_like(q)


class Silent:
    """A group of two in which nothing is exchanged."""

    rank, size = 0, 2

    def ring_shift(self, out: Tensor, x: Tensor) -> Done:
        return Done()

    def all_gather(self, out: Tensor, x: Tensor) -> Done:
        return Done()


@KINDS
@pytest.mark.parametrize("name", ["gqa", "mla", "dsa"])
def test_attention_to_shared_prompts_looks_at_no_value_on_the_host(name: str, kind: str) -> None:
    """It runs on tensors without data, so that a GPU is never waited for.

    Left out are the kernels of the CPU and the backend, which have twins for GPUs.
    """
    meta = torch.device("meta")
    model = copy.deepcopy(network(name)).to(meta)
    if isinstance(model, Latents):
        keys, values = (t.to(meta) for t in (model.heads.keys, model.heads.values))
        model.heads = replace(model.heads, keys=keys, values=values)
    else:
        model.attention = SequenceAttention(NoBackend())
    harness = SequenceHarness(network(name), 2, kind=kind, max_len=100)
    _, plan = harness.plan({0: range(100)}, decodes=())
    local = local_plan(plan, harness.stripes, 0, kind=kind, scratch_page=0, scratch_row=0)
    ctx = ForwardContext.from_plan(
        local.plan,
        harness.pools[0],
        torch.device("cpu"),
        places=local.places,
        sequence=(Silent(), local.step),
    )
    assert ctx.sequence is not None
    ctx.sequence = replace(ctx.sequence, block_tables=ctx.sequence.block_tables.to(meta))
    for field in ("token_ids", "positions", "request_index", "block_tables", "places"):
        setattr(ctx, field, getattr(ctx, field).to(meta))
    ctx.pool = without_data(ctx.pool)

    nothing = patch.object(block_attention_reference, "sparse_block_attention", lambda *_: None)
    with nothing:
        assert model(ctx).shape[0] == len(local.plan.token_ids)
