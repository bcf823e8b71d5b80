"""A layout's steps by the cost model: a rank's share of the work, and its transfers.

Work is the roofline floor of what the rank runs (`CostModel`), transfers are those of
`kllm.parallel.traffic` on the same link as the slice's. A ring's transfers hide behind attention,
all others are added. Launches, sampling and scheduling are not in it. Fidelity: modelled.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kllm.bench.costmodel import CostModel
from kllm.bench.fidelity_sides import GIB, MEMORY, FidelityLoad
from kllm.config import ParallelConfig
from kllm.hardware import Ceilings
from kllm.models.load import ResolvedModel
from kllm.models.shape import model_shape
from kllm.parallel.footprint import footprint
from kllm.parallel.link import Link
from kllm.parallel.traffic import Step, busiest, traffic
from kllm.quant.entry import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutModel:
    """Predicts the steps of a layout."""

    resolved: ResolvedModel
    layout: ParallelConfig
    ceilings: Ceilings
    link: Link

    def decode_s(self, batch: int, context: int) -> float:
        """A step in which each of a group's `batch` requests makes one token."""
        step = Step.decode(batch, context)
        return self.layout.pp * self._stage_s(step)

    def prefill_s(self, tokens: int, cached: int) -> float:
        """A step with `tokens` of a group's prompt behind `cached` ones."""
        pp = self.layout.pp
        if pp == 1:
            return self._stage_s(Step.chunk(tokens, cached))
        # The stages work on micro-batches, and the pipeline fills and drains once.
        part = self._stage_s(Step.chunk(max(1, tokens // pp), cached))
        return (2 * pp - 1) * part

    def _stage_s(self, step: Step) -> float:
        layout, resolved = self.layout, self.resolved
        cost = CostModel.of(resolved, self.ceilings)
        rows = step.tokens / layout.cp
        if step.prefill:
            whole = cost.step_floor(
                prefill_tokens=rows,
                # The rows of a rank are spread over the chunk: their middle is the chunk's.
                prefill_start=step.cached + (step.tokens - rows) / 2,
            )
        else:
            whole = cost.step_floor(decodes=rows, context=step.cached)
        seconds = {
            name: self._bound(part.nbytes, part.flops, layout.tp)
            for name, part in whole.parts.items()
        }
        # Entries of attention are not cut unless by heads; its work is.
        if "attention" in seconds:
            part = whole.parts["attention"]
            seconds["attention"] = self._bound(part.nbytes * layout.tp, part.flops, layout.tp)
        if "experts" in seconds and layout.ep > 1:
            together = cost.step_floor(decodes=rows * layout.ep / layout.tp).parts["experts"]
            seconds["experts"] = self._bound(together.nbytes, together.flops, layout.ep)
        seconds = {name: value / layout.pp for name, value in seconds.items()}
        shape = model_shape(resolved.family, resolved.config)
        exchanges = busiest(
            traffic(
                shape,
                layout,
                step,
                element_bytes=DTYPE_BYTES[resolved.dtype],
                kv_dtype=resolved.kv_dtype,
            ),
            self.link,
        )
        hops = sum(e.seconds(self.link) for e in exchanges if e.collective == "ring_shift")
        others = sum(e.seconds(self.link) for e in exchanges if e.collective != "ring_shift")
        attention = seconds.pop("attention", 0.0)
        return sum(seconds.values()) + max(attention, hops) + others

    def _bound(self, nbytes: float, flops: float, ways: int) -> float:
        rate = self.ceilings.matmul(self.resolved.dtype)
        return max(nbytes / self.ceilings.read_bytes_per_s, flops / rate) / ways

    def memory_bytes(self, pool_tokens: int, requests: int) -> float:
        """Weights and KV of rank 0; activations are not modelled."""
        resolved = self.resolved
        first = footprint(
            model_shape(resolved.family, resolved.config),
            self.layout,
            dtype=resolved.dtype,
            kv_dtype=resolved.kv_dtype,
        )[0]
        return (
            first.weight_bytes
            + first.kv_bytes_per_token * pool_tokens
            + first.state_bytes_per_request * requests
        )

    def values(
        self, load: FidelityLoad, token_budget: int, pool_tokens: int
    ) -> Mapping[str, float]:
        """What a run of the load would show, by the names of `fidelity_sides.UNITS`.

        The group's requests come at once: the prompts run one after the other in chunks, so that
        the i-th has its first token after i / n of the prefill steps; decodes follow.
        """
        batch = load.requests // self.layout.dp
        prompts = batch * load.isl
        steps = math.ceil(prompts / token_budget)
        chunk = min(load.isl, token_budget)
        at_once = max(1.0, min(prompts, token_budget) / chunk)  # prompts that share a step
        prefill_s = at_once * self.prefill_s(chunk, (load.isl - chunk) // 2)
        decode_s = self.decode_s(batch, load.isl + load.osl // 2)
        all_prompts_s = steps * prefill_s
        total_s = all_prompts_s + (load.osl - 1) * decode_s
        # Those that are done early wait for the prompts behind them.
        waits_s = all_prompts_s * (1 - (batch + 1) / (2 * batch))
        return {
            "prefill_step_ms": prefill_s * 1e3,
            "decode_step_ms": decode_s * 1e3,
            "ttft_ms": all_prompts_s * (batch + 1) / (2 * batch) * 1e3,
            "tpot_ms": (decode_s + waits_s / (load.osl - 1)) * 1e3,
            "output_tokens_per_s": load.requests * load.osl / total_s,
            MEMORY: self.memory_bytes(pool_tokens, batch) / GIB,
        }
