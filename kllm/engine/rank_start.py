"""Starting the processes that ranks live in, and meeting them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO

import psutil

from kllm.engine.rank_channel import (
    BASE_DESCRIPTORS,
    HEARTBEAT,
    STEPS,
    Channel,
    address_of,
    allow_descriptors,
    identify,
    listen,
    local_address,
    new_key,
    usable_cores,
)
from kllm.engine.rank_protocol import AUTHKEY, DEATH
from kllm.errors import CapacityError, WorkerError, ending

# torchrun's names for the place of a process among those of its machine.
PLACE_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
MODULE = "kllm.engine.rank_supervisor"
DESCRIPTORS = 3  # for each rank, in the engine's process and in another rank
START_S = 120.0  # until every rank must have called back
HEARTBEAT_TIMEOUT_S = 20.0  # there is one every second
IDLE_BYTES = 64 << 20  # of host memory that a rank has for itself before it holds anything


@dataclass(slots=True)
class RankLink:
    """The connections to one rank."""

    steps: Channel
    heartbeats: socket.socket
    heard_s: float = field(default_factory=time.monotonic)

    def listen(self) -> None:
        """Read its heartbeats."""
        with contextlib.suppress(OSError):  # none came; a death shows on the other connection
            if self.heartbeats.recv(1 << 12):
                self.heard_s = time.monotonic()

    def close(self) -> None:
        """Close both connections."""
        self.steps.close()
        self.heartbeats.close()


@dataclass(slots=True)
class Supervisor:
    """The process that started the ranks of this machine and watches them."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]  # what it and the ranks print

    def first_death(self) -> str | None:
        """The first rank that died and how; None while all live."""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        found = [i for i, line in enumerate(lines) if line.startswith(DEATH)]
        if not found:
            code = self.process.poll()
            return f"the supervisor of the ranks {ending(code)}" if code else None
        first = lines[found[0]].removeprefix(DEATH)
        before = [line for line in lines[: found[0]] if line.strip()]
        return f"{first}: {before[-1].strip()[:300]}" if before and "exit code" in first else first

    def kill(self) -> None:
        """End it and all ranks it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


def start_here(world: int) -> tuple[list[RankLink], Supervisor]:
    """Start `world` ranks on this machine and wait until they have called.

    Raises:
        CapacityError: when this machine's memory, or its limit on open files, does not allow it.
        WorkerError: when they cannot be started or do not call back.
    """
    check_host_memory(world)
    allow_descriptors(BASE_DESCRIPTORS + DESCRIPTORS * world)
    key = new_key()
    with listen(local_address(), backlog=2 * world) as listener:
        variables = variables_for(world, os.environ)
        supervisor = start_ranks(address_of(listener), range(world), key, variables)
        try:
            return accept(listener, world, key, supervisor), supervisor
        except BaseException:
            supervisor.kill()
            raise


def check_host_memory(world: int, rank_bytes: int = 0) -> None:
    """Check that this machine holds the processes of `world` ranks.

    Args:
        rank_bytes: of host memory that each of them will fill.

    Raises:
        CapacityError: when it does not.
    """
    need, free = world * (IDLE_BYTES + rank_bytes), psutil.virtual_memory().available
    if need > free:
        raise CapacityError(
            f"{world} ranks on this machine need {need / 2**30:.1f} GiB of its memory and "
            f"{free / 2**30:.1f} GiB are free; use a smaller layout or model, run one rank with "
            "--fidelity rank-slice where the command has it, or start ranks with torchrun on "
            "several machines"
        )


def variables_for(world: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for ranks whose numbers say where they run, and that share this machine's cores.

    A shell or a launcher may have set other places: all ranks would then share one GPU.
    """
    found = {name: value for name, value in variables.items() if name not in PLACE_VARIABLES}
    found.setdefault("OMP_NUM_THREADS", str(max(1, int(usable_cores()) // world)))
    return found


def start_ranks(address: str, ranks: range, key: str, variables: Mapping[str, str]) -> Supervisor:
    """Start a process that forks these ranks, which will call `address`.

    Args:
        variables: its environment; PLACE_VARIABLES among them are taken for torchrun's.

    Raises:
        WorkerError: when it cannot be started.
    """
    log = tempfile.TemporaryFile()  # noqa: SIM115 - a file can be read after their death
    try:
        process = subprocess.Popen(
            (sys.executable, "-m", MODULE, address, str(ranks.start), str(len(ranks))),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**variables, AUTHKEY: key},
            process_group=0,  # a Ctrl-C of the terminal is for the engine's process alone
        )
    except OSError as error:
        raise WorkerError(f"cannot start ranks ({sys.executable}): {error.strerror}") from error
    return Supervisor(process, log)


def accept(listener: socket.socket, world: int, key: str, supervisor: Supervisor) -> list[RankLink]:
    """The connections of each rank.

    Raises:
        WorkerError: when a rank does not call in time.
    """
    found: dict[tuple[int, int], socket.socket] = {}
    deadline = time.monotonic() + START_S
    listener.settimeout(0.5)
    while len(found) < 2 * world:
        dead = supervisor.first_death()
        if dead or time.monotonic() > deadline:
            both = [n for n in range(world) if {(n, STEPS), (n, HEARTBEAT)} <= found.keys()]
            missing = sorted(set(range(world)) - set(both))
            why = dead or f"they did not call within {START_S:.0f} s"
            raise WorkerError(f"ranks {missing} did not start: {why}")
        try:
            caller, _ = listener.accept()
        except TimeoutError:
            continue
        who = identify(caller, key)
        if who is None:
            caller.close()
        else:
            found[who] = caller
    for rank in range(world):
        found[rank, STEPS].settimeout(HEARTBEAT_TIMEOUT_S)  # for a rank that does not read
        found[rank, HEARTBEAT].setblocking(False)
    return [RankLink(Channel(found[n, STEPS]), found[n, HEARTBEAT]) for n in range(world)]
