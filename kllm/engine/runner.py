"""Runs one plan on one rank: tensors, forward pass, logits of the sampled rows, tokens."""

import numpy as np
import torch

from kllm.attention.context import ForwardContext
from kllm.cache.pool import KVPool
from kllm.core import Outcome, Plan
from kllm.engine.graphs import DecodeGraphs
from kllm.models.base import CausalLM
from kllm.sampling.sampler import Sampler


class ModelRunner:
    """A network with its KV pool and sampler.

    Args:
        graphs: captured decode steps; None runs every step kernel by kernel.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        sampler: Sampler,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.sampler = sampler
        self.device = device
        self.graphs = graphs

    @torch.inference_mode()
    def run(self, plan: Plan) -> Outcome:
        """Run the plan's tokens; sample one token for each request with `plan.samples`."""
        requests = plan.requests
        everyone = bool(plan.samples.all())
        if not everyone:
            requests = tuple(r for r, yes in zip(requests, plan.samples, strict=True) if yes)
        logits = self.graphs.run(plan) if self.graphs and everyone else None
        if logits is None:
            ctx = ForwardContext.from_plan(plan, self.pool, self.device)
            self.model.prepare(ctx)
            state = self.model(ctx)
            if not requests:
                return Outcome(np.zeros(0, np.int64))
            if plan.num_tokens > len(requests):
                last = np.cumsum(plan.query_lens, dtype=np.int64)[plan.samples] - 1
                state = state[torch.from_numpy(last).to(self.device)]
            logits = self.model.logits(state)
        tokens, logprobs = self.sampler(logits, requests)
        return Outcome(tokens.cpu().numpy(), logprobs)
