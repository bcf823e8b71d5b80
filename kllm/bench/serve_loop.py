"""Runs a workload on an engine in this process and records what each request saw.

The loop adds requests when they are due, steps the engine, and stamps tokens when the step that
made them returns: what a client would see without HTTP and detokenisation in between. Requests
and samples are kept as they come, so a run that is stopped or runs out of memory keeps its data.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kllm.bench.timing import out_of_memory
from kllm.bench.workloads import WorkItem, Workload
from kllm.core import Request, SamplingParams

LONGEST_SLEEP_S = 3600.0  # at once: clocks refuse to sleep for ages


class StepCounts(Protocol):
    """What the loop reads of an engine's step statistics."""

    @property
    def num_tokens(self) -> int:
        """Tokens that ran."""

    @property
    def num_decodes(self) -> int:
        """Requests that ran a single token."""

    @property
    def run_s(self) -> float:
        """Of the step, the time of the slowest rank."""


class StepResult(Protocol):
    """What the loop reads of an engine's step."""

    @property
    def requests(self) -> Sequence[Request]:
        """The request of each new token."""

    @property
    def finished(self) -> Sequence[Request]:
        """Requests that ended in this step."""

    @property
    def stats(self) -> StepCounts:
        """Counts of the step."""


class ServingEngine(Protocol):
    """The part of `kllm.engine.engine.Engine` that benches need."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""

    @property
    def num_running(self) -> int:
        """Requests that hold KV."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission."""

    def add(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, arrival_s: float | None = None
    ) -> Request:
        """Queue a request."""

    def step(self) -> StepResult:
        """Run one step."""

    def abort(self, request_id: str) -> object:
        """End a request now."""

    def close(self) -> None:
        """Free what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """What one finished request saw. Times are from the start of the run."""

    arrival_s: float
    isl: int  # prompt tokens
    osl: int  # output tokens it got
    ttft_s: float  # arrival to first token
    tpot_s: float | None  # (last - first token) / (osl - 1); None for a single token
    e2e_s: float  # arrival to last token
    finish: str  # a FinishReason
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One step: how long, what ran, and who waited behind it."""

    end_s: float  # from the start of the run
    duration_s: float
    run_s: float  # of that, the slowest rank's
    num_tokens: int
    num_decodes: int
    running: int  # after the step
    waiting: int
    finished: int  # requests that ended, in total


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What an observer is told after each step."""

    sample: StepSample
    finished: Sequence[RequestRow]  # requests that ended in this step
    num_requests: int  # of the whole workload
    first_tokens: Sequence[float] = ()  # TTFT (s) of requests whose first token came in this step


Observer = Callable[[Progress], str | None]


@dataclass(slots=True, kw_only=True)
class WorkloadRun:
    """Everything that was seen, also when the run did not reach its end."""

    workload: Workload
    rows: list[RequestRow] = field(default_factory=list)
    steps: list[StepSample] = field(default_factory=list)
    duration_s: float = 0.0  # start to the last token
    stopped: str = ""  # the observer's reason to stop early
    failure: str = ""  # why the engine could not go on

    @property
    def complete(self) -> bool:
        """Whether every request ran to its end."""
        return not self.stopped and not self.failure and len(self.rows) == self.num_requests

    @property
    def num_requests(self) -> int:
        """Requests that the workload asked for."""
        return self.workload.num_requests

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens of finished requests over the duration."""
        return self._per_second(sum(row.osl for row in self.rows))

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and output tokens of finished requests over the duration."""
        return self._per_second(sum(row.isl + row.osl for row in self.rows))

    @property
    def requests_per_s(self) -> float:
        """Finished requests over the duration."""
        return self._per_second(len(self.rows))

    def percentile(self, name: str, q: float) -> float:
        """Percentile `q` in 0..100 of a row's `ttft_s`, `tpot_s` or `e2e_s`; NaN without rows."""
        values = [v for row in self.rows if (v := getattr(row, name)) is not None]
        return float(np.percentile(values, q)) if values else math.nan

    def mean(self, name: str) -> float:
        """Mean of a row's `ttft_s`, `tpot_s` or `e2e_s`; NaN without rows."""
        values = [v for row in self.rows if (v := getattr(row, name)) is not None]
        return float(np.mean(values)) if values else math.nan

    def _per_second(self, count: float) -> float:
        return count / self.duration_s if self.duration_s > 0 else 0.0


