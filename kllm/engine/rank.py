"""One rank of a layout: its network, its KV pool, and its part of every step."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kllm.attention.context import ForwardContext, to_device
from kllm.cache.handover import hand_over
from kllm.cache.pool import KVPool
from kllm.config import EngineConfig, ParallelConfig
from kllm.core import Plan, Request
from kllm.engine.graphs import CapturedStep, DecodeGraphs, batch_bucket
from kllm.engine.memory import SCRATCH, KVBudget, plan_kv
from kllm.engine.pipeline import SlicedStage, StageModel, run_stages
from kllm.engine.profile import activation_bytes
from kllm.engine.step import MicroStep, RankOutcome
from kllm.models.base import CausalLM, Groups
from kllm.models.devices import free_bytes
from kllm.models.load import ResolvedModel, load_model
from kllm.parallel.emulated import EmulatedComm
from kllm.parallel.expert_backends import capturable
from kllm.parallel.layout import place
from kllm.parallel.sequence import SequenceStep, local_plan
from kllm.parallel.stripes import Stripes
from kllm.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of one micro-batch."""

    plan: Plan
    sampled: NDArray[np.int64]  # [B] index among the step's sampled requests; -1: not sampled here
    places: NDArray[np.int64] | None  # [T] as `LocalPlan.places`; None: at their positions
    step: SequenceStep | None  # with context parallelism


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on a rank's device; those of tensors are not counted on a CPU."""

    free: int
    held: int  # by tensors
    passing: int  # by tensors that are gone: the highest sum of both since the last look, less held


