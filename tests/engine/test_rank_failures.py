"""A rank that dies, stops or is slow: the job goes on correctly, or ends with a sentence."""

import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from kllm.config import ParallelConfig
from kllm.core import SamplingParams
from kllm.engine.multi_rank import JOIN_LIMIT, RELEASE_LIMIT
from kllm.engine.rank_channel import new_key
from kllm.engine.rank_pool import RankPool, launch
from kllm.engine.rank_protocol import Release, Settle
from kllm.engine.rank_start import Supervisor, accept
from kllm.errors import ConfigError, DataError, WorkerError
from tests.engine.layout_cases import answers, checkpoint
from tests.engine.rank_cases import (
    HOLD_LOCK,
    REPEATS,
    SPREAD,
    Evaluate,
    check_a_killed_rank_ends_the_job,
    check_a_stopped_rank_ends_the_job,
    closing,
    engine,
    left_behind,
    processes,
    run_skewed_load,
    start,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("deepseek_v4", tmp_path_factory.mktemp("failures") / "deepseek_v4")


@pytest.fixture
def pool() -> Iterator[RankPool]:
    with launch(2) as ranks:
        yield ranks


def test_ranks_are_not_told_the_place_of_the_process_that_starts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only torchrun's ranks have one: all others would share one GPU."""
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")
    monkeypatch.setenv("KLLM_STEP_TIMEOUT_S", "77")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("kllm.engine.rank_start.usable_cores", lambda: 7.5)
    with launch(2) as pool:
        for process in processes(pool):
            variables = process.environ()
            assert not variables.keys() & {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}
            assert variables["KLLM_STEP_TIMEOUT_S"] == "77"
            assert variables["OMP_NUM_THREADS"] == "3", "of the cores that they share"
        assert len(processes(pool)) == 2


@pytest.mark.parametrize("after_s", [0.0, 0.2], ids=["at once", "in the midst of steps"])
def test_a_killed_rank_ends_the_job(model: Path, pool: RankPool, after_s: float) -> None:
    running = engine(model, pool)
    start(running)
    check_a_killed_rank_ends_the_job(running, pool, after_s)


def test_a_stopped_rank_ends_the_job(
    model: Path, pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kllm.engine.rank_pool.HEARTBEAT_TIMEOUT_S", 4.0)
    running = engine(model, pool)
    start(running)
    check_a_stopped_rank_ends_the_job(running, pool, 4.0)


def test_a_hung_step_ends_the_job(
    model: Path, pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kllm.env.step_timeout_s", lambda: 1.0)
    running = engine(model, pool)
    running.add([5] * 20, SamplingParams(max_tokens=4))
    processes(pool)[1].suspend()
    with pytest.raises(WorkerError, match="did not finish a step within 1 s"):
        running.step()


def test_ranks_that_are_not_set_up_in_time_end_the_job(
    model: Path, pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence does not send anybody to the time limit of steps."""
    limit = replace(JOIN_LIMIT, seconds=1.0)
    monkeypatch.setattr("kllm.engine.multi_rank.JOIN_LIMIT", limit)
    processes(pool)[1].suspend()
    with pytest.raises(WorkerError, match="were not set up within 1 s") as caught:
        engine(model, pool)
    assert "KLLM_STEP_TIMEOUT_S" not in str(caught.value)


def test_debug_mode_tells_where_a_rank_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback exists in the rank's process only."""
    monkeypatch.setenv("KLLM_DEBUG", "1")
    with launch(2) as ranks, pytest.raises(WorkerError, match="Traceback") as caught:
        ranks.call([Settle(), Settle()])
    assert "rank_process.py" in str(caught.value)


def test_a_rank_that_works_for_long_is_not_silent(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a library keeps Python's lock meanwhile."""
    monkeypatch.setattr("kllm.engine.rank_pool.HEARTBEAT_TIMEOUT_S", 2.5)
    work = Evaluate(HOLD_LOCK.format(seconds=4))
    assert pool.call([work, Release()]) == [True, True]


def test_a_rank_that_hangs_while_it_leaves_a_layout_ends_the_job(
    model: Path, pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the collective with which DeepEP's buffers are destroyed."""
    limit = replace(RELEASE_LIMIT, seconds=4.0)
    monkeypatch.setattr("kllm.engine.multi_rank.RELEASE_LIMIT", limit)
    monkeypatch.setattr("kllm.engine.rank_pool.HEARTBEAT_TIMEOUT_S", 2.5)
    hang = f"lambda: {HOLD_LOCK.format(seconds=60)}"
    module = "__import__('kllm.parallel.expert_deep_ep').parallel.expert_deep_ep"
    pool.call([Release(), Evaluate(f"setattr({module}, 'release', {hang})")])
    running, ranks = engine(model, pool), processes(pool)
    with pytest.raises(WorkerError, match=r"ranks \[1\] did not leave their layout within 4 s"):
        running.close()
    assert left_behind(ranks) == []


def test_a_rank_that_does_not_read_ends_the_job(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message larger than the socket takes: nobody waits for the stopped rank to read it."""
    for link in pool.ranks:
        link.steps._socket.settimeout(0.5)
    processes(pool)[1].suspend()
    with pytest.raises(WorkerError, match="rank 1 has not been heard from"):
        pool.call([Release(), bytes(1 << 24)])
    assert not pool.alive


@contextmanager
def starting(code: str) -> Iterator[Supervisor]:
    """A process in place of the one that starts ranks, which runs `code`."""
    process = subprocess.Popen([sys.executable, "-c", code], process_group=0)
    supervisor = Supervisor(process, tempfile.TemporaryFile())  # noqa: SIM115
    try:
        yield supervisor
    finally:
        supervisor.kill()


@pytest.mark.parametrize(
    ("signum", "how"),
    [
        (signal.SIGKILL, "was killed by SIGKILL"),
        (signal.SIGRTMIN + 1, f"was killed by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_a_process_that_dies_before_it_starts_ranks(signum: int, how: str) -> None:
    with (
        starting(f"import os; os.kill(os.getpid(), {int(signum)})") as supervisor,
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(WorkerError, match=f"the supervisor of the ranks {how}"),
    ):
        accept(listener, 2, new_key(), supervisor)


def test_strangers_do_not_make_the_start_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often they call, the ranks' time to call ends."""
    monkeypatch.setattr("kllm.engine.rank_start.START_S", 0.5)
    done = threading.Event()

    def call_often(address: tuple[str, int]) -> None:
        while not done.is_set():
            with suppress(OSError), socket.create_connection(address, timeout=0.1) as stranger:
                stranger.sendall(bytes(64))

    with (
        starting("import time; time.sleep(60)") as supervisor,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        thread = threading.Thread(target=call_often, args=(listener.getsockname()[:2],))
        thread.start()
        try:
            with pytest.raises(WorkerError, match=r"\[0, 1\] did not start: they did not call"):
                accept(listener, 2, new_key(), supervisor)
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize("scheduler", [False, True])
def test_an_engine_that_cannot_be_set_up_ends_its_ranks(
    model: Path, pool: RankPool, monkeypatch: pytest.MonkeyPatch, scheduler: bool
) -> None:
    """Whatever goes wrong besides the ranks themselves."""

    def refuse(*args: object, **options: object) -> None:
        raise ConfigError("no")

    monkeypatch.setattr("kllm.engine.multi_rank.launch", lambda world: pool)
    where = "engine.Scheduler" if scheduler else "multi_rank.sharing_of"
    monkeypatch.setattr(f"kllm.engine.{where}", refuse)
    with pytest.raises(ConfigError, match="no"):
        engine(model, pool)
    assert pool.alive, "they are the caller's"
    with pytest.raises(ConfigError, match="no"):  # as before: they can be used again
        engine(model, None)
    assert not pool.alive


def test_ranks_run_one_engine_at_a_time(model: Path, pool: RankPool) -> None:
    first = engine(model, pool)
    start(first)
    with pytest.raises(ConfigError, match="these ranks run another engine"):
        engine(model, pool)
    first.step()
    first.close()
    engine(model, pool).close()


def test_an_error_of_a_rank_is_reported_once(model: Path, pool: RankPool) -> None:
    broken = model / "nowhere"
    with pytest.raises(ConfigError, match="no model folder"):
        engine(broken, pool)
    (model / "model.safetensors").rename(model / "hidden")
    try:
        with pytest.raises(DataError, match="holds no tensors"):
            engine(model, pool)
    finally:
        (model / "hidden").rename(model / "model.safetensors")


@contextmanager
def slowed(process: psutil.Process) -> Iterator[None]:
    """The process gets a tenth of the time."""
    done = threading.Event()

    def pulse() -> None:
        while not done.is_set():
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.018)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.002)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_slow_rank_changes_nothing(model: Path, pool: RankPool) -> None:
    alone = answers(model, ParallelConfig(), new_tokens=8)
    rank = processes(pool)[1]
    found = answers(model, SPREAD, pool, new_tokens=8, around=lambda: slowed(rank))
    assert found.tokens == alone.tokens


def test_skewed_load_does_not_hang(model: Path, pool: RankPool) -> None:
    """In another order each time; the rank without requests keeps the other company."""
    with closing(engine(model, pool)) as running:
        rng = np.random.default_rng(0)
        for _ in range(REPEATS):
            run_skewed_load(running, rng)
