"""The engine's process, or the one that watches the ranks, is killed: nothing stays behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from kllm.engine import rank_supervisor
from kllm.engine.rank_channel import HEARTBEAT, call, identify, listen, local_address, new_key
from kllm.engine.rank_pool import launch
from kllm.models.weights import INDEX
from tests.engine.layout_cases import checkpoint
from tests.engine.rank_cases import engine, left_behind, processes, run_until_error, start

T = TypeVar("T")
START_S = 30.0  # until a process that begins is where it should be
# What an engine's process does until it is killed; it prints a line once it is about to.
STATES = {
    "wait": "print(flush=True); time.sleep(60)",
    "run a library that keeps Python's lock": (
        "work = pickle.dumps(Evaluate(HOLD_LOCK.format(seconds=60)));"
        "[link.steps.send(work) for link in pool.ranks]; print(flush=True); time.sleep(60)"
    ),
    "wait for each other": (
        "running = engine(model, pool); start(running); processes(pool)[1].suspend();"
        "print(flush=True); running.step()"
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("deepseek_v4", tmp_path_factory.mktemp("supervisor") / "deepseek_v4")


@contextmanager
def engines_process(work: str, model: Path, temporary: Path) -> Iterator[psutil.Popen]:
    """A process that starts two ranks and goes on with `work`; killed at the end."""
    temporary.mkdir()
    script = (
        "import pickle, time; from pathlib import Path;"
        "from kllm.engine.rank_pool import launch;"
        "from tests.engine.rank_cases import *;"
        f"model = Path({str(model)!r}); pool = launch(2); {work}"
    )
    variables = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script]
    with psutil.Popen(command, stdout=subprocess.PIPE, env=variables) as process:
        try:
            yield process
        finally:
            process.kill()


def eventually(attempt: Callable[[], T | None]) -> T:
    """Its first answer that is not empty."""
    deadline = time.monotonic() + START_S
    while not (found := attempt()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def writer(pipe: Path) -> int | None:
    """A descriptor, once somebody reads."""
    with suppress(OSError):
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    return None


@pytest.mark.parametrize("state", STATES)
def test_ranks_end_with_the_engines_process(state: str, model: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    with engines_process(STATES[state], model, temporary) as process:
        assert process.stdout.readline() == b"\n"
        found = process.children(recursive=True)
        assert len(found) == 3, "a supervisor and its ranks"
    assert left_behind(found) == []
    assert list(temporary.iterdir()) == []


def test_ranks_that_load_end_with_the_engines_process(tmp_path: Path) -> None:
    """From a disk that does not answer."""
    model, temporary = checkpoint("deepseek_v4", tmp_path / "model"), tmp_path / "temporary"
    os.mkfifo(model / INDEX)
    with engines_process("engine(model, pool)", model, temporary) as process:
        reached = eventually(lambda: writer(model / INDEX))
        found = process.children(recursive=True)
        assert len(found) == 3
    os.close(reached)
    assert left_behind(found) == []
    assert list(temporary.iterdir()) == []


def test_ranks_that_start_end_with_the_engines_process(model: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    with engines_process("", model, temporary) as process:
        found = eventually(process.children)
    assert left_behind(found, START_S) == []
    assert list(temporary.iterdir()) == []


def test_ranks_end_with_their_supervisor(model: Path) -> None:
    with launch(2) as pool:
        running, ranks = engine(model, pool), processes(pool)
        start(running)
        pool.supervisor.process.kill()
        error, _ = run_until_error(running)
        assert str(error) == "the supervisor of the ranks was killed by SIGKILL; the job was ended"
        assert left_behind(ranks) == []
        running.close()


def test_heartbeats_that_nobody_reads_for_hours_harm_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An idle engine does not look at them: once the line is full they are left out."""
    address, key, full = local_address(), new_key(), threading.Event()

    class Line(socket.socket):
        def send(self, data: Any, flags: int = 0) -> int:
            try:
                return super().send(data, flags)
            except BlockingIOError:
                full.set()
                raise

    def connect(*args: Any) -> socket.socket:
        return Line(fileno=call(*args).detach())

    monkeypatch.setattr(rank_supervisor, "HEARTBEAT_S", 1e-6)
    monkeypatch.setattr(rank_supervisor, "call", connect)
    with listen(address, 1) as listener, subprocess.Popen(["sleep", "60"]) as rank:
        watched = (address, key, {rank.pid: 0}, os.getppid())
        threading.Thread(target=rank_supervisor._watch, args=watched, daemon=True).start()
        line, _ = listener.accept()
        try:
            assert identify(line, key) == (0, HEARTBEAT)
            assert full.wait(START_S)
            line.settimeout(START_S)
            for _ in range(3):
                assert line.recv(1 << 20), "they go on once they are read"
            assert rank.poll() is None
        finally:
            line.close()  # as the engine's process does when it ends
        assert rank.wait(START_S) == -signal.SIGKILL
