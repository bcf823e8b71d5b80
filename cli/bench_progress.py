"""How far a bench is, on stderr: a bar on a terminal, in a pipe a line every few seconds."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kllm.cli.console import err

if TYPE_CHECKING:
    from kllm.bench.base import ProgressHook

LINE_S = 4.0  # between two lines in a pipe


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
        task = bar.add_task(title, total=None)

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
            line = f"{title}: {latest[0]}, {time.monotonic() - begin:.0f} s"
            err.print(line, markup=False, highlight=False, soft_wrap=True)

    speaker = threading.Thread(target=speak, name="progress", daemon=True)
    speaker.start()
    try:
        yield hook
    finally:
        over.set()
        speaker.join()
