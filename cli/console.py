"""The two consoles: `out` for results, `err` for progress, notes and errors."""

from rich.console import Console

# Paths must stay on one line so that they can be copied and grepped: soft_wrap at the calls.
out = Console()
err = Console(stderr=True)
