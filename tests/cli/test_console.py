"""Sentences on a terminal and in a pipe: words and paths stay whole."""

from io import StringIO

import pytest
from rich.console import Console

from kllm.cli import console as consoles
from kllm.cli.console import say

PATH = "kllm-results/ring-vs-allgather-20261130T045848Z-722fab.json"
TEXT = f"deepseek-v4-flash has [1.1] times the throughput of all-gather, see {PATH} for more."


def printed(text: str = TEXT, *, terminal: bool, width: int = 40, lead: str = "") -> list[str]:
    file = StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, color_system=None)
    say(console, text, lead=lead, style="red")
    return file.getvalue().splitlines()


def test_a_terminal_wraps_between_words_and_indents_as_far_as_the_lead() -> None:
    lines = printed(terminal=True, lead="- ")
    assert lines[0].startswith("- deepseek-v4-flash has [1.1] times")
    assert all(line.startswith("  ") for line in lines[1:])
    assert " ".join(line[2:] for line in lines) == TEXT
    assert f"  {PATH}" in lines  # longer than the terminal, and whole
    assert all(len(line) <= 40 for line in lines if PATH not in line)


def test_a_traceback_keeps_its_lines() -> None:
    text = 'rank 1 failed\nTraceback:\n  File "rank.py", line 1'
    assert printed(text, terminal=True, lead="error: ") == [
        *("error: rank 1 failed", "       Traceback:", '         File "rank.py", line 1')
    ]
    assert printed(text, terminal=False, lead="error: ") == f"error: {text}".splitlines()


def test_a_pipe_has_one_line_without_styling() -> None:
    assert printed(terminal=False, lead="error: ") == [f"error: {TEXT}"]


def test_tables_in_a_pipe_are_folded_only_to_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert consoles._console().width == consoles.WHOLE
    monkeypatch.setenv("COLUMNS", "70")
    assert consoles._console().width == 70
