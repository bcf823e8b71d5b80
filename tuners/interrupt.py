"""Ctrl-C once: finish the running trial, then stop. Twice, or SIGTERM: stop at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether somebody asked to stop; looked at between trials."""

    def __init__(self) -> None:
        self.asked = False


@contextmanager
def listening(interrupt: Interrupt, notify: Callable[[], None]) -> Iterator[None]:
    """Turn the first Ctrl-C into `interrupt.asked` while the block runs.

    Args:
        interrupt: set by the first Ctrl-C; the second raises KeyboardInterrupt.
        notify: called with the first one, to tell the user what happens now.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        if interrupt.asked or number == signal.SIGTERM:
            interrupt.asked = True
            raise KeyboardInterrupt
        interrupt.asked = True
        notify()

    before = {
        number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
