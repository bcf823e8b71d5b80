"""Decode steps as CUDA graphs: one launch a step instead of one for each kernel.

A pipeline stage captures its layers. What it receives and what it sends has a fixed place; the
transfers themselves stay outside of the graph.

A step whose requests all run one token is padded to the next batch size and block table width
that has a graph; padding rows read and write a page and a state row that no request owns.
Graphs are captured when first needed, share one memory pool, and are limited in number: past
the limit a step uses a larger graph that exists, or runs as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kllm.attention.context import ALIGNMENT, ForwardContext
from kllm.cache.pool import KVPool
from kllm.core import Plan
from kllm.models.base import CausalLM, Stage

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
        # In one piece, so that a step is one copy.
        self._packed = torch.empty(_Arrays.nbytes(batch, width), dtype=torch.uint8, device=device)
        there = _Arrays.of(self._packed, batch, width)
        self.ctx = ForwardContext(
            pool=pool,
            num_decodes=batch,
            query_lens_host=np.ones(batch, np.int32),
            # Kernels are configured for the longest contexts that the block table can hold.
            context_lens_host=np.full(batch, width * pool.page_size, np.int32),
            token_ids=there.longs[0],
            positions=there.longs[1],
            request_index=torch.arange(batch, device=device),
            cu_seqlens=torch.arange(batch + 1, dtype=torch.int32, device=device),
            context_lens=there.lens,
            block_tables=there.tables,
            rows=there.longs[2],
            places=there.longs[1],
            static=True,
            peer_tokens=(batch,) * expert_ranks,
            decode_only=True,
        )
        self._packed.copy_(self._padding()[0])

    def load(self, plan: Plan) -> ForwardContext:
        """Copy a plan's arrays; rows past the plan's become padding again.

        Returns:
            `ctx` with the lengths of the plan, for planning kernels.
        """
        live, width = plan.block_tables.shape
        packed, host = self._padding()
        longs, lens, tables = (part.numpy() for part in (host.longs, host.lens, host.tables))
        longs[:, :live] = plan.token_ids, plan.positions, plan.rows
        lens[:live] = plan.context_lens
        tables[:live, :width] = plan.block_tables
        self._packed.copy_(packed, non_blocking=True)
        return replace(self.ctx, context_lens_host=lens, shared={})

    def _padding(self) -> "tuple[Tensor, _Arrays]":
        """Memory of the host for a step, all rows padding."""
        batch, width = self.ctx.block_tables.shape
        nbytes, pinned = len(self._packed), self._packed.is_cuda
        packed = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        host = _Arrays.of(packed, batch, width)
        host.longs[:2] = 0
        host.longs[2] = self.row
        host.lens.fill_(1)
        host.tables.fill_(self.page)
        return packed, host


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Parts of a packed step."""

    longs: Tensor  # [3, batch] int64: token ids, positions, state rows
    lens: Tensor  # [batch] int32, of contexts
    tables: Tensor  # [batch, width] int32

    @classmethod
    def of(cls, packed: Tensor, batch: int, width: int) -> "_Arrays":
        """The parts of [nbytes] uint8."""
        first, second = _Arrays._ends(batch)
        return cls(
            packed[: 24 * batch].view(torch.int64).view(3, batch),
            packed[first : first + 4 * batch].view(torch.int32),
            packed[second:].view(torch.int32).view(batch, width),
        )

    @staticmethod
    def nbytes(batch: int, width: int) -> int:
        """Of the whole."""
        return _Arrays._ends(batch)[1] + 4 * batch * width

    @staticmethod
    def _ends(batch: int) -> tuple[int, int]:
        """Where the second and the third part begin; kernels are faster on aligned addresses."""
        first = -(-24 * batch // ALIGNMENT) * ALIGNMENT
        return first, first + -(-4 * batch // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class CapturedStep:
    """A padded step of a stage, which runs as its network does (`pipeline.StageModel`).

    The results are the graph's own memory, which the next step of any graph may overwrite: on
    the current stream that must come after they were read or sent.
    """

    model: CausalLM
    inputs: _Inputs
    received: list[Tensor]  # where the stage before's boundary is read; empty on the first stage
    graph: torch.cuda.CUDAGraph
    results: list[Tensor]  # the boundary; the last stage's state; of a single stage, the logits

    def load(self, plan: Plan) -> ForwardContext:
        """Make `plan` the step that runs next, with the context that this returns."""
        return self.inputs.load(plan)

    @property
    def stage(self) -> Stage:
        """The network's."""
        return self.model.stage

    def prepare(self, ctx: ForwardContext) -> None:
        """See `CausalLM.prepare`."""
        self.model.prepare(ctx)

    def __call__(self, ctx: ForwardContext, received: Sequence[Tensor]) -> Tensor:
        """Replay the loaded step: the state that is sent on or that the last stage ends with."""
        self.graph.replay()
        return self.results[0]

    def logits(self, state: Tensor, count: int) -> Tensor:
        """[count, V] float32 of the first requests, from what the last stage's call returned."""
        state = state[:count]
        return state if self.stage.first else self.model.logits(state)

    def boundary(self, ctx: ForwardContext, state: Tensor) -> list[Tensor]:
        """See `CausalLM.boundary`."""
        return self.results

    def receive_buffers(self, ctx: ForwardContext) -> list[Tensor]:
        """Where the graph reads."""
        return self.received

    def stand_in(self, ctx: ForwardContext) -> list[Tensor]:
        """The same, with plausible values in it."""
        for buffer, value in zip(self.received, _made_up(self.model, self.inputs), strict=True):
            buffer.copy_(value)
        return self.received


def _made_up(model: CausalLM, inputs: _Inputs) -> list[Tensor]:
    # What arrives is that of the longest contexts, however short a step's are. What layers share
    # is not kept: the graph has to compute it.
    return model.stand_in(replace(inputs.ctx, shared={}))


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
        self._captured: dict[tuple[int, int], CapturedStep] = {}

    def find(self, plan: Plan, *, batch: int = 0, width: int = 0) -> CapturedStep | None:
        """What a step of single tokens is replayed with; None where it has to run without a graph.

        Args:
            batch, width: requests and pages to pad to at least: what the largest of the ranks has
                that run this step together. Capturing runs collectives, so all ranks must agree
                on when to do it, and stages on what they exchange.
        """
        if plan.num_decodes < len(plan.query_lens):
            return None
        live, pages = plan.block_tables.shape
        return self._find(max(batch, live), max(width, pages))

    def _find(self, batch: int, width: int) -> CapturedStep | None:
        """The graph of the step's bucket, captured now if need be, or the smallest larger one."""
        bucket = batch_bucket(batch), width_bucket(width, self.pool.page_size, self.max_pages)
        if bucket not in self._captured:
            if len(self._captured) < self.limit:
                self._captured[bucket] = self._capture(*bucket)
            else:
                larger = [key for key in self._captured if key[0] >= batch and key[1] >= width]
                return self._captured[min(larger)] if larger else None
        return self._captured[bucket]

    def _capture(self, batch: int, width: int) -> CapturedStep:
        model = self.model
        inputs = _Inputs(
            self.pool,
            batch,
            width,
            self.scratch_page,
            self.scratch_row,
            self._device,
            self.expert_ranks,
        )
        model.prepare(inputs.ctx)
        received = [] if model.stage.first else _made_up(model, inputs)

        def run() -> list[Tensor]:
            # What layers share within a step must be computed inside the graph, each time anew.
            ctx = replace(inputs.ctx, shared=dict(inputs.ctx.shared))
            state = model(ctx, received)
            if not model.stage.last:
                return model.boundary(ctx, state)
            # Behind other stages the logits are queued while the device works, and cost no launch.
            return [model.logits(state) if model.stage.first else state]

        return CapturedStep(model, inputs, received, *self._record(run))

    def _record(self, run: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
        """A graph of what `run` queues, and the tensors that it returned: the graph's results."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):  # compiles kernels and creates handles outside the capture
            run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            results = run()
        self._memory = graph.pool()
        return graph, results


def batch_bucket(batch: int) -> int:
    """The padded batch size: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, ..."""
    power = 1 << (batch - 1).bit_length()
    step = max(1, power // 4)
    return -(-batch // step) * step


def width_bucket(width: int, page_size: int, max_pages: int) -> int:
    """The padded block table width in pages: powers of two, at most `max_pages`."""
    narrowest = max(1, NARROWEST_TOKENS // page_size)
    return min(max(narrowest, 1 << (width - 1).bit_length()), max_pages)
