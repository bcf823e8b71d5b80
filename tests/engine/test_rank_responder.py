"""The process that acknowledges a slice's steps."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from kllm.engine.rank_responder import Responder
from kllm.errors import WorkerError
from tests.engine.rank_cases import left_behind

ENGINE = """
from kllm.engine.rank_responder import Responder
responder = Responder(1)
responder.round_trip([b"step"])
print(responder._process.pid)
"""


@pytest.fixture
def responder() -> Iterator[Responder]:
    found = Responder(3)
    yield found
    found.close()


@pytest.mark.parametrize("size", [0, 100, 5 << 20])
def test_messages_of_any_size_are_acknowledged(responder: Responder, size: int) -> None:
    for _ in range(3):
        responder.round_trip([bytes(size), b"", bytes(size)])


def test_a_responder_that_was_killed_is_said(responder: Responder) -> None:
    responder.round_trip([b"step"] * 3)
    os.kill(responder._process.pid, signal.SIGKILL)
    responder._process.wait()
    with pytest.raises(WorkerError, match="was killed by SIGKILL; start"):
        responder.round_trip([b"step"] * 3)


def test_it_ends_with_the_engine() -> None:
    ran = subprocess.run([sys.executable, "-c", ENGINE], capture_output=True, text=True, timeout=60)
    pid = int(ran.stdout)
    assert not left_behind([psutil.Process(pid)] if psutil.pid_exists(pid) else [])
