"""The two consoles, `out` for results and `err` for the rest; how interrupted commands end."""

import typer
from rich.console import Console

# Paths must stay on one line so that they can be copied and grepped: soft_wrap at the calls.
out = Console()
err = Console(stderr=True)

INTERRUPTED = 130  # exit code after Ctrl-C or SIGTERM


def interrupted(sentence: str) -> typer.Exit:
    """What to raise where a command is interrupted, after the sentence is said."""
    err.print(sentence, highlight=False, soft_wrap=True, markup=False)
    return typer.Exit(INTERRUPTED)
