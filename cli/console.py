"""The two consoles, `out` for results and `err` for the rest; how interrupted commands end."""

import os
import sys
import textwrap

import typer
from rich.console import Console
from rich.text import Text

from kllm.errors import DataError

INTERRUPTED = 130  # exit code after Ctrl-C or SIGTERM
WHOLE = 10_000  # columns: no table is as wide


class _Console(Console):
    """A console whose closed pipe does not end the command with the code of a regression."""

    def on_broken_pipe(self) -> None:
        raise SystemExit(unread().exit_code)


def _console(*, stderr: bool = False) -> Console:
    """A console that folds tables to a terminal or to COLUMNS, and in a pipe not at all."""
    console = _Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WHOLE
    return console


out, err = _console(), _console(stderr=True)


def say(console: Console, text: str, *, lead: str = "", style: str = "") -> None:
    """Print text in which words and paths stay whole: wrapped on a terminal, else as it is.

    Args:
        lead: stands before the text; on a terminal the lines below it are indented as far.
        style: of the lead where there is one, else of the text.
    """
    text = lead + text
    if console.is_terminal:
        indent = " " * len(lead)
        text = "\n".join(
            textwrap.fill(
                line,
                console.width,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            for line in text.replace("\n", f"\n{indent}").splitlines()  # those of a traceback
        )
    shown = Text(text)
    shown.stylize(style, 0, len(lead) or None)
    console.print(shown, soft_wrap=True)


def unread() -> typer.Exit:
    """What to raise where the reader of a pipe has gone, who wants no more and no words."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return typer.Exit(DataError.exit_code)


def interrupted(sentence: str) -> typer.Exit:
    """What to raise where a command is interrupted, after the sentence is said."""
    say(err, sentence)
    return typer.Exit(INTERRUPTED)
