"""The engine: requests in, tokens out, one step at a time.

`add` queues a request, `step` runs one plan of the scheduler on the executor and hands out the
new tokens, `abort` ends a request wherever it stands. Everything happens in the caller's
thread; nothing here prints, and timing is returned with each step.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from kllm import env
from kllm.config import EngineConfig
from kllm.core import FinishReason, Outcome, Plan, Request, SamplingParams, Status, TokenLogprobs
from kllm.engine.cp_kind import with_cp_kind
from kllm.engine.detokenizer import Detokenizer, TokenTable
from kllm.engine.executor import Executor, InProcessExecutor
from kllm.engine.multi_rank import MultiRankExecutor
from kllm.engine.rank_pool import RankPool
from kllm.engine.sliced import SlicedExecutor
from kllm.errors import ConfigError
from kllm.models.base import CausalLM
from kllm.models.load import ResolvedModel, resolve
from kllm.models.shape import model_shape
from kllm.models.tokenizer import Tokenizer, load_tokenizer
from kllm.parallel.expert_counts import MeasuredRouting
from kllm.parallel.layout import check
from kllm.scheduler.placement import least_loaded
from kllm.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step in numbers. Times are host seconds; `execute_s` includes waiting for the device."""

    num_tokens: int = 0
    num_decodes: int = 0  # requests that ran a single token
    schedule_s: float = 0.0  # choosing and building the plan
    execute_s: float = 0.0
    run_s: float = 0.0  # of that: the slowest rank's, from its plan to its tokens
    output_s: float = 0.0  # advancing requests, detokenising


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gave, in columns: token i belongs to request i."""

    requests: Sequence[Request] = ()
    token_ids: Sequence[int] = ()
    finished: Sequence[Request] = ()  # a request's status and finish_reason say how it ended
    stats: StepStats = field(default_factory=StepStats)


class Engine:
    """One deployment of a model.

    Args:
        config: what to run.
        model: the network, if the caller has loaded it already; it is not freed by `close`.
        executor: who runs the plans; by default one rank in this process, or all ranks of a
            layout in processes of their own.
        ranks: processes to use for a layout of several ranks; by default they are started.
        clock: seconds, for arrival times.

    `placement` chooses the request-DP group of each request that is added.

    Raises:
        ConfigError, CapacityError, DataError, DependencyError: when it cannot be set up.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: CausalLM | None = None,
        executor: Executor | None = None,
        ranks: RankPool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.resolved = resolve(config)
        if config.parallel.world > 1:
            check(model_shape(self.resolved.family, self.resolved.config).dims, config.parallel)
        if config.expert_placement:  # every rank reads it; what is wrong is said before they start
            routing = MeasuredRouting.read(Path(config.expert_placement))
            routing.check(self.resolved.name, self.resolved.scale)
        self.config = config = with_cp_kind(config, self.resolved)
        self.vocab_size: int = self.resolved.config.vocab_size
        self._tokenizer: Tokenizer | None = None
        self._executor = executor or _make_executor(config, self.resolved, model, ranks)
        sharing = self._executor.sharing
        self.budget = sharing.budget
        try:
            self._schedulers = [
                Scheduler(
                    config.scheduler,
                    num_pages=self.budget.num_pages,
                    page_size=self.budget.page_size,
                    max_model_len=self.budget.max_model_len,
                    eos_token_ids=self.resolved.config.eos_token_ids,
                    stripes=sharing.stripes,
                    sharded=sharing.cp_kind != "replicated",
                )
                for _ in range(sharing.groups)
            ]
        except ConfigError:
            self._executor.close()
            raise
        self.placement: Callable[[Sequence[Scheduler]], int] = least_loaded
        self._clock = clock
        self._requests: dict[str, Request] = {}  # unfinished
        self._homes: dict[str, Scheduler] = {}  # of unfinished requests
        self._detokenizers: dict[str, Detokenizer] = {}
        self._count = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ConfigError: when the model has none (random weights of a preset).
        """
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.resolved)
        if self._tokenizer is None:
            raise ConfigError(
                f"{self.resolved.display_name} has no tokenizer; give token ids instead of text"
            )
        return self._tokenizer

    @cached_property
    def _token_bytes(self) -> TokenTable:
        return TokenTable(self.tokenizer.token_bytes)

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        """Requests that hold KV."""
        return sum(scheduler.num_running for scheduler in self._schedulers)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission."""
        return sum(len(scheduler.waiting) for scheduler in self._schedulers)

    @property
    def free_pages(self) -> int:
        """KV pages that no request holds, on all ranks."""
        return sum(scheduler.free_pages for scheduler in self._schedulers)

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        arrival_s: float | None = None,
        detokenize: bool = False,
    ) -> Request:
        """Queue a request.

        Args:
            prompt_ids: token ids below the vocabulary size.
            priority: lower runs first, and takes the seat of a higher one when all are full.
            arrival_s: on the engine's clock; now by default.
            detokenize: keep the request's text; done in any case when it has stop strings.

        Raises:
            ConfigError: an empty or too long prompt, ids outside the vocabulary, an id in use,
                stop strings without a tokenizer.
        """
        ids = np.asarray(prompt_ids, np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise ConfigError(
                f"token ids must be in 0..{self.vocab_size - 1}; the prompt has "
                f"{ids.min()}..{ids.max()}"
            )
        if request_id is None:
            request_id = f"request-{self._count}"
        if request_id in self._requests:
            raise ConfigError(f"request id '{request_id}' is in use; choose another")
        request = Request(
            id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            arrival_s=self._clock() if arrival_s is None else arrival_s,
            priority=priority,
        )
        reader = None
        if detokenize or params.stop:
            reader = Detokenizer(self._token_bytes.__getitem__, params.stop)
        home = self._schedulers[self.placement(self._schedulers)]
        home.add(request)
        self._count += 1
        self._requests[request_id], self._homes[request_id] = request, home
        if reader:
            self._detokenizers[request_id] = reader
        return request

    def abort(self, request_id: str) -> Request | None:
        """End a request now and free what it holds; None if it has ended already."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._detokenizers.pop(request_id, None)
            self._homes.pop(request_id).abort(request)
        return request

    def step(self) -> StepOutput:
        """Run one step; empty when nothing waits or runs.

        Raises:
            torch.OutOfMemoryError: when the device runs out of memory; the requests are kept.
        """
        begin = time.perf_counter()
        plans = [scheduler.schedule() for scheduler in self._schedulers]
        if not any(plans):
            return StepOutput()
        planned = time.perf_counter()
        outcomes = self._executor.execute(plans)
        executed = time.perf_counter()
        requests: list[Request] = []
        token_ids: list[int] = []
        finished: list[Request] = []
        num_tokens = num_decodes = 0
        for scheduler, plan, outcome in zip(self._schedulers, plans, outcomes, strict=True):
            if plan is not None and outcome is not None:
                requests += self._advance(scheduler, plan, outcome, finished)
                token_ids += outcome.token_ids.tolist()
                num_tokens += plan.num_tokens
                num_decodes += plan.num_decodes
            if env.debug():
                scheduler.check()
        return StepOutput(
            requests=requests,
            token_ids=token_ids,
            finished=finished,
            stats=StepStats(
                num_tokens=num_tokens,
                num_decodes=num_decodes,
                schedule_s=planned - begin,
                execute_s=executed - planned,
                run_s=self._executor.run_s,
                output_s=time.perf_counter() - executed,
            ),
        )

    def stream(self, request: Request) -> Iterator[str]:
        """Step until `request`, added with `detokenize`, has ended; its text piece by piece.

        Closing the iterator early aborts the request. Others make progress meanwhile.
        """
        sent = 0
        try:
            while request.status is not Status.FINISHED:
                self.step()
                if len(request.text) > sent:
                    yield request.text[sent:]
                    sent = len(request.text)
        finally:
            self.abort(request.id)

    def close(self) -> None:
        """Abort every request and give the memory back."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._executor.close()

    def _advance(
        self, scheduler: Scheduler, plan: Plan, outcome: Outcome, ended: list[Request]
    ) -> Sequence[Request]:
        """Give a group's requests their tokens; those that end join `ended`."""
        finished = scheduler.update(plan, outcome.token_ids)
        requests = plan.sampled
        if outcome.logprobs is not None:
            for request, logprobs in zip(requests, outcome.logprobs, strict=True):
                _keep(request, logprobs)
        if self._detokenizers:
            self._read(scheduler, requests, finished)
        for request in requests:
            # Rare: most requests end at the model's own tokens, which the scheduler knows.
            stops = request.params.stop_token_ids
            if stops and request.status is Status.RUNNING and request.output_ids[-1] in stops:
                scheduler.finish(request, FinishReason.STOP)
                finished.append(request)
        for request in finished:
            del self._requests[request.id], self._homes[request.id]
            if (reader := self._detokenizers.pop(request.id, None)) and not reader.stopped:
                request.text += reader.finish()
        ended += finished
        return requests

    def _read(
        self, scheduler: Scheduler, requests: Sequence[Request], finished: list[Request]
    ) -> None:
        """Detokenise the step's tokens; end requests at their stop strings."""
        for request in requests:
            reader = self._detokenizers.get(request.id)
            if reader is None or _is_stop_token(request):
                continue
            request.text += reader.push(request.output_ids[-1:])
            if not reader.stopped:
                continue
            del request.output_ids[reader.kept_tokens :]
            del request.logprobs[reader.kept_tokens :]
            if request.status is Status.RUNNING:
                scheduler.finish(request, FinishReason.STOP)
                finished.append(request)
            request.finish_reason = FinishReason.STOP


def _make_executor(
    config: EngineConfig,
    resolved: ResolvedModel,
    model: CausalLM | None,
    ranks: RankPool | None,
) -> Executor:
    if config.parallel.world == 1:
        return InProcessExecutor(config, resolved, model)
    if config.fidelity == "rank-slice":
        return SlicedExecutor(config, resolved, model)
    return MultiRankExecutor(config, resolved, ranks)


def _is_stop_token(request: Request) -> bool:
    """Whether the newest token only says that the output has ended: it has no text."""
    ended_by_model = request.finish_reason is FinishReason.STOP
    return ended_by_model or request.output_ids[-1] in request.params.stop_token_ids


def _keep(request: Request, logprobs: TokenLogprobs | None) -> None:
    if logprobs is not None:
        request.logprobs.append(logprobs)
