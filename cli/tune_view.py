"""What `kllm tune` shows while it runs: a live table on a terminal, plain lines in a pipe."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kllm.cli.console import say
from kllm.tuners.outcome import PER_GPU
from kllm.tuners.setup import Setup, describe
from kllm.tuners.space import Value
from kllm.tuners.study import Trial
from kllm.tuners.tune import Watcher

SHOWN = 8  # newest trials in the live table
SILENCE_S = 5.0  # after this a run says how far it is


class PlainView(Watcher):
    """One line an event, and a short one where a run would be silent for long."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self.setup: Setup | None = None
        self.said_s = clock()
        self.doing = ""  # what runs, in few words

    def line(self, text: str) -> None:
        """Print a line that stays one."""
        self.said_s = self.clock()
        say(self.console, text)

    def note(self, sentence: str) -> None:
        """Print it."""
        self.line(sentence)

    def begun(self, study: str, setup: Setup, trials: int) -> None:
        """Say what is searched."""
        self.setup = setup
        self.doing = ""
        work, goal = setup.workload, setup.goal
        names = " and ".join(o.name for o in goal.objectives)
        ranks = ""
        if setup.deployment is not None:
            allowed, excluded = len(setup.space.rows), len(setup.deployment.excluded)
            over = f" over {setup.base.link}" if setup.fidelity == "rank-slice" else ""
            ranks = (
                f"; {setup.world} ranks, fidelity {setup.fidelity}{over}, {allowed} layouts "
                f"({excluded} left out)"
            )
        self.line(
            f"study {study}: {setup.resolved.display_name} on {setup.device_name}{ranks}; "
            f"{work.name} "
            f"({work.isl} tokens in, {work.osl} out, {work.concurrency} in flight, "
            f"{work.num_requests} requests a trial); {names} under {goal.slo}; "
            f"{len(setup.space.points)} valid settings, {trials} trials"
        )

    def resumed(self, trials: int, retried: int) -> None:
        """Say what was found."""
        again = f", {retried} interrupted ones run again" if retried else ""
        self.line(f"continuing after {trials} trials{again}")

    def started(self, number: int, settings: Mapping[str, Value]) -> None:
        """Remember what runs."""
        self.doing = f"#{number} "

    def ended(self, trial: Trial, best: Trial | None) -> None:
        """Print the trial and the best so far."""
        cells = self.cells(trial)
        suffix = ""
        if best is not None and self.setup is not None:
            first = self.setup.goal.objectives[0]
            fine = "" if self.setup.goal.feasible(best.metrics) else ", misses its SLO"
            suffix = f"; best so far {best.metrics[first.metric]:.4g} (#{best.number}{fine})"
        self.line(f"#{cells[0]} {cells[1]}: {cells[2]}, {cells[3]}{suffix}")

    def comparing(self, trial: Trial, done: int, total: int) -> None:
        """Say what is measured again, once for each candidate."""
        self.doing = f"run {done + 1} of {total} "
        if done == 0:
            self.line(f"measuring {self.again(trial)}, {total} runs")
        else:
            self._still("")

    def running(self, share: float) -> None:
        """Say how far the run is, when nothing was said for a while."""
        self._still(f"{share:.0%}")

    def _still(self, how_far: str) -> None:
        if self.clock() - self.said_s >= SILENCE_S:
            self.line(f"  {self.doing}{how_far}".rstrip())

    def again(self, trial: Trial) -> str:
        """What is measured again: a candidate in turn with the default, or the default alone."""
        if self.setup is not None and dict(trial.settings) == dict(self.setup.space.default):
            return f"#{trial.number}, the default, again"
        return f"#{trial.number} and the default again in turn"

    def cells(self, trial: Trial) -> tuple[str, str, str, str]:
        """Number, settings, state, and value or reason."""
        assert self.setup is not None
        space, goal = self.setup.space, self.setup.goal
        first = goal.objectives[0]
        value = trial.metrics.get(first.metric)
        figure = f"{value:.4g} {first.unit}" if value is not None else ""
        if PER_GPU in trial.metrics:
            figure += f", {trial.metrics[PER_GPU]:.4g} good ones per GPU ({self.setup.fidelity})"
        if goal.slo.limited and "attainment" in trial.metrics:
            figure += f", {trial.metrics['attainment']:.0%} in the SLO"
        words = trial.reason or figure
        settings = describe(trial.settings, space.default, space.free)
        return str(trial.number), settings, trial.state, words


class LiveView(PlainView):
    """The newest trials in a table that is redrawn, with the best so far below it."""

    def __init__(self, console: Console, live: Live) -> None:
        super().__init__(console)
        self.live = live
        self.rows: list[tuple[str, str, str, str]] = []
        self.best: Trial | None = None
        self.status = ""

    def started(self, number: int, settings: Mapping[str, Value]) -> None:
        """Show what runs."""
        assert self.setup is not None
        space = self.setup.space
        self.status = f"#{number} runs: {describe(settings, space.default, space.free)}"
        self.draw()

    def ended(self, trial: Trial, best: Trial | None) -> None:
        """Add a row."""
        self.rows.append(self.cells(trial))
        self.best, self.status = best, ""
        self.draw()

    def comparing(self, trial: Trial, done: int, total: int) -> None:
        """Show how far the comparison is."""
        self.status = f"{self.again(trial)}: {done} of {total} runs"
        self.draw()

    def running(self, share: float) -> None:
        """The table is there all the time."""

    def draw(self) -> None:
        """Redraw everything."""
        table = Table("#", "settings (what differs from the default)", "state", "value or reason")
        for row in self.rows[-SHOWN:]:
            table.add_row(*(Text(cell) for cell in row))
        parts: list[RenderableType] = [table]
        if self.best is not None and self.setup is not None:
            first = self.setup.goal.objectives[0]
            number, settings, _, _ = self.cells(self.best)
            value = f"{self.best.metrics[first.metric]:.4g} {first.unit}"
            parts.append(Text(f"best so far: #{number} {settings}: {first.name} {value}"))
        parts.append(Text(self.status))
        self.live.update(Group(*parts), refresh=True)


@contextmanager
def view(console: Console) -> Iterator[Watcher]:
    """The view that suits the console."""
    if not console.is_terminal:
        yield PlainView(console)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield LiveView(console, live)
