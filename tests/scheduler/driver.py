"""Drives a scheduler without a model: the 'model' echoes a function of the known tokens."""

import numpy as np
from numpy.typing import NDArray

from kllm.config import SchedulerConfig
from kllm.core import Plan, Request, SamplingParams, Status
from kllm.scheduler.scheduler import Scheduler


def next_token(tokens: list[int]) -> int:
    """Depends on every token before it, so a lost or doubled one changes all that follow."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 9973
    return value


class Driver:
    """Keeps what a KV cache would hold, page by page, and computes tokens from that alone."""

    def __init__(
        self,
        num_pages: int = 64,
        page_size: int = 4,
        max_batch: int = 4,
        token_budget: int = 16,
        eos: tuple[int, ...] = (),
    ) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(max_batch=max_batch, token_budget=token_budget),
            num_pages=num_pages,
            page_size=page_size,
            max_model_len=num_pages * page_size,
            eos_token_ids=eos,
        )
        self.page_size = page_size
        self.cells: NDArray[np.int64] = np.full(num_pages * page_size, -1, np.int64)
        self.count = 0
        self.plans: list[Plan] = []

    def add(self, prompt: list[int], max_tokens: int, priority: int = 0) -> Request:
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        request = Request(f"r{self.count}", prompt, params, priority=priority)
        self.count += 1
        self.scheduler.add(request)
        return request

    def step(self) -> list[Request]:
        """One step; the requests that finished in it."""
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        self.plans.append(plan)
        self.scheduler.check()
        budget = self.scheduler.config.token_budget
        assert plan.num_tokens <= budget
        prompts = self.scheduler.prefilling
        assert not prompts or prompts[0] in plan.requests, "the first prompt always goes on"
        tokens = self._execute(plan)
        finished = self.scheduler.update(plan, np.array(tokens, np.int64))
        self.scheduler.check()
        assert plan.num_tokens == budget or not self.scheduler.prefilling, "tokens left unused"
        return finished

    def run(self, limit: int = 10_000) -> None:
        """Step until nothing is left."""
        while self.scheduler.waiting or self.scheduler.num_running:
            self.step()
            limit -= 1
            assert limit > 0, "no end in sight"

    def _execute(self, plan: Plan) -> list[int]:
        start, tokens = 0, []
        for b, length in enumerate(plan.query_lens.tolist()):
            positions = plan.positions[start : start + length]
            context = int(plan.context_lens[b])
            assert positions.tolist() == list(range(context - length, context))
            table = plan.block_tables[b]
            slots = table[positions // self.page_size] * self.page_size
            self.cells[slots + positions % self.page_size] = plan.token_ids[start : start + length]
            if plan.samples[b]:
                past = np.arange(context)
                cells = table[past // self.page_size] * self.page_size + past % self.page_size
                tokens.append(next_token(self.cells[cells].tolist()))
            start += length
        return tokens


def expected(prompt: list[int], max_tokens: int, room: int) -> list[int]:
    """What one request alone gives, computed the slow way."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, room):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def finished(request: Request) -> bool:
    return request.status is Status.FINISHED
