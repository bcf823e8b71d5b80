"""`kllm tune` in a pipe: never silent for long, and no line twice."""

import io
from itertools import pairwise

import pytest
from rich.console import Console

from kllm.cli.tune_view import SILENCE_S, LiveView, PlainView, view
from kllm.tuners.study import Trial

TRIAL = Trial(number=7, settings={}, state="complete", reason="", metrics={}, stored=None)


class Clock:
    """Seconds that only pass when told to."""

    now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now


@pytest.fixture
def piped() -> tuple[PlainView, Clock, io.StringIO]:
    """A view that writes into a text."""
    text, clock = io.StringIO(), Clock()
    return PlainView(Console(file=text, width=200), clock), clock, text


def test_comparison_is_not_silent_and_does_not_repeat_itself(piped) -> None:
    view, clock, text = piped
    said: list[float] = []
    for done in range(4):
        view.comparing(TRIAL, done, 4)
        for tick in range(140):  # runs of 14 s
            clock.now += 0.1
            before = text.tell()
            view.running(tick / 140)
            if text.tell() > before:
                said.append(clock.now)
    lines = text.getvalue().splitlines()
    assert lines[0] == "measuring #7 and the default again in turn, 4 runs"
    assert "run 2 of 4" in text.getvalue()
    assert max(b - a for a, b in pairwise(said)) <= SILENCE_S + 0.2
    assert all(len(line) < 60 for line in lines)
    assert len(lines) == len(set(lines))


def test_short_runs_say_nothing_in_between(piped) -> None:
    view, clock, text = piped
    for done in range(10):
        view.comparing(TRIAL, done, 10)
        clock.now += 0.4
        view.running(0.5)
    assert len(text.getvalue().splitlines()) == 1


def test_terminal_shows_how_far_the_comparison_is_and_takes_every_event() -> None:
    text = io.StringIO()
    console = Console(file=text, width=200, force_terminal=True)
    with view(console) as watcher:
        assert isinstance(watcher, LiveView)
        watcher.running(0.1)
        watcher.comparing(TRIAL, 3, 10)
        watcher.running(0.5)
    assert "#7 and the default again in turn: 3 of 10 runs" in text.getvalue()
