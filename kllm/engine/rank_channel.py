"""What the engine's process and a rank talk through: two sockets.

On the line of `STEPS` goes one message at a time, to the rank and back. On the line of `HEARTBEAT`
the rank's supervisor sends a byte every second, and sees when the engine's process is gone: neither
waits for what the rank does.
"""

import os
import resource
import secrets
import select
import socket
import struct
import sys
import time
from pathlib import Path

from kllm.errors import CapacityError

STEPS, HEARTBEAT = range(2)
BUSY_S = 0.01  # at most for which a process waits busily; being woken takes some 50 us
TAKEN_S = 0.5e-3  # a core that is gone for so long has gone to another process
MOST_TAKEN = 20  # times between two looks; cores pause now and then, shared ones far more often
LOOK_S = 1.0  # between two looks at the machine's load
CHUNK = 1 << 16  # bytes; most messages come in one piece

Address = str | tuple[str, int]  # "@name" in Linux's namespace of local sockets; host and port

# What a process has open besides the sockets of ranks: pipes, logs, libraries' own files.
BASE_DESCRIPTORS = 32

_LENGTH = struct.Struct("!Q")
_HELLO = struct.Struct("!32sIB")  # the key, the rank's number, the line


class Channel:
    """One message at a time over a socket, whose timeout holds for each of them."""

    def __init__(self, connected: socket.socket) -> None:
        if connected.family != socket.AF_UNIX:
            # The rest of a message would wait for the acknowledgement of its beginning.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected

    def fileno(self) -> int:
        """The socket's descriptor, for polling."""
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Send a message.

        Raises:
            TimeoutError: when the other side does not read.
            OSError: when it is gone.
        """
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> memoryview:
        """Wait for a message. The other side sends no second one before it has an answer.

        Raises:
            EOFError, OSError: when the other side is gone.
        """
        data, end = bytearray(), 0
        while not end or len(data) < end:
            part = self._socket.recv(max(CHUNK, end - len(data)))
            if not part:
                raise EOFError("the other side closed the connection")
            data += part
            if not end and len(data) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        return memoryview(data)[_LENGTH.size :]

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class SpinWait:
    """How a process waits for others: busily where the answer is near, then asleep.

    It waits busily, for `BUSY_S` at most, if the last wait was as short as that and the machine has
    a core to spare; not for a while once other processes have taken the core several times.

    Args:
        processes: of this machine that may wait busily at the same time.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._near = True
        self._spare, self._looked_s = False, float("-inf")
        self._taken = 0  # times since the last look

    def wait(self, poll: select.poll, asleep_ms: int | None = None) -> list[tuple[int, int]]:
        """What `poll` finds, after `asleep_ms` at most (None: however long it takes)."""
        begin = now = time.monotonic()
        found = poll.poll(0)
        while not found and self._near and now - begin < BUSY_S and self._has_spare_core(now):
            os.sched_yield()
            found = poll.poll(0)
            before, now = now, time.monotonic()
            self._taken += now - before > TAKEN_S
        if not found:
            found = poll.poll(asleep_ms)
        self._near = time.monotonic() - begin < BUSY_S
        return found

    def _has_spare_core(self, now: float) -> bool:
        if now - self._looked_s > LOOK_S:
            self._looked_s = now
            self._spare = usable_cores() > max(self._processes, os.getloadavg()[0])
            self._taken = 0
        return self._spare and self._taken < MOST_TAKEN


def usable_cores() -> float:
    """Cores that this process may use, as far as its container lets it."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        quota, period = "max", ""
    return min(allowed or 1, float("inf") if quota == "max" else int(quota) / int(period))


def allow_descriptors(count: int) -> None:
    """Let this process, and those that it starts, have so many files and sockets open.

    Raises:
        CapacityError: when the system does not let it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise CapacityError(
            f"the layout needs about {count} open files and sockets and {hard} are allowed; raise "
            "the limit with `ulimit -n`, or use a smaller layout"
        )
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def new_key() -> str:
    """What ranks prove themselves with."""
    return secrets.token_hex(16)


def local_address() -> Address:
    """Where ranks of this machine can call: never a file, which a killed process would leave."""
    return f"@kllm-{secrets.token_hex(8)}" if sys.platform == "linux" else ("127.0.0.1", 0)


def listen(address: Address, backlog: int) -> socket.socket:
    """A socket that ranks can call.

    Raises:
        OSError: when there can be none at this address.
    """
    found, place = _socket(address)
    found.bind(place)
    found.listen(backlog)
    return found


def address_of(listener: socket.socket) -> str:
    """What `parse_address` takes."""
    match listener.getsockname():
        case bytes(name):
            return "@" + name[1:].decode()
        case host, port:
            return f"{host}:{port}"
    raise AssertionError("neither a local socket nor one of IPv4")


def call(address: Address, key: str, number: int, line: int) -> socket.socket:
    """A rank's connection to the engine's process.

    Raises:
        OSError: when nobody listens there.
    """
    found, place = _socket(address)
    found.connect(place)
    found.sendall(_HELLO.pack(key.encode(), number, line))
    return found


def identify(caller: socket.socket, key: str) -> tuple[int, int] | None:
    """The number and the line of a rank that calls; None when it is not one of ours.

    Whoever has not said so within `LOOK_S` is not: nobody can make the ranks behind it wait long.
    """
    data, end = b"", time.monotonic() + LOOK_S
    try:
        while len(data) < _HELLO.size:
            caller.settimeout(max(0.0, end - time.monotonic()))
            part = caller.recv(_HELLO.size - len(data))
            if not part:
                return None
            data += part
    except OSError:
        return None
    shown, number, line = _HELLO.unpack(data)
    return (number, line) if secrets.compare_digest(shown, key.encode()) else None


def parse_address(text: str) -> Address:
    """@NAME, or HOST:PORT."""
    if text.startswith("@"):
        return text
    host, _, port = text.rpartition(":")
    return host, int(port)


def _socket(address: Address) -> tuple[socket.socket, Address]:
    """A socket and what it can bind or connect to."""
    if isinstance(address, str):
        return socket.socket(socket.AF_UNIX), "\0" + address[1:]
    return socket.socket(socket.AF_INET), address
