"""A process that acknowledges messages: as far from the engine's as one in which a rank runs."""

import select
import socket
import subprocess
import sys

from kllm.engine.rank_channel import Channel, SpinWait
from kllm.errors import WorkerError

PROCESSES = 2  # the engine's and this one


class Relay:
    """Starts the process and wakes it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._line = _Line(ours)

    def wake(self, data: bytes) -> None:
        """Send a message and wait until it has been read.

        Raises:
            WorkerError: when the process is gone.
        """
        try:
            self._line.channel.send(data)
            self._line.receive()
        except (EOFError, OSError):
            raise WorkerError(
                f"the process that stands for a rank's ended with {self._process.wait()}; start "
                "the engine again"
            ) from None

    def close(self) -> None:
        """End the process."""
        self._line.channel.close()
        self._process.wait()


class _Line:
    def __init__(self, connected: socket.socket) -> None:
        self.channel = Channel(connected)
        self._wait = SpinWait(PROCESSES)
        self._poll = select.poll()
        self._poll.register(connected.fileno(), select.POLLIN)

    def receive(self) -> memoryview:
        """Wait for a message as ranks and their engine do."""
        self._wait.wait(self._poll)
        return self.channel.receive()


def main() -> None:
    """Acknowledge messages until the other side is gone."""
    line = _Line(socket.socket(fileno=int(sys.argv[1])))
    try:
        while True:
            line.receive()
            line.channel.send(b"")
    except (EOFError, OSError, KeyboardInterrupt):
        return


if __name__ == "__main__":
    main()
