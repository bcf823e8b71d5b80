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

ENGINE = """
from kllm.engine.rank_relay import Relay
relay = Relay(1)
relay.wake([b"step"])
print(relay._process.pid)
"""


@pytest.fixture
def relay() -> Iterator[Relay]:
    found = Relay(3)
    yield found
    found.close()


@pytest.mark.parametrize("size", [0, 100, 5 << 20])
def test_messages_of_any_size_are_acknowledged(relay: Relay, size: int) -> None:
    for _ in range(3):
        relay.wake([bytes(size), b"", bytes(size)])


def test_a_relay_that_was_killed_is_said(relay: Relay) -> None:
    relay.wake([b"step"] * 3)
    os.kill(relay._process.pid, signal.SIGKILL)
    relay._process.wait()
    with pytest.raises(WorkerError, match="ended with -9"):
        relay.wake([b"step"] * 3)


def test_it_ends_with_the_engine() -> None:
    ran = subprocess.run([sys.executable, "-c", ENGINE], capture_output=True, text=True, timeout=60)
    pid = int(ran.stdout)
    assert not left_behind([psutil.Process(pid)] if psutil.pid_exists(pid) else [])
