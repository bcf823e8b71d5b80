"""Drives a network on context-parallel ranks, as threads, through hand-made plans; no engine."""

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kllm.attention.context import ForwardContext
from kllm.cache.handover import hand_over
from kllm.cache.pool import KVPool
from kllm.core import Plan
from kllm.models.base import CausalLM
from kllm.parallel.communicator import Communicator
from kllm.parallel.sequence import LocalPlan, Piece, SequenceStep, local_plan
from kllm.parallel.stripes import Stripes
from tests.parallel.threads import run_ranks

T = TypeVar("T")
POISON = 1e4  # what nobody has written: reading it shows, multiplying it by 0 does not


class SequenceHarness:
    """Requests on a group of ranks that share prompts, with pages shuffled on each rank.

    Page 0 stands for pages that a rank does not hold: nothing may be written there.
    """

    def __init__(
        self,
        model: CausalLM,
        ranks: int,
        *,
        kind: str,
        owners: Sequence[int] = (0,),
        max_len: int = 256,
        stripe_pages: int = 1,
        kv_dtype: str = "float32",
        seed: int = 0,
    ) -> None:
        self.model, self.ranks, self.kind = model, ranks, kind
        self.device = next(model.parameters()).device
        self.owners = np.array(owners, np.int32)
        page = model.cache_spec.page_granule
        self.stripes = Stripes(ranks, stripe_pages * page)
        requests, width = len(owners), -(-max_len // page)
        rng = np.random.default_rng(seed)
        self.rows = rng.permutation(requests + 1).astype(np.int32)  # the last is scratch
        self.tables = np.zeros((ranks, requests, width), np.int32)
        self.pools, self.scratch_pages = [], []
        for rank in range(ranks):
            order = iter(rng.permutation(requests * width + 1).astype(np.int32) + 1)
            for request, owner in enumerate(owners):
                all_of_it = owner == rank or kind == "replicated"
                tokens = max_len if all_of_it else self.stripes.count(rank, max_len)
                for i in range(-(-tokens // page)):
                    self.tables[rank, request, i] = next(order)
            self.scratch_pages.append(int(next(order)))
            pool = KVPool(
                model.cache_spec,
                num_pages=requests * width + 2,
                page_size=page,
                max_batch=requests + 1,
                kv_dtype=kv_dtype,
                compute_dtype=next(model.parameters()).dtype,
                device=self.device,
            )
            for state in pool.spec.paged:
                for layer in state.layers:
                    pages = pool.pages(state.name, layer)
                    values = torch.full((*pages.shape[:3], state.entry.width), POISON)
                    pages.copy_(pool.pack(state.name, values))
            for ring_state in pool.spec.rings:
                for layer in ring_state.layers:
                    rings = pool.rings(ring_state.name, layer)
                    values = torch.full((*rings.shape[:2], ring_state.width), POISON)
                    rings.copy_(pool.pack(ring_state.name, values))
            self.pools.append(pool)
        self.lengths = np.zeros(requests, np.int32)

    def plan(
        self, tokens: dict[int, Sequence[int]], decodes: Collection[int]
    ) -> tuple[list[int], Plan]:
        """The requests in their order in the group's step, and the step."""
        order = sorted(tokens, key=lambda r: (r not in decodes, len(tokens[r])))
        query_lens = np.array([len(tokens[r]) for r in order], np.int32)
        starts = self.lengths[order]
        spans = zip(starts, query_lens, strict=True)
        tables = self.tables[:, order]
        owners = self.owners[order]
        return order, Plan(
            step=0,
            num_decodes=len(decodes),
            rows=self.rows[order],
            query_lens=query_lens,
            context_lens=(starts + query_lens).astype(np.int32),
            token_ids=np.concatenate([np.asarray(tokens[r], np.int64) for r in order]),
            positions=np.concatenate([np.arange(s, s + n, dtype=np.int64) for s, n in spans]),
            block_tables=tables[owners, np.arange(len(order))],
            samples=np.ones(len(order), bool),
            owners=owners,
            shard_tables=tables,
        )

    def on_ranks(self, plan: Plan, work: Callable[[LocalPlan, ForwardContext], T]) -> list[T]:
        """What `work` returned on each rank, given its part of a group's plan."""

        def run(comm: Communicator) -> T:
            local = local_plan(
                plan,
                self.stripes,
                comm.rank,
                kind=self.kind,
                scratch_page=self.scratch_pages[comm.rank],
                scratch_row=int(self.rows[-1]),
            )
            ctx = ForwardContext.from_plan(
                local.plan,
                self.pools[comm.rank],
                self.device,
                places=local.places,
                sequence=(comm, local.step),
            )
            with torch.inference_mode():
                return work(local, ctx)

        return run_ranks(self.ranks, run)

    def step(
        self, tokens: dict[int, Sequence[int]], decodes: Collection[int] = ()
    ) -> dict[int, Tensor]:
        """Run the given tokens of each request; logits [n, V] of every one of them.

        Args:
            decodes: requests whose prompt is done: their owners run them, one token each.
        """
        order, plan = self.plan(tokens, decodes)

        def work(local: LocalPlan, ctx: ForwardContext) -> tuple[LocalPlan, Tensor]:
            self.model.prepare(ctx)
            return local, self.model.logits(self.model(ctx))

        out: dict[int, Tensor] = {}
        for local, logits in self.on_ranks(plan, work):
            row = 0
            for i, length in zip(local.origin, local.plan.query_lens.tolist(), strict=True):
                if i >= 0:
                    first = int(local.plan.positions[row]) - int(self.lengths[order[i]])
                    shape = len(tokens[order[i]]), logits.shape[1]
                    rows = out.setdefault(order[i], torch.full(shape, float("nan")))
                    rows[first : first + length] = logits[row : row + length]
                row += length
        self.lengths[order] += plan.query_lens
        return out

    def run(self, token_ids: Sequence[int], chunks: Sequence[int], request: int = 0) -> Tensor:
        """Feed one request's prompt in chunks of the given sizes; logits [sum(chunks), V]."""
        out, start = [], 0
        for size in chunks:
            out.append(self.step({request: token_ids[start : start + size]})[request])
            start += size
        return torch.cat(out)

    def finish(self, requests: Sequence[int]) -> None:
        """Hand finished prompts over to their owners."""
        pieces = tuple(
            Piece(0, int(self.lengths[r]), int(self.owners[r]), slice(0), True) for r in requests
        )
        tables = self.tables[:, requests]

        def work(comm: Communicator) -> None:
            rank = comm.rank
            step = SequenceStep(
                rank, self.stripes, self.kind, pieces, self.rows[requests], tables[rank]
            )
            on_device = torch.from_numpy(tables[rank]).to(self.device)
            hand_over(self.pools[rank], comm, step, on_device)

        run_ranks(self.ranks, work)