def run_workload(
    engine: ServingEngine,
    workload: Workload,
    *,
    observer: Observer | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> WorkloadRun:
    """Run every request of `workload`, greedily and to its full output length.

    Args:
        engine: must be idle. It is idle again afterwards: requests left over are aborted.
        workload: what to send and when.
        observer: called after each step; a sentence that it returns ends the run early.
        clock: seconds, the one that the engine was made with.
        sleep: waits for the next arrival when there is nothing to do.

    Running out of memory ends the run with `failure` set; other errors are raised.
    """
    loop = _Loop(engine, workload, clock)
    run = loop.run
    try:
        while loop.admit_due() or engine.has_work or loop.more:
            if not engine.has_work:
                sleep(min(loop.until_next(), LONGEST_SLEEP_S))
                continue
            progress = loop.step()
            if observer and (reason := observer(progress)):
                run.stopped = reason
                break
    except (RuntimeError, MemoryError) as error:
        run.failure = out_of_memory(error)
        if not run.failure:
            raise
    finally:
        loop.close()
    return run


def warm_up(engine: ServingEngine, workload: Workload) -> None:
    """Run one round of the workload's shapes with short outputs, so that nothing is new later.

    A closed loop's first `concurrency` requests at once; at most 8 of an open loop. Each ends one
    token after the one before it, so that the batch passes through every size on its way down:
    kernels are compiled and graphs captured here and not in the run.
    """
    count = min(workload.concurrency or 8, workload.num_requests)
    items = itertools.islice(workload.items(engine.vocab_size), count)
    for tokens, item in enumerate(items, start=2):
        engine.add(item.prompt_ids, _params(min(tokens, item.max_tokens)))
    while engine.has_work:
        engine.step()


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class _InFlight:
    request: Request
    arrival_s: float
    first_s: float = math.nan
    last_s: float = math.nan
    tokens: int = 0


class _Loop:
    """The mutable side of one run."""

    def __init__(
        self, engine: ServingEngine, workload: Workload, clock: Callable[[], float]
    ) -> None:
        self.engine, self.workload, self.clock = engine, workload, clock
        self.run = WorkloadRun(workload=workload)
        self.items: Iterator[WorkItem] = workload.items(engine.vocab_size)
        self.upcoming: WorkItem | None = next(self.items, None)
        self.flying: dict[str, _InFlight] = {}
        self.start_s = clock()

    @property
    def more(self) -> bool:
        """Whether requests are still to be sent."""
        return self.upcoming is not None

    def now(self) -> float:
        """Seconds since the run started."""
        return self.clock() - self.start_s

    def until_next(self) -> float:
        """Seconds until the next request is due."""
        assert self.upcoming is not None
        return max(0.0, self.upcoming.arrival_s - self.now())

    def admit_due(self) -> bool:
        """Send every request that is due; whether there was one."""
        sent = False
        now = self.now()
        limit = self.workload.concurrency
        while self.upcoming is not None:
            if limit is not None and len(self.flying) >= limit:
                break
            if limit is None and self.upcoming.arrival_s > now:
                break
            # In an open loop the request arrived when it was due, even if a step was in the way.
            arrival = now if limit is not None else self.upcoming.arrival_s
            request = self.engine.add(
                self.upcoming.prompt_ids,
                _params(self.upcoming.max_tokens),
                arrival_s=self.start_s + arrival,
            )
            self.flying[request.id] = _InFlight(request, arrival)
            self.upcoming = next(self.items, None)
            sent = True
        return sent

    def step(self) -> Progress:
        """Run one step of the engine and record it."""
        before = self.now()
        output = self.engine.step()
        now = self.now()
        first_tokens = []
        for request in output.requests:
            flight = self.flying[request.id]
            if flight.tokens == 0:
                flight.first_s = now
                first_tokens.append(now - flight.arrival_s)
            flight.tokens += 1
            flight.last_s = now
        finished = [self._finish(self.flying.pop(request.id), now) for request in output.finished]
        self.run.rows += finished
        self.run.duration_s = now
        sample = StepSample(
            end_s=now,
            duration_s=now - before,
            run_s=output.stats.run_s,
            num_tokens=output.stats.num_tokens,
            num_decodes=output.stats.num_decodes,
            running=self.engine.num_running,
            waiting=self.engine.num_waiting,
            finished=len(self.run.rows),
        )
        self.run.steps.append(sample)
        return Progress(
            sample=sample,
            finished=finished,
            num_requests=self.workload.num_requests,
            first_tokens=first_tokens,
        )

    def _finish(self, flight: _InFlight, now: float) -> RequestRow:
        several = flight.tokens > 1
        last = flight.last_s if flight.tokens else now
        first = flight.first_s if flight.tokens else now
        return RequestRow(
            arrival_s=flight.arrival_s,
            isl=len(flight.request.prompt_ids),
            osl=flight.tokens,
            ttft_s=first - flight.arrival_s,
            tpot_s=(last - first) / (flight.tokens - 1) if several else None,
            e2e_s=last - flight.arrival_s,
            finish=str(flight.request.finish_reason),
            preemptions=flight.request.preemptions,
        )

    def close(self) -> None:
        """Leave no request behind in the engine."""
        for request_id in self.flying:
            self.engine.abort(request_id)
        self.flying.clear()


def request_rows(run: WorkloadRun) -> list[dict[str, Any]]:
    """The run's requests as rows of a result's series."""
    return [{name: getattr(row, name) for name in RequestRow.__slots__} for row in run.rows]
