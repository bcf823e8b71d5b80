"""Two launches of torchrun, each with an address of its own, are like one process."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing

import psutil
import pytest

from kllm.engine import torchrun
from kllm.errors import WorkerError
from tests.engine.rank_cases import left_behind

SENTENCE = "What is the capital of France?"
TIMEOUT_S = 240


def test_the_first_process_gives_rank_0_its_place_on_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    job = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "3"}
    for name, value in (place | job).items():
        monkeypatch.setenv(name, value)
    given: dict[str, str] = {}

    def start(address: str, ranks: range, key: str, variables: Mapping[str, str]) -> None:
        given.update(variables)
        raise WorkerError("enough")

    monkeypatch.setattr(torchrun, "start_ranks", start)
    with pytest.raises(WorkerError, match="enough"):
        torchrun.pool()
    assert place.items() <= given.items()


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def launch(node: int, port: int, *options: str) -> "subprocess.Popen[str]":
    """`kllm generate` on one of two nodes, a rank each."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    place = [
        "--node-rank",
        str(node),
        "--nproc-per-node",
        "1",
        "--local-addr",
        f"127.0.0.{1 + node}",
    ]
    call = [sys.executable, "-c", "from kllm.cli.app import main; main()", "generate"]
    return subprocess.Popen(
        [*torchrun, *rendezvous, *place, "--no-python", *call, "--layout", "cp=2", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_two_launches_answer_like_one_process() -> None:
    port, options = free_port(), ("--temperature", "0", "--max-tokens", "12", SENTENCE)
    first, second = launch(0, port, *options), launch(1, port, *options)
    try:
        answer, errors = first.communicate(timeout=TIMEOUT_S)
        rest, more = second.communicate(timeout=TIMEOUT_S)
    finally:
        first.kill()
        second.kill()
    assert (first.returncode, second.returncode) == (0, 0), errors + more
    assert answer.strip() == "The capital of France is Paris."
    assert rest.strip() == ""  # only the first process prints


@pytest.mark.slow
def test_both_launches_end_with_the_engines_process() -> None:
    """Killed in the midst of an answer that makes no sense and so does not end soon."""
    port, options = free_port(), ("--raw", "--temperature", "2.5", "--max-tokens", "1500", SENTENCE)
    launches = [launch(node, port, *options) for node in range(2)]
    try:
        assert launches[0].stdout is not None
        assert launches[0].stdout.read(20)
        agents = [psutil.Process(agent.pid) for agent in launches]
        (engine,) = agents[0].children()
        found = [child for agent in agents for child in agent.children(recursive=True)]
        assert len(found) == 5, "the engine's process, two supervisors and their ranks"
        engine.kill()
        assert left_behind([*agents, *found]) == []
    finally:
        for agent in launches:
            agent.kill()
            agent.communicate()
