"""How far a bench is, on stderr: a bar on a terminal, in a pipe a line every few seconds."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

from kllm.cli.console import err, say

if TYPE_CHECKING:
    from kllm.bench.base import ProgressHook

LINE_S = 8.0  # between two lines in a pipe


@dataclass(frozen=True, slots=True)
class Watch:
    """The progress of a command: what its bench tells, and the end, before results are printed."""

    hook: "ProgressHook"
    stop: Callable[[], None]


def _nothing(*told: object) -> None:
    """Where nobody watches."""


UNWATCHED = Watch(_nothing, _nothing)
_watch: ContextVar[Watch] = ContextVar("watch", default=UNWATCHED)


def watched(title: str, command: Callable[..., None]) -> Callable[..., None]:
    """A command that shows its progress from the start: its imports alone take seconds."""

    @wraps(command)
    def run(**given: Any) -> None:
        with ExitStack() as stack:
            hook = stack.enter_context(progress(title))
            token = _watch.set(Watch(hook, stack.close))
            stack.callback(_watch.reset, token)
            command(**given)

    return run


def watch() -> Watch:
    """The progress of the command that runs."""
    return _watch.get()


@contextmanager
def progress(title: str) -> Iterator["ProgressHook"]:
    """The hook that a bench tells what it does, for as long as the block runs."""
    if err.is_terminal:
        with _bar(title) as hook:
            yield hook
    else:
        with _lines(title) as hook:
            yield hook


@contextmanager
def _bar(title: str) -> Iterator["ProgressHook"]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(f"{title}: starting", total=None)

        def hook(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{title}: {what}", completed=done, total=total)

        yield hook


@contextmanager
def _lines(title: str) -> Iterator["ProgressHook"]:
    """A line every LINE_S seconds, whether or not there is news."""
    latest, over, begin = ["starting"], threading.Event(), time.monotonic()

    def hook(what: str, done: int, total: int) -> None:
        latest[0] = f"{what}, {done} of {total}"

    def speak() -> None:
        while not over.wait(LINE_S):
            say(err, f"{title}: {latest[0]}, {time.monotonic() - begin:.0f} s")

    speaker = threading.Thread(target=speak, name="progress", daemon=True)
    speaker.start()
    try:
        yield hook
    finally:
        over.set()
        speaker.join()
