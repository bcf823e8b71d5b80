"""The cost model of a layout: a rank's share of a step's floor, and its transfers.

Weights and work are cut as the layout cuts them. Transfers take their time on the link
(`kllm.parallel.traffic`); those of a ring hide behind attention, all others are added. The stages
of a pipeline work one after the other, prompts in as many micro-batches as there are stages.
Fidelity: modelled.
"""

from dataclasses import dataclass
from math import ceil

from kllm.bench.costmodel import CostModel, Part, StepFloor
from kllm.config import ParallelConfig
from kllm.parallel.footprint import ModelShape
from kllm.parallel.link import Link
from kllm.parallel.traffic import Step, busiest, traffic
from kllm.quant.entry import DTYPE_BYTES

TRANSFERS = "transfers"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCost:
    """Floors of the steps of one request-DP group in a layout.

    Args:
        cost: of the model on one rank.
        shape: the same model as the layout algebra sees it.
        link: between the ranks; None: not known, transfers are left out.
    """

    cost: CostModel
    shape: ModelShape
    layout: ParallelConfig
    link: Link | None

    def step_floor(
        self,
        *,
        decodes: float = 0,
        context: float = 0,
        prefill_tokens: float = 0,
        prefill_start: float = 0,
    ) -> StepFloor:
        """Floor of a mixed step of a group. Arguments as `CostModel.step_floor`."""
        pp = self.layout.pp
        # A pipeline fills and drains once with a step's micro-batches; decodes make a single one.
        micro = pp if prefill_tokens else 1
        stage = self._stage(decodes / micro, context, prefill_tokens / micro, prefill_start)
        rounds = micro + pp - 1
        return StepFloor(
            {
                name: Part(part.nbytes * micro, part.flops * micro, part.seconds * rounds)
                for name, part in stage.items()
            }
        )

    def _stage(
        self, decodes: float, context: float, prefill: float, start: float
    ) -> dict[str, Part]:
        """Parts of the floor of one stage's work on one micro-batch."""
        layout, cost = self.layout, self.cost
        tp, ep = layout.tp, layout.ep
        rows, ours = prefill / layout.cp, decodes / layout.cp
        whole = cost.step_floor(
            decodes=ours,
            context=context,
            prefill_tokens=rows,
            # The rows of a rank are spread over the chunk: their middle is the chunk's.
            prefill_start=start + (prefill - rows) / 2,
        )
        parts = dict(whole.parts)
        if "experts" in parts and ep > 1:
            # The ranks of a group hold the experts together, and their tokens meet there.
            together = cost.step_floor(decodes=(rows + ours) * ep / tp).parts["experts"]
            parts["experts"] = _cut(cost, together, ep, ep)
        elif "experts" in parts:
            parts["experts"] = _cut(cost, parts["experts"], tp, tp)
        for name in ("weights", "head"):
            if name in parts:
                parts[name] = _cut(cost, parts[name], tp, tp)
        if "attention" in parts:
            heads_cut = all(state.split for state in self.shape.token_states)
            parts["attention"] = _cut(cost, parts["attention"], tp if heads_cut else 1, tp)
        found = {
            name: Part(p.nbytes / layout.pp, p.flops / layout.pp, p.seconds / layout.pp)
            for name, p in parts.items()
        }
        exposed = self._transfers(decodes, context, prefill, start, found.get("attention"))
        return found if exposed is None else found | {TRANSFERS: exposed}

    def _transfers(
        self, decodes: float, context: float, prefill: float, start: float, beside: Part | None
    ) -> Part | None:
        """Bytes that a rank sends, with the time for which nothing hides them."""
        if self.link is None or self.layout.world == 1:
            return None
        step = Step(
            tokens=max(1, ceil(decodes + prefill)),
            cached=int(start if prefill else context),
            samples=max(1, ceil(decodes)),
            prefill=prefill > 0,
        )
        stages = traffic(
            self.shape,
            self.layout,
            step,
            element_bytes=DTYPE_BYTES[self.cost.dtype],
            kv_dtype=self.cost.kv_dtype,
        )
        exchanges = busiest(stages, self.link)
        hops = sum(e.seconds(self.link) for e in exchanges if e.collective == "ring_shift")
        others = sum(e.seconds(self.link) for e in exchanges if e.collective != "ring_shift")
        hidden = beside.seconds if beside else 0.0
        sent = sum(e.sent_bytes for e in exchanges)
        return Part(sent, 0.0, others + max(0.0, hops - hidden))


def _cut(cost: CostModel, part: Part, bytes_ways: int, flops_ways: int) -> Part:
    return cost.part(part.nbytes / bytes_ways, part.flops / flops_ways)
