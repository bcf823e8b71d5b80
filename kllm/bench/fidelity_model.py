"""What a run of a layout would show by the cost model, with the values of a run.

Steps take their floors (`kllm.bench.layout_cost`): launches, sampling and scheduling are not in
them. Fidelity: modelled.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kllm.bench.costmodel import CostModel
from kllm.bench.fidelity_sides import GIB, MEMORY, FidelityLoad
from kllm.bench.layout_cost import LayoutCost
from kllm.config import ParallelConfig
from kllm.hardware import Ceilings
from kllm.models.load import ResolvedModel
from kllm.models.shape import model_shape
from kllm.parallel.footprint import ModelShape, footprint
from kllm.parallel.link import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutModel:
    """Predicts the steps and runs of a layout on devices with these ceilings."""

    resolved: ResolvedModel
    layout: ParallelConfig
    ceilings: Ceilings
    link: Link

    def decode_s(self, batch: int, context: int) -> float:
        """A step in which each of a group's `batch` requests makes one token."""
        return self._cost().step_floor(decodes=batch, context=context).seconds

    def prefill_s(self, tokens: int, cached: int) -> float:
        """A step with `tokens` of a group's prompt behind `cached` ones."""
        return self._cost().step_floor(prefill_tokens=tokens, prefill_start=cached).seconds

    def _cost(self) -> LayoutCost:
        return LayoutCost(
            cost=CostModel.of(self.resolved, self.ceilings),
            shape=self._shape(),
            layout=self.layout,
            link=self.link,
        )

    def _shape(self) -> ModelShape:
        return model_shape(self.resolved.family, self.resolved.config)

    def memory_bytes(self, pool_tokens: int, requests: int) -> float:
        """Weights and KV of a rank of the last stage; activations are not modelled."""
        resolved = self.resolved
        rank = footprint(
            self._shape(),
            self.layout,
            dtype=resolved.dtype,
            kv_dtype=resolved.kv_dtype,
        )[-1]
        return (
            rank.weight_bytes
            + rank.kv_bytes_per_token * pool_tokens
            + rank.state_bytes_per_request * requests
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
            "decode_rank_ms": decode_s * 1e3,  # the engine's own time is not modelled
            "ttft_ms": all_prompts_s * (batch + 1) / (2 * batch) * 1e3,
            "tpot_ms": (decode_s + waits_s / (load.osl - 1)) * 1e3,
            "output_tokens_per_s": load.requests * load.osl / total_s,
            MEMORY: self.memory_bytes(pool_tokens, batch) / GIB,
        }