class Rank:
    """One rank of `config.parallel`.

    Args:
        number: which rank.
        groups: its communicators.
        model: the network if it is already loaded; it outlives the rank.

    Raises:
        CapacityError: when the weights do not fit the device.
    """

    def __init__(
        self,
        config: EngineConfig,
        resolved: ResolvedModel,
        groups: Groups,
        *,
        number: int = 0,
        device: torch.device,
        model: CausalLM | None = None,
    ) -> None:
        self.config, self.device, self.groups = config, device, groups
        self.layout: ParallelConfig = config.parallel
        self.place = place(self.layout, number)
        stage_ranks = self.layout.world // self.layout.pp
        first = number % stage_ranks // self.layout.ep * self.layout.ep
        self._peers = slice(first, first + self.layout.ep)
        self.dtype: torch.dtype = getattr(torch, resolved.dtype)
        if model is None:
            model = load_model(resolved, device=device, dtype=self.dtype, groups=groups)
        self.model = model
        # What a full step needs besides weights and KV; 0 on a CPU.
        self.activation_bytes = activation_bytes(
            config, model, resolved.kv_dtype, self.dtype, device
        )
        self.budget = plan_kv(
            config,
            model.cache_spec,
            kv_dtype=resolved.kv_dtype,
            model_len=resolved.config.max_position_embeddings,
            device=device,
            activation_bytes=self.activation_bytes,
        )
        self.samples_here = self.place.pp == self.layout.pp - 1 and self.place.tp == 0
        self._sliced: SlicedStage | None = None
        if isinstance(groups.pp, EmulatedComm) and groups.pp.size > 1:
            self._sliced = SlicedStage(groups.pp)
        self._sampler = Sampler(config.seed, device)
        self._pool: KVPool | None = None
        self._graphs: DecodeGraphs | None = None
        self._stripes: Stripes | None = None
        self._cp_kind = ""

    def allocate(
        self, budget: KVBudget, stripes: Stripes | None, cp_kind: str, *, fill: bool = False
    ) -> None:
        """Make the KV pool, of the size that all ranks agreed on, in place of one that is there.

        Args:
            fill: with random entries, for timing.

        Raises:
            torch.OutOfMemoryError: when the device cannot hold it.
        """
        if self._pool is not None:
            self.close()  # the device may not hold both
        self.budget, self._stripes, self._cp_kind = budget, stripes, cp_kind
        self._pool = KVPool(
            self.model.cache_spec,
            num_pages=budget.num_pages + SCRATCH,
            page_size=budget.page_size,
            max_batch=budget.max_batch + SCRATCH,
            kv_dtype=budget.kv_dtype,
            compute_dtype=self.dtype,
            device=self.device,
            rewind_tokens=budget.rewind_tokens,
        )
        if fill:
            self._pool.fill_random(self.config.seed)
        if self.config.graphs and self.device.type == "cuda" and self.model.capturable:
            self._graphs = DecodeGraphs(
                self.model,
                self._pool,
                scratch_page=budget.num_pages,
                scratch_row=budget.max_batch,
                max_pages=-(-budget.max_model_len // budget.page_size),
                expert_ranks=self.layout.ep,
            )

    @property
    def pool(self) -> KVPool:
        """The KV memory; it must have been allocated."""
        assert self._pool is not None, "rank used before it was given its KV pool"
        return self._pool

    @torch.inference_mode()
    def run(self, micro: Sequence[MicroStep], requests: Sequence[Request]) -> RankOutcome:
        """Run the step's tokens that are this rank's; sample where this rank has the logits.

        Args:
            requests: those sampled here, in the order of `Share.sampled` over the micro-batches.
                Pass the same object while they stay the same.
        """
        begin = time.perf_counter()
        shares = [self._share(step) for step in micro]
        sampled = np.concatenate([share.sampled[share.sampled >= 0] for share in shares])
        captured = self._find_captured(micro, shares)
        if captured is None:
            logits = self._forward(micro, shares)
        else:
            logits = self._replay(captured, shares[0].plan)
        if logits is None or not self.samples_here or not len(sampled):
            none = np.zeros(0, np.int64)
            return RankOutcome(none, none, run_s=time.perf_counter() - begin)
        assert len(requests) == len(sampled)
        tokens, logprobs = self._sampler(logits, requests)
        token_ids = tokens.cpu().numpy()
        return RankOutcome(sampled, token_ids, logprobs, time.perf_counter() - begin)

    def stand_for(self, cp: int) -> None:
        """Be another context-parallel rank of a slice's group, which has the same weights.

        The KV pool has to be allocated anew before the next step.
        """
        self.groups.cp.rank = cp
        self.place = replace(self.place, cp=cp)

    def settle(self) -> DeviceMemory:
        """Wait until the device has done all its work; what its memory was used for since."""
        if self.device.type != "cuda":
            return DeviceMemory(free_bytes(self.device), 0, 0)
        torch.cuda.synchronize(self.device)
        peak, held = (
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.memory_allocated(self.device),
        )
        torch.cuda.reset_peak_memory_stats(self.device)
        return DeviceMemory(free_bytes(self.device), held, peak - held)

    def close(self) -> None:
        """Drop the KV pool and what was captured."""
        self._pool = self._graphs = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _share(self, step: MicroStep) -> Share:
        budget = self.budget
        if step.plan is None:
            plan = idle_plan(budget.num_pages, budget.max_batch)
            return Share(plan, np.full(1, -1), None, None)
        if self._stripes is None:
            return Share(step.plan, step.sampled, None, None)
        local = local_plan(
            step.plan,
            self._stripes,
            self.place.cp,
            kind=self._cp_kind,
            scratch_page=budget.num_pages,
            scratch_row=budget.max_batch,
        )
        here = local.plan.samples & (local.origin >= 0)
        sampled = np.where(here, step.sampled[local.origin], -1)
        return Share(local.plan, sampled, local.places, local.step)

    def _peer_tokens(self, step: MicroStep) -> tuple[int, ...]:
        peers = step.peer_tokens[self._peers]
        # Steps without prompts may be replayed: all ranks pad them to a size that is captured.
        return (batch_bucket(max(peers)),) * len(peers) if step.decode_only else peers

    def _find_captured(
        self, micro: Sequence[MicroStep], shares: Sequence[Share]
    ) -> CapturedStep | None:
        """What the step can be replayed with, if this is one that can be."""
        if self._graphs is None or len(micro) > 1 or not micro[0].decode_only:
            return None
        # Whether and what to capture must be the same on all ranks: it runs collectives, and
        # stages send each other the padding too.
        batch, width = max(micro[0].peer_tokens), micro[0].width
        if not capturable(self.layout, batch_bucket(batch)):
            return None
        return self._graphs.find(shares[0].plan, batch=batch, width=width)

    def _replay(self, captured: CapturedStep, plan: Plan) -> Tensor | None:
        """Logits of the requests; None on an earlier stage."""
        states = self._run_stages(captured, [captured.load(plan)])
        return None if states is None else captured.logits(states[0], len(plan.query_lens))

    def _run_stages(
        self, model: StageModel, contexts: Sequence[ForwardContext]
    ) -> list[Tensor] | None:
        if self._sliced is None:
            return run_stages(model, contexts, self.groups.pp)
        return self._sliced.run(model, contexts)

    def _forward(self, micro: Sequence[MicroStep], shares: Sequence[Share]) -> Tensor | None:
        """Logits of the sampled requests; None where there are none or on an earlier stage."""
        assert self._pool is not None, "rank used before it was given its KV pool"
        contexts = []
        for step, share in zip(micro, shares, strict=True):
            sequence = None if share.step is None else (self.groups.cp, share.step)
            ctx = ForwardContext.from_plan(
                share.plan,
                self._pool,
                self.device,
                places=share.places,
                sequence=sequence,
                peer_tokens=self._peer_tokens(step),
                decode_only=step.decode_only,
            )
            contexts.append(ctx)
        states = self._run_stages(self.model, contexts)
        if self._stripes is not None:
            for ctx in contexts:
                if (shared := ctx.sequence) is not None:
                    hand_over(self._pool, self.groups.cp, shared.step, shared.block_tables)
        if states is None:
            return None
        rows = [
            sampled_rows(state, share.plan, share.sampled >= 0)
            for state, share in zip(states, shares, strict=True)
        ]
        wanted = torch.cat(rows) if len(rows) > 1 else rows[0]
        return self.model.logits(wanted) if len(wanted) else None


def sampled_rows(state: Tensor, plan: Plan, here: NDArray[np.bool_]) -> Tensor:
    """The states [S, ...] of the last tokens of the requests that are sampled.

    Args:
        state: [T, ...].
        here: [B] which requests are sampled.
    """
    if here.all() and plan.num_tokens == len(here):
        return state
    last = np.cumsum(plan.query_lens, dtype=np.int64)[here] - 1
    return state[to_device(last, state.device)]


def idle_plan(scratch_page: int, scratch_row: int) -> Plan:
    """One token on a page that no request owns: what a rank runs to keep the others company."""
    one = np.ones(1, np.int32)
    zero = np.zeros(1, np.int64)
    return Plan(
        step=0,
        num_decodes=1,
        rows=one * scratch_row,
        query_lens=one,
        context_lens=one,
        token_ids=zero,
        positions=zero,
        block_tables=(one * scratch_page)[None],
        samples=np.zeros(1, np.bool_),
    )
