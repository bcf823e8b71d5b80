"""Engines of two ranks whose load is skewed, and whose ranks die or stop, on whatever device."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import psutil
import pytest

from kllm.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from kllm.core import Request, SamplingParams
from kllm.engine.engine import Engine
from kllm.engine.rank_pool import RankPool
from kllm.engine.rank_protocol import StandIn
from kllm.errors import WorkerError

END_S = 30.0  # within which a job ends whose rank has died or stopped
SPREAD = ParallelConfig(dp=2, ep=2)
# Set it to 200 to look for hangs that come once in a while.
REPEATS = int(os.environ.get("KLLM_TEST_REPEATS", "3"))
BUSY, IDLE = 20, 1  # requests of the ranks of a skewed load
# As a collective of a library that keeps Python's lock while it waits (PyDLL does, CDLL does not).
HOLD_LOCK = "__import__('ctypes').PyDLL(None).sleep({seconds})"


class Evaluate:
    """A message that makes a rank evaluate this code first; the answer is True."""

    def __init__(self, code: str) -> None:
        self.code = f"({code}, stand_in(None))[1]"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return eval, (self.code, {"stand_in": StandIn})


def engine(
    model: Path,
    pool: RankPool | None,
    layout: ParallelConfig = SPREAD,
    *,
    device: str = "cpu",
    max_batch: int = 8,
    token_budget: int = 64,
) -> Engine:
    """An engine of a tiny model on the ranks of a pool."""
    config = EngineConfig(
        model=str(model),
        device=device,
        scheduler=SchedulerConfig(max_batch=max_batch, token_budget=token_budget),
        cache=CacheConfig(memory_bytes=8 << 20),
        max_model_len=512,
        parallel=layout,
    )
    return Engine(config, ranks=pool)


def start(running: Engine, count: int = 4) -> None:
    """Begin with requests that last, and run a few steps of them."""
    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    for i in range(count):
        running.add([5 + i] * 20, params)
    for _ in range(3):
        running.step()


def processes(pool: RankPool) -> list[psutil.Process]:
    """The ranks' processes in order."""
    children = psutil.Process(pool.supervisor.process.pid).children()
    return sorted(children, key=lambda child: child.pid)


def left_behind(ended: Sequence[psutil.Process], timeout_s: float = 10.0) -> list[psutil.Process]:
    """Those that still run after a while; a dead one that nobody has waited for does not."""
    deadline = time.monotonic() + timeout_s
    running = list(ended)
    while running and time.monotonic() < deadline:
        running = [process for process in running if _runs(process)]
        time.sleep(0.05)
    return running


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_until_error(running: Engine) -> tuple[WorkerError, float]:
    """What ends the job, and after how many seconds."""
    begin = time.monotonic()
    try:
        while running.has_work:
            running.step()
    except WorkerError as error:
        return error, time.monotonic() - begin
    pytest.fail("the job went on to its end")


def check_a_killed_rank_ends_the_job(running: Engine, pool: RankPool, after_s: float) -> float:
    """Kill rank 1 of a started engine some time into its next steps; seconds until the error."""
    ranks = processes(pool)
    killer = Timer(after_s, ranks[1].kill)
    killer.start()
    error, seconds = run_until_error(running)
    killer.join()
    assert str(error) == "rank 1 was killed by SIGKILL; the job was ended"
    assert seconds - after_s < END_S
    assert left_behind(ranks) == []
    running.close()
    return seconds - after_s


def check_a_stopped_rank_ends_the_job(running: Engine, pool: RankPool, silence_s: float) -> float:
    """Stop rank 0 of a started engine; seconds until the error.

    Args:
        silence_s: what `kllm.engine.rank_pool.HEARTBEAT_TIMEOUT_S` is.
    """
    ranks = processes(pool)
    ranks[0].suspend()
    error, seconds = run_until_error(running)
    assert f"rank 0 has not been heard from for {silence_s:.0f} s" in str(error)
    assert seconds < END_S
    assert left_behind(ranks) == []
    running.close()
    return seconds


@contextmanager
def closing(running: Engine) -> Iterator[Engine]:
    """Close an engine at the end, whatever happens."""
    try:
        yield running
    finally:
        running.close()


def run_skewed_load(running: Engine, rng: np.random.Generator) -> float:
    """Give one rank twenty times the requests of the other, and run them; seconds of that."""
    requests: list[Request] = []
    busy, idle = running._schedulers[:: rng.choice((-1, 1))]
    for scheduler, count in ((busy, BUSY), (idle, IDLE)):
        for _ in range(count):
            prompt = rng.integers(2, 90, rng.integers(1, 100)).tolist()
            params = SamplingParams(max_tokens=int(rng.integers(1, 12)), ignore_eos=True)
            request = running.add(prompt, params)
            running._homes[request.id].waiting.remove(request)
            running._homes[request.id] = scheduler
            scheduler.add(request)
            requests.append(request)
    begin = time.monotonic()
    while running.has_work:
        running.step()
        assert time.monotonic() - begin < END_S * 4
    assert [len(r.output_ids) for r in requests] == [r.params.max_tokens for r in requests]
    return time.monotonic() - begin
