"""Decode steps as CUDA graphs: one launch a step instead of one for each kernel.

A step whose requests all run one token is padded to the next batch size and block table width
that has a graph; padding rows read and write a page and a state row that no request owns.
Graphs are captured when first needed, share one memory pool, and are limited in number: past
the limit a step uses a larger graph that exists, or runs as it is.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kllm.attention.context import ForwardContext
from kllm.cache.pool import KVPool
from kllm.core import Plan
from kllm.models.base import CausalLM

MAX_GRAPHS = 32
NARROWEST_TOKENS = 1024  # of context; narrower block tables would need more graphs, not less time


class _Inputs:
    """Tensors of fixed place that a graph reads, all rows padding until a plan is loaded."""

    def __init__(
        self,
        pool: KVPool,
        batch: int,
        width: int,
        page: int,
        row: int,
        device: torch.device,
        expert_ranks: int = 1,
    ) -> None:
        self.page, self.row = page, row
        self.longs = torch.zeros(3, batch, dtype=torch.int64, device=device)
        self.longs[2] = row
        tables = torch.full((batch, width), page, dtype=torch.int32, device=device)
        self.ctx = ForwardContext(
            pool=pool,
            num_decodes=batch,
            query_lens_host=np.ones(batch, np.int32),
            # Kernels are configured for the longest contexts that the block table can hold.
            context_lens_host=np.full(batch, width * pool.page_size, np.int32),
            token_ids=self.longs[0],
            positions=self.longs[1],
            request_index=torch.arange(batch, device=device),
            cu_seqlens=torch.arange(batch + 1, dtype=torch.int32, device=device),
            context_lens=torch.ones(batch, dtype=torch.int32, device=device),
            block_tables=tables,
            rows=self.longs[2],
            places=self.longs[1],
            static=True,
            peer_tokens=(batch,) * expert_ranks,
            decode_only=True,
        )

    def load(self, plan: Plan) -> None:
        """Copy a plan's arrays; rows past the plan's become padding again."""
        live, width = plan.block_tables.shape
        batch, full_width = self.ctx.block_tables.shape
        longs = np.zeros((3, batch), np.int64)
        longs[0, :live], longs[1, :live] = plan.token_ids, plan.positions
        longs[2, :live], longs[2, live:] = plan.rows, self.row
        lens = np.ones(batch, np.int32)
        lens[:live] = plan.context_lens
        tables = np.full((batch, full_width), self.page, np.int32)
        tables[:live, :width] = plan.block_tables
        for array, target in (
            (longs, self.longs),
            (lens, self.ctx.context_lens),
            (tables, self.ctx.block_tables),
        ):
            host = torch.from_numpy(array)
            target.copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)
        self.ctx.context_lens_host = lens
        self.ctx.shared = {}


@dataclass(slots=True)
class _Captured:
    """A graph, the context whose tensors are its inputs, and its output."""

    graph: torch.cuda.CUDAGraph
    inputs: _Inputs
    logits: Tensor  # [batch, V] float32


class DecodeGraphs:
    """Captured decode steps of one model, whose `capturable` must be true.

    Args:
        scratch_page, scratch_row: a KV page and a state row of `pool` that no request owns.
        max_pages: widest block table.
        expert_ranks: ranks of the expert-parallel group; all of them replay the same steps.
        limit: graphs at most.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        *,
        scratch_page: int,
        scratch_row: int,
        max_pages: int,
        expert_ranks: int = 1,
        limit: int = MAX_GRAPHS,
    ) -> None:
        self.model = model
        self.pool = pool
        self.scratch_page = scratch_page
        self.scratch_row = scratch_row
        self.max_pages = max_pages
        self.limit = limit
        self.expert_ranks = expert_ranks
        self._device = next(model.parameters()).device
        self._memory: Any = None  # the pool that all graphs share, once there is one
        self._captured: dict[tuple[int, int], _Captured] = {}

    def run(self, plan: Plan, *, batch: int = 0, width: int = 0) -> Tensor | None:
        """Logits [B, V] of a step of single tokens, or None where it has to run without a graph.

        Args:
            batch, width: requests and pages to pad to at least: what the largest of the ranks has
                that run this step together. Capturing runs collectives, so all ranks must agree
                on when to do it.

        The result is the graph's own memory: it is valid until the next step.
        """
        if plan.num_decodes < len(plan.query_lens):
            return None
        live, pages = plan.block_tables.shape
        found = self._find(max(batch, live), max(width, pages))
        if found is None:
            return None
        found.inputs.load(plan)
        self.model.prepare(found.inputs.ctx)
        found.graph.replay()
        return found.logits[:live]

    def _find(self, batch: int, width: int) -> _Captured | None:
        """The graph of the step's bucket, captured now if need be, or the smallest larger one."""
        bucket = batch_bucket(batch), width_bucket(width, self.pool.page_size, self.max_pages)
        if bucket not in self._captured:
            if len(self._captured) < self.limit:
                self._captured[bucket] = self._capture(*bucket)
            else:
                larger = [key for key in self._captured if key[0] >= batch and key[1] >= width]
                return self._captured[min(larger)] if larger else None
        return self._captured[bucket]

    def _capture(self, batch: int, width: int) -> _Captured:
        inputs = _Inputs(
            self.pool,
            batch,
            width,
            self.scratch_page,
            self.scratch_row,
            self._device,
            self.expert_ranks,
        )
        ctx = inputs.ctx
        self.model.prepare(ctx)
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):  # compiles kernels and creates handles outside the capture
            self._forward(ctx)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits = self._forward(ctx)
        self._memory = graph.pool()
        return _Captured(graph, inputs, logits)

    def _forward(self, ctx: ForwardContext) -> Tensor:
        # What layers share within a step must be computed inside the graph, each time anew.
        fresh = replace(ctx, shared=dict(ctx.shared))
        return self.model.logits(self.model(fresh))


def batch_bucket(batch: int) -> int:
    """The padded batch size: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, ..."""
    power = 1 << (batch - 1).bit_length()
    step = max(1, power // 4)
    return -(-batch // step) * step


def width_bucket(width: int, page_size: int, max_pages: int) -> int:
    """The padded block table width in pages: powers of two, at most `max_pages`."""
    narrowest = max(1, NARROWEST_TOKENS // page_size)
    return min(max(narrowest, 1 << (width - 1).bit_length()), max_pages)
