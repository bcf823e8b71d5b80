"""Stand for libraries that move buffers between processes; they import little, to start fast."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from kllm.hardware.links import Call


class Shared:
    """Works: both processes have the memory."""

    @contextmanager
    def offered(self, x: Tensor) -> Iterator[Tensor]:
        yield x

    @contextmanager
    def reader(self, x: Tensor, offer: Tensor) -> Iterator[Call]:
        def read() -> None:
            x.copy_(offer)

        yield read


class Wrong(Shared):
    @contextmanager
    def reader(self, x: Tensor, offer: Tensor) -> Iterator[Call]:
        def read() -> None:
            x.copy_(offer).add_(1)

        yield read


class Refused(Shared):
    @contextmanager
    def offered(self, x: Tensor) -> Iterator[Tensor]:
        print("E1 not this memory", flush=True)
        raise RuntimeError("cannot register\nat some line")
        yield x


def does_not_load() -> Shared:
    raise ImportError("libabsent.so.1: cannot open shared object file\nmore")


def dies() -> Shared:
    os.write(2, b"I1 started\nF2 check failed\n")
    os.kill(os.getpid(), signal.SIGKILL)
    return Shared()


def hangs() -> Shared:
    threading.Event().wait()
    return Shared()
