"""An engine with a known schedule on a clock that only it moves."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kllm.core import FinishReason, Request, SamplingParams, Status


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 1000.0  # not zero: a forgotten start time must show

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Stats:
    num_tokens: int
    num_decodes: int
    run_s: float = 0.0


@dataclass
class Output:
    requests: list[Request]
    finished: list[Request]
    stats: Stats


@dataclass
class FakeEngine:
    """Prefills one request a step, decodes all others; a step takes `step_s`."""

    clock: Clock
    step_s: float = 0.1
    max_batch: int = 4
    fail_at: int = -1  # step that raises `failure`
    failure: Exception = field(default_factory=MemoryError)
    slots: int = 1_000_000  # requests that the KV memory holds
    vocab_size: int = 50
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    added: list[Request] = field(default_factory=list)
    steps: int = 0
    closed: bool = False

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def add(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, arrival_s: float | None = None
    ) -> Request:
        request = Request(f"r{len(self.added)}", prompt_ids, params, arrival_s or self.clock())
        self.added.append(request)
        self.waiting.append(request)
        return request

    def step(self) -> Output:
        self.steps += 1
        self.clock.sleep(self.step_s)
        if self.steps == self.fail_at:
            raise self.failure
        decodes, tokens = list(self.running), len(self.running)
        made = list(decodes)
        if self.waiting and len(self.running) < min(self.max_batch, self.slots):
            request = self.waiting.pop(0)
            self.running.append(request)
            made.append(request)
            tokens += len(request.prompt_ids)
        for request in made:
            request.output_ids.append(self.steps)
        finished = [r for r in made if len(r.output_ids) == r.params.max_tokens]
        for request in finished:
            request.status, request.finish_reason = Status.FINISHED, FinishReason.LENGTH
            self.running.remove(request)
        return Output(made, finished, Stats(tokens, len(decodes)))

    def abort(self, request_id: str) -> None:
        self.waiting = [r for r in self.waiting if r.id != request_id]
        self.running = [r for r in self.running if r.id != request_id]

    def close(self) -> None:
        self.closed = True
