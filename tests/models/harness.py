"""Drives a network through hand-made plans: any chunking of any requests, no engine."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kllm.attention.context import ForwardContext
from kllm.cache.pool import KVPool
from kllm.core import Plan
from kllm.models.base import CausalLM


def without_data(pool: KVPool) -> KVPool:
    """A pool like this one, for one request's state, on PyTorch's meta device."""
    return KVPool(
        pool.spec,
        num_pages=pool.num_pages,
        page_size=pool.page_size,
        max_batch=1,
        kv_dtype=pool.kv_dtype,
        compute_dtype=pool.compute_dtype,
        device=torch.device("meta"),
    )


class Harness:
    """Requests with shuffled pages and state rows, so that wrong indexing cannot hide."""

    def __init__(
        self,
        model: CausalLM,
        num_requests: int = 1,
        max_len: int = 256,
        page_size: int | None = None,
        kv_dtype: str = "float32",
        seed: int = 0,
    ) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        page_size = page_size or model.cache_spec.page_granule
        pages_each = -(-max_len // page_size)
        rng = np.random.default_rng(seed)
        order = rng.permutation(num_requests * pages_each + 3)
        self.tables = order[: num_requests * pages_each].reshape(num_requests, pages_each)
        rows = rng.permutation(num_requests + 2).astype(np.int32)
        self.rows = rows[:num_requests]
        self.spare_page, self.spare_row = int(order[-1]), int(rows[-1])  # no request's
        self.pool = KVPool(
            model.cache_spec,
            num_pages=num_requests * pages_each + 3,
            page_size=page_size,
            max_batch=num_requests + 2,
            kv_dtype=kv_dtype,
            compute_dtype=next(model.parameters()).dtype,
            device=self.device,
        )
        self.lengths = np.zeros(num_requests, np.int32)

    def plan(self, tokens: dict[int, Sequence[int]]) -> tuple[list[int], Plan]:
        """The requests in their order in the step, and the step."""
        order = sorted(tokens, key=lambda r: len(tokens[r]))
        query_lens = np.array([len(tokens[r]) for r in order], np.int32)
        starts = self.lengths[order]
        return order, Plan(
            step=0,
            num_decodes=int((query_lens == 1).sum()),
            rows=self.rows[order],
            query_lens=query_lens,
            context_lens=(starts + query_lens).astype(np.int32),
            token_ids=np.concatenate([np.asarray(tokens[r], np.int64) for r in order]),
            positions=np.concatenate(
                [
                    np.arange(s, s + n, dtype=np.int64)
                    for s, n in zip(starts, query_lens, strict=True)
                ]
            ),
            block_tables=self.tables[order].astype(np.int32),
            samples=np.ones(len(order), bool),
        )

    def step(self, tokens: dict[int, Sequence[int]]) -> dict[int, Tensor]:
        """Run the given tokens of each request; logits [n, V] of every one of them."""
        order, plan = self.plan(tokens)
        ctx = ForwardContext.from_plan(plan, self.pool, self.device)
        with torch.inference_mode():
            self.model.prepare(ctx)
            logits = self.model.logits(self.model(ctx))
        self.lengths[order] += plan.query_lens
        return dict(zip(order, logits.split(plan.query_lens.tolist()), strict=True))

    def run(self, token_ids: Sequence[int], chunks: Sequence[int], request: int = 0) -> Tensor:
        """Feed one request in chunks of the given sizes; logits [sum(chunks), V]."""
        out, start = [], 0
        for size in chunks:
            out.append(self.step({request: token_ids[start : start + size]})[request])
            start += size
        return torch.cat(out)

    def attend(
        self,
        attention: Callable[[Tensor, ForwardContext], Tensor],
        x: Tensor,
        chunks: Sequence[int],
    ) -> Tensor:
        """What one layer's attention alone makes of x [T, hidden], fed in chunks."""
        out, start = [], 0
        for size in chunks:
            _, plan = self.plan({0: [0] * size})
            ctx = ForwardContext.from_plan(plan, self.pool, self.device)
            out.append(attention(x[start : start + size], ctx))
            self.lengths[0] += size
            start += size
        return torch.cat(out)
