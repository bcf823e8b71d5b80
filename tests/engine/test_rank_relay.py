"""The process that a slice wakes once a step."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from kllm.engine.rank_relay import Relay
from kllm.errors import WorkerError
from tests.engine.rank_cases import left_behind

STARTS = "from kllm.engine.rank_relay import Relay; r = Relay(); print(r._process.pid); r.wake(b'')"


@pytest.fixture
def relay() -> Iterator[Relay]:
    found = Relay()
    yield found
    found.close()


@pytest.mark.parametrize("size", [0, 100, 5 << 20])
def test_messages_of_any_size_are_acknowledged(relay: Relay, size: int) -> None:
    for _ in range(3):
        relay.wake(bytes(size))


def test_a_relay_that_was_killed_is_said(relay: Relay) -> None:
    relay.wake(b"step")
    os.kill(relay._process.pid, signal.SIGKILL)
    relay._process.wait()
    with pytest.raises(WorkerError, match="ended with -9"):
        relay.wake(b"step")


def test_it_ends_with_the_engine() -> None:
    ran = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, timeout=60)
    pid = int(ran.stdout)
    assert not left_behind([psutil.Process(pid)] if psutil.pid_exists(pid) else [])
