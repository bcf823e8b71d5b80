"""An engine whose pipeline stages run in this process, one after the other, on one device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kllm.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from kllm.core import Outcome, Plan, SamplingParams
from kllm.engine.engine import Engine
from kllm.engine.executor import sharing_of
from kllm.engine.multi_rank import smallest
from kllm.engine.rank import Rank
from kllm.engine.step import merge, steps_of
from kllm.models.base import Groups
from kllm.models.load import resolve
from kllm.parallel.single import SingleComm
from tests.engine.graph_cases import RerunGraphs
from tests.parallel.relay import relays

LENGTHS = (5, 90, 33, 1, 18)  # tokens of the prompts


@dataclass(frozen=True)
class GreedyAnswers:
    """Greedy tokens of each request, and the log probability of each token."""

    tokens: list[list[int]]
    logprobs: list[torch.Tensor]

    def difference(self, other: "GreedyAnswers") -> float:
        """Largest difference of a log probability of the same tokens."""
        assert self.tokens == other.tokens
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max(float((a - b).abs().max()) for a, b in pairs)


class RelayedExecutor:
    """The ranks of a layout of pipeline stages alone. On a CPU graphs are reruns."""

    def __init__(self, config: EngineConfig) -> None:
        one, resolved = SingleComm(), resolve(config)
        self.layout, device = config.parallel, torch.device(resolved.device)
        self.ranks = [
            Rank(config, resolved, Groups(one, one, one, one, one, comm), number=i, device=device)
            for i, comm in enumerate(relays(self.layout.pp))
        ]
        budget = smallest([rank.budget for rank in self.ranks])
        self.sharing, self.run_s = sharing_of(config, budget), 0.0
        for rank in self.ranks:
            rank.allocate(budget, None, "")
            if config.graphs and device.type == "cpu":
                rank._graphs = RerunGraphs(
                    rank.model,
                    rank.pool,
                    scratch_page=budget.num_pages,
                    scratch_row=budget.max_batch,
                    max_pages=-(-budget.max_model_len // budget.page_size),
                )

    def execute(self, plans: Sequence[Plan | None]) -> list[Outcome | None]:
        (plan,) = plans
        assert plan is not None
        (micro,) = steps_of(plans, self.layout, None)
        outcomes = [rank.run(micro, plan.sampled) for rank in self.ranks]
        assert not any(len(outcome.token_ids) for outcome in outcomes[:-1])
        return [merge(outcomes[-1:], len(plan.sampled))]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def staged_config(preset: str, device: str, pp: int, *, graphs: bool) -> EngineConfig:
    """A tiny model in float32, cut into stages."""
    return EngineConfig(
        model=preset,
        scale="tiny",
        load="random",
        device=device,
        dtype="float32",
        graphs=graphs,
        parallel=ParallelConfig(pp=pp),
        cache=CacheConfig(memory_bytes=64 << 20),
        scheduler=SchedulerConfig(max_batch=4, token_budget=64),
        max_model_len=512,
    )


def one_rank_eager(preset: str, device: str) -> GreedyAnswers:
    """What the same model answers without stages and graphs."""
    engine = Engine(staged_config(preset, device, 1, graphs=False))
    try:
        return serve(engine)
    finally:
        engine.close()


def check_relayed_stages(preset: str, device: str, pp: int, atol: float) -> None:
    """Stages that replay their decode steps answer like one rank that runs them as they are."""
    config = staged_config(preset, device, pp, graphs=True)
    executor = RelayedExecutor(config)
    engine = Engine(config, executor=executor)
    try:
        found = serve(engine)
        for rank in executor.ranks:
            assert rank._graphs is not None
            assert len(rank._graphs._captured) == 4, "batches of 1 to 4"
    finally:
        engine.close()
    assert found.difference(one_rank_eager(preset, device)) <= atol


def serve(engine: Engine) -> GreedyAnswers:
    """Requests that start and end at different steps."""
    generator = torch.Generator().manual_seed(3)
    params = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0)
    requests = [
        engine.add(
            torch.randint(3, 90, (length,), generator=generator).tolist(),
            replace(params, max_tokens=8 + 5 * i),
        )
        for i, length in enumerate(LENGTHS)
    ]
    while engine.has_work:
        engine.step()
    logprobs = [torch.tensor([entry.logprob for entry in r.logprobs]) for r in requests]
    return GreedyAnswers([request.output_ids for request in requests], logprobs)
