"""Whatever a worker does, a trial ends with a reason and the next one runs."""

import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from kllm.bench.workloads import Lengths, Workload
from kllm.config import EngineConfig, SchedulerConfig
from kllm.errors import WorkerError
from kllm.tuners import trial
from kllm.tuners.outcome import Progress
from kllm.tuners.trial import WorkerRunner

WORKLOAD = Workload(isl=Lengths(96), osl=Lengths(24), num_requests=64, concurrency=32)
GOOD = EngineConfig(model="deepseek-v4", scheduler=SchedulerConfig(token_budget=512))
BAD = EngineConfig(model="deepseek-v4", scheduler=SchedulerConfig(token_budget=64))
MIB = 1 << 20


def runner_that(deed: str, memory_limit_bytes: int | None = None) -> WorkerRunner:
    command = (sys.executable, "-m", "tests.tuners.fake_worker", json.dumps({"64": deed}))
    return WorkerRunner(memory_limit_bytes=memory_limit_bytes, command=command)


@pytest.fixture
def make() -> Iterator[type]:
    """Runners that are closed at the end."""
    made: list[WorkerRunner] = []

    def build(deed: str, memory_limit_bytes: int | None = None) -> WorkerRunner:
        made.append(runner_that(deed, memory_limit_bytes))
        return made[-1]

    yield build  # type: ignore[misc]
    for runner in made:
        runner.close()


def worker_of(runner: WorkerRunner) -> int:
    assert runner._worker is not None
    return runner._worker.process.pid


def test_worker_is_kept_between_trials(make) -> None:
    runner = make("")
    first = runner.run(GOOD, WORKLOAD)
    pid = worker_of(runner)
    second = runner.run(GOOD, WORKLOAD)
    assert first.state == second.state == "complete"
    assert worker_of(runner) == pid
    assert len(first.requests) == 64
    assert first.requests == second.requests


@pytest.mark.parametrize(
    ("deed", "says"),
    [
        ("die", "SIGKILL"),
        ("exit", "RuntimeError: the kernel is broken"),
        ("nonsense", "answered nonsense"),
    ],
)
def test_broken_worker_is_a_failed_trial_and_the_next_one_runs(make, deed: str, says: str) -> None:
    runner = make(deed)
    failed = runner.run(BAD, WORKLOAD)
    assert failed.state == "failed"
    assert says in failed.reason
    assert runner.run(GOOD, WORKLOAD).state == "complete"


def test_hanging_worker_is_ended_at_the_time_limit(make) -> None:
    runner = make("hang")
    failed = runner.run(BAD, WORKLOAD, timeout_s=1.0)
    assert failed.state == "failed"
    assert "time limit" in failed.reason
    assert runner.run(GOOD, WORKLOAD).state == "complete"


def test_growing_worker_is_ended_at_the_memory_limit(make) -> None:
    probe = make("")
    probe.run(GOOD, WORKLOAD)
    limit = psutil.Process(worker_of(probe)).memory_info().rss + 200 * MIB
    runner = make("grow", limit)
    failed = runner.run(BAD, WORKLOAD)
    assert failed.state == "failed"
    assert "out of host memory" in failed.reason
    assert runner.run(GOOD, WORKLOAD).state == "complete"


def stop_after(tokens: int):
    def rule(progress: Progress) -> str | None:
        return "seen enough" if progress.tick.output_tokens >= tokens else None

    return rule


def test_rule_ends_a_run_and_keeps_what_was_measured(make) -> None:
    runner = make("park")
    stopped = runner.run(BAD, WORKLOAD, rule=stop_after(100))
    assert stopped.state == "stopped"
    assert stopped.reason == "seen enough"
    assert 0 < stopped.ticks[-1].output_tokens < stopped.num_output_tokens
    pid = worker_of(runner)
    assert runner.run(GOOD, WORKLOAD).state == "complete"
    assert worker_of(runner) == pid


def test_worker_that_does_not_stop_is_ended(make, monkeypatch) -> None:
    monkeypatch.setattr(trial, "STOP_GRACE_S", 0.2)
    runner = make("deaf")
    stopped = runner.run(BAD, WORKLOAD, rule=stop_after(1))
    assert (stopped.state, stopped.reason) == ("stopped", "seen enough")
    assert runner.run(GOOD, WORKLOAD).state == "complete"


def test_what_does_not_fit_a_used_worker_is_tried_in_a_new_one(make) -> None:
    runner = make("full")
    assert runner.run(GOOD, WORKLOAD).state == "complete"
    pid = worker_of(runner)
    assert runner.run(BAD, WORKLOAD).state == "complete"
    assert worker_of(runner) != pid


def test_what_does_not_fit_a_new_worker_has_failed(make) -> None:
    runner = make("large")
    failed = runner.run(BAD, WORKLOAD)
    assert (failed.state, failed.too_large) == ("failed", True)
    assert runner.run(GOOD, WORKLOAD).state == "complete"


def test_time_is_counted_from_the_request(make) -> None:
    ticks = iter(range(1000))
    runner = make("")
    runner.clock = lambda: float(next(ticks))
    assert runner.run(GOOD, WORKLOAD).total_s >= 1


def test_command_that_cannot_start_is_an_error_and_not_a_failed_trial() -> None:
    with pytest.raises(WorkerError, match="cannot start a worker"):
        WorkerRunner(command=("/nonexistent/worker",)).run(GOOD, WORKLOAD)


def test_closing_leaves_no_process() -> None:
    runner = runner_that("hang")
    runner.run(GOOD, WORKLOAD)
    pid = worker_of(runner)
    runner.close()
    assert not psutil.pid_exists(pid)


def test_failed_config_does_not_leak_into_the_next(make) -> None:
    runner = make("die")
    runner.run(BAD, WORKLOAD)
    other = replace(GOOD, scheduler=SchedulerConfig(token_budget=128))
    assert runner.run(other, WORKLOAD).num_requests == 64


def test_an_interrupted_run_does_not_wait_for_its_worker() -> None:
    """A worker that still imports its libraries hears nothing; it is not asked to end."""
    calls = itertools.count()

    def clock() -> float:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return time.monotonic()

    command = (sys.executable, "-c", "import time; time.sleep(60)")
    runner = WorkerRunner(command=command, clock=clock)
    others = psutil.Process().children()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        runner.run(GOOD, WORKLOAD)
    assert time.monotonic() - begin < trial.CLOSE_GRACE_S
    assert psutil.Process().children() == others
