"""A process that acknowledges messages: as far from the engine's as those in which ranks run."""

import contextlib
import select
import socket
import subprocess
import sys
from collections.abc import Sequence

from kllm.engine.rank_channel import BASE_DESCRIPTORS, Channel, SpinWait, allow_descriptors
from kllm.errors import WorkerError, ending

PROCESSES = 2  # the engine's and this one


class Responder:
    """Starts the process and talks to it.

    Args:
        count: lines to it, one for each rank that it stands for.

    Raises:
        CapacityError: more lines than open files are allowed.
        OSError: when it cannot be started.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        allow_descriptors(BASE_DESCRIPTORS + 2 * count)
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [theirs for _, theirs in pairs]
        descriptors = [line.fileno() for line in theirs]
        command = [sys.executable, "-m", __name__, *map(str, descriptors)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            process_group=0,  # a Ctrl-C of the terminal is for the engine's process alone
        )
        for line in theirs:
            line.close()
        self._lines = _Lines([ours for ours, _ in pairs])

    def round_trip(self, messages: Sequence[bytes]) -> None:
        """Send a message on each line and wait until all have been read.

        Raises:
            WorkerError: when the process is gone.
        """
        try:
            for channel, data in zip(self._lines.channels, messages, strict=True):
                channel.send(data)
            awaited = len(messages)
            while awaited:
                awaited -= len(self._lines.receive())
        except (EOFError, OSError):
            raise WorkerError(
                f"the process that stands for the ranks {ending(self._process.wait())}; start the "
                "engine again"
            ) from None

    def close(self) -> None:
        """End the process."""
        for channel in self._lines.channels:
            channel.close()
        self._process.wait()


class _Lines:
    def __init__(self, connected: Sequence[socket.socket]) -> None:
        self.channels = [Channel(line) for line in connected]
        self._wait = SpinWait(PROCESSES)
        self._poll = select.poll()
        self._by_descriptor = {channel.fileno(): channel for channel in self.channels}
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.POLLIN)

    def receive(self) -> list[Channel]:
        """Wait for messages as ranks and their engine do; the lines that had some."""
        found = [self._by_descriptor[descriptor] for descriptor, _ in self._wait.wait(self._poll)]
        for channel in found:
            channel.receive()
        return found


def main() -> None:
    """Acknowledge messages until the other side is gone."""
    lines = _Lines([socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:]])
    with contextlib.suppress(EOFError, OSError):
        while True:
            for channel in lines.receive():
                channel.send(b"")


if __name__ == "__main__":
    main()
