"""The roofline cost model: what a step costs at least, and what a workload would see from it.

A step's floor is the sum over its parts (dense weights, experts, attention, head) of

    max(bytes / read bandwidth, operations / matmul rate)

with both ceilings measured on this machine (Williams et al. 2009, applied per part because parts
run one after the other). Everything here is fidelity "modelled": floors are bounds to compare
measurements with, predictions order and prune what will be measured.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kllm.bench.workloads import Workload
from kllm.cache.spec import CacheSpec
from kllm.config import SchedulerConfig
from kllm.hardware import Ceilings
from kllm.models.base import WorkShape
from kllm.models.load import ResolvedModel
from kllm.quant.entry import DTYPE_BYTES

BISECTIONS = 60
FIDELITY = "modelled"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a step."""

    nbytes: float  # read from memory
    flops: float
    seconds: float  # the larger of the two bounds


@dataclass(frozen=True, slots=True)
class StepFloor:
    """The least time of a step, by part."""

    parts: Mapping[str, Part]

    @property
    def seconds(self) -> float:
        """Sum of the parts."""
        return sum(part.seconds for part in self.parts.values())

    @property
    def largest(self) -> str:
        """Name of the part that costs most."""
        return max(self.parts, key=lambda name: self.parts[name].seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Steady state of a workload by the model; means over requests. Fidelity: modelled."""

    ttft_s: float  # infinite when an open loop brings more than the engine can do
    tpot_s: float
    step_s: float
    requests_per_s: float
    output_tokens_per_s: float
    running: float  # requests that hold KV
    fidelity: str = FIDELITY


class Floors(Protocol):
    """What gives the floor of a mixed step."""

    def step_floor(
        self,
        *,
        decodes: float = 0,
        context: float = 0,
        prefill_tokens: float = 0,
        prefill_start: float = 0,
    ) -> StepFloor:
        """Arguments as `CostModel.step_floor`."""


def touched_experts(num_experts: int, experts_per_token: int, num_tokens: float) -> float:
    """Expected number of different experts that `num_tokens` tokens use, routed uniformly.

    E (1 - (1 - k/E)^T): a token misses a given expert with probability 1 - k/E.
    """
    if not num_experts:
        return 0.0
    missed = float((1 - experts_per_token / num_experts) ** num_tokens)
    return num_experts * (1 - missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Floors and predictions of one model on one device."""

    shape: WorkShape
    cache: CacheSpec
    ceilings: Ceilings
    dtype: str  # of weights and computation
    kv_dtype: str

    @classmethod
    def of(cls, resolved: ResolvedModel, ceilings: Ceilings) -> "CostModel":
        """The cost model of a resolved model; nothing is allocated."""
        return cls(
            shape=resolved.family.work_shape(resolved.config),
            cache=resolved.family.cache_spec(resolved.config),
            ceilings=ceilings,
            dtype=resolved.dtype,
            kv_dtype=resolved.kv_dtype,
        )

    def decode_floor(self, batch: int, context: int) -> StepFloor:
        """Floor of a step in which `batch` requests of `context` tokens each make one token."""
        return self.step_floor(decodes=batch, context=context)

    def step_floor(
        self,
        *,
        decodes: float = 0,
        context: float = 0,
        prefill_tokens: float = 0,
        prefill_start: float = 0,
        samples: float | None = None,
    ) -> StepFloor:
        """Floor of a mixed step.

        Args:
            decodes: requests that run one token.
            context: tokens in the KV of each of them.
            prefill_tokens: tokens of one prompt chunk.
            prefill_start: tokens of that prompt that earlier chunks stored.
            samples: rows of logits; None: one a decode, and one for a chunk.
        """
        shape, weight = self.shape, DTYPE_BYTES[self.dtype]
        tokens = decodes + prefill_tokens
        if samples is None:
            samples = decodes + (1 if prefill_tokens else 0)
        touched = touched_experts(shape.num_experts, shape.experts_per_token, tokens)
        expert_bytes = shape.moe_layers * touched * shape.expert_params * weight
        active = shape.moe_layers * shape.experts_per_token * shape.expert_params
        kv_bytes = decodes * self._entry_bytes(context) if decodes else 0.0
        attention = decodes * shape.attention_flops(int(context)) if decodes else 0.0
        if prefill_tokens:
            kv_bytes += self._entry_bytes(prefill_start + prefill_tokens)
            # The middle token stands for the chunk: exact where the cost is linear in context.
            middle = int(prefill_start + (prefill_tokens + 1) / 2)
            attention += prefill_tokens * shape.attention_flops(middle)
        head = shape.head_params if samples else 0
        parts = {
            "weights": self.part(shape.token_params * weight, 2 * shape.token_params * tokens),
            "experts": self.part(expert_bytes, 2 * active * tokens),
            "attention": self.part(kv_bytes, attention),
            "head": self.part(head * weight, 2 * head * samples),
        }
        return StepFloor({name: part for name, part in parts.items() if part.seconds})

    def predict(
        self,
        workload: Workload,
        scheduler: SchedulerConfig,
        *,
        step_overhead_s: float = 0.0,
        kv_tokens: float = math.inf,
    ) -> Prediction:
        """The steady state of a workload. Arguments as `steady_state`."""
        return steady_state(
            self, workload, scheduler, step_overhead_s=step_overhead_s, kv_tokens=kv_tokens
        )

    def part(self, nbytes: float, flops: float) -> Part:
        """A part of a step by its bytes and operations."""
        seconds = max(
            nbytes / self.ceilings.read_bytes_per_s, flops / self.ceilings.matmul(self.dtype)
        )
        return Part(nbytes, flops, seconds)

    def _entry_bytes(self, context: float) -> float:
        """KV bytes that one decode token reads at a context."""
        size = {s.name: s.heads * s.entry.nbytes(self.kv_dtype) for s in self.cache.paged}
        for ring in self.cache.rings:
            size[ring.name] = ring.entry.nbytes(self.kv_dtype) if ring.entry else ring.width * 4
        entries = self.shape.attention_entries(int(context))
        return sum(count * size[name] for name, count in entries.items())


def steady_state(
    floors: Floors,
    workload: Workload,
    scheduler: SchedulerConfig,
    *,
    step_overhead_s: float = 0.0,
    kv_tokens: float = math.inf,
) -> Prediction:
    """The steady state of a workload.

    Each running request passes through its prefill chunks and then makes a token a step;
    chunks share what the decodes leave of the token budget. That gives the requests that end
    in a step, hence their rate; Little's law (requests in flight = rate x time in system)
    gives the time to first token, queueing included.

    Args:
        floors: of steps.
        workload: its mean lengths and its concurrency or rate are used.
        scheduler: batch and token budget.
        step_overhead_s: time of a step that is not on the roofline (launches, scheduling).
        kv_tokens: tokens that the KV pool holds.
    """
    rows = workload.shapes()
    isl = sum(row.isl for row in rows) / len(rows)
    osl = sum(row.osl for row in rows) / len(rows)
    flow = _Flow(floors, isl, osl, scheduler.token_budget, step_overhead_s)
    slots = max(1.0, min(scheduler.max_batch, kv_tokens / (isl + osl)))
    if workload.concurrency is not None:
        running = min(slots, workload.concurrency)
        in_system = float(workload.concurrency)
        rate, step_s = flow.at(running)
    else:
        span = rows[-1].arrival_s
        asked = workload.rate or (len(rows) / span if span > 0 else math.inf)
        running = _least(lambda batch: flow.at(batch)[0] - asked, slots)
        rate, step_s = flow.at(running)
        in_system = running if rate >= asked * (1 - 1e-6) else math.inf
    return Prediction(
        ttft_s=max(in_system / rate - (osl - 1) * step_s, step_s),
        tpot_s=step_s,
        step_s=step_s,
        requests_per_s=rate,
        output_tokens_per_s=rate * osl,
        running=running,
    )


@dataclass(frozen=True, slots=True)
class _Flow:
    """Requests streaming through steps of a fixed token budget."""

    floors: Floors
    isl: float
    osl: float
    budget: int
    overhead_s: float

    def at(self, running: float) -> tuple[float, float]:
        """(requests/s, mean step seconds) with that many requests in the batch."""
        decode_steps = self.osl - 1  # the last prefill chunk gives the first token

        def surplus(ended: float) -> float:
            left = self.budget - ended * decode_steps
            steps = max(1.0, self.isl / left if left > 0 else math.inf) + decode_steps
            return ended * steps - running

        most = self.budget / (self.isl + decode_steps)  # requests that the budget lets end a step
        ended = _least(surplus, most)
        decodes = min(ended * decode_steps, self.budget - ended * self.isl)
        chunk = max(1.0, min(self.isl, self.budget - decodes))
        share = min(1.0, ended * self.isl / chunk)  # of steps that hold a chunk
        context = self.isl + self.osl / 2
        with_chunk = self.floors.step_floor(
            decodes=decodes,
            context=context,
            prefill_tokens=ended * self.isl / share,
            prefill_start=max(0.0, (self.isl - chunk) / 2),
        )
        without = self.floors.step_floor(decodes=decodes, context=context)
        step_s = share * with_chunk.seconds + (1 - share) * without.seconds + self.overhead_s
        return ended / step_s, step_s


def _least(surplus: Callable[[float], float], most: float) -> float:
    """Where an increasing function reaches zero in (0, most]; `most` if it does not."""
    if surplus(most) <= 0:
        return most
    low, high = 0.0, most
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if surplus(middle) < 0:
            low = middle
        else:
            high = middle
    return high
