"""What a bench measures, as it measures it: journalled at once, summarised at the end."""

import secrets
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from kllm import __version__, hardware
from kllm.errors import DataError
from kllm.results.schema import (
    Direction,
    Fidelity,
    Fingerprint,
    Kind,
    Metric,
    RunResult,
    Sample,
    Series,
)
from kllm.results.store import RunJournal, save

GIT_TIMEOUT_S = 10


def new_run_id(now: datetime | None = None) -> str:
    """A name that sorts by time and does not collide between processes."""
    now = now or datetime.now(UTC)
    return f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


@cache
def code_commit() -> str | None:
    """Commit of the checkout that kLLM runs from, "-dirty" with local changes; None outside one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    answers = []
    for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *command],
                capture_output=True,
                text=True,
                timeout=GIT_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode:
            return None
        answers.append(done.stdout.strip())
    return answers[0] + ("-dirty" if answers[1] else "")


class Clocks:
    """Lowest and highest SM clock of each GPU over the moments it was asked to look."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def look(self) -> None:
        """Read the clocks now; does nothing without a GPU."""
        if not hardware.detect().gpus:
            return
        now = hardware.sm_clocks_mhz()
        if not self.seen:
            self.seen = [(clock, clock) for clock in now]
        self.seen = [
            (min(low, clock), max(high, clock))
            for (low, high), clock in zip(self.seen, now, strict=False)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a run is about, known before it starts."""

    name: str  # of the bench or study
    model: str
    scale: str
    dtype: str
    command: tuple[str, ...] = ()
    kind: Kind = "bench"
    fidelity: Fidelity = "real"
    layout: Mapping[str, Any] | None = None
    workload: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] | None = None


class Record:
    """Collects the measurements of one run.

    Args:
        subject: what is measured.
        target: folder, or a path ending in ".json", for the result. A journal beside it holds
            every measurement as soon as it is made; `finish` replaces it by the result.

    Raises:
        DataError: the place cannot be written.
    """

    def __init__(self, subject: Subject, target: Path) -> None:
        if target.suffix == ".json" and target.is_dir():
            raise DataError(f"cannot write {target}: it is a folder; name a file or another folder")
        now = datetime.now(UTC)
        self.target = target
        self.header = RunResult(
            run_id=new_run_id(now),
            command=subject.command,
            kind=subject.kind,
            name=subject.name,
            started_at=now.isoformat(timespec="seconds"),
            model=subject.model,
            scale=subject.scale,
            dtype=subject.dtype,
            fidelity=subject.fidelity,
            kllm_version=__version__,
            commit=code_commit(),
            fingerprint=Fingerprint.from_dict(hardware.fingerprint()),
            layout=dict(subject.layout or {}),
            workload=dict(subject.workload or {}),
            settings=dict(subject.settings or {}),
        )
        self.clocks = Clocks()
        self.notes: list[str] = []
        self.claims: list[str] = []  # ids in kllm.results.claims
        self.verdict: str | None = None
        self.boundary: str | None = None
        self.interrupted = False
        self.values: dict[str, list[float]] = {}
        self._about: dict[str, dict[str, Any]] = {}
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self._units: dict[str, dict[str, str]] = {}
        self._start = time.monotonic()
        folder = target.parent if target.suffix == ".json" else target
        self._journal = RunJournal(folder, self.header)

    def __enter__(self) -> "Record":
        self.clocks.look()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._journal.__exit__(kind, error, trace)
        if not self.values and not self.rows and error is not None:
            self._journal.discard()

    def add(
        self,
        metric: str,
        value: float,
        *,
        unit: str,
        direction: Direction,
        sample: Sample = "repeat",
    ) -> None:
        """Store one repeat of a metric."""
        self.values.setdefault(metric, []).append(value)
        about: dict[str, Any] = {"unit": unit, "direction": direction, "sample": sample}
        self._about[metric] = about
        self._journal.record(metric, value, **about)

    def row(
        self, series: str, row: Mapping[str, Any], units: Mapping[str, str] | None = None
    ) -> None:
        """Store one row of a series; `units` names the columns that have one."""
        self.rows.setdefault(series, []).append(dict(row))
        self._units.setdefault(series, {}).update(units or {})
        self._journal.row(series, row)
        self.clocks.look()

    def details(self, series: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep many rows for the result without journalling them: a sync each would take longer
        than what they describe. They are lost if the process is killed, not on Ctrl-C."""
        self.rows.setdefault(series, []).extend(dict(row) for row in rows)
        self._units.setdefault(series, {})

    @property
    def kept(self) -> str:
        """Where the measurements of a run are that does not end with a result."""
        return f"what was measured is in {self._journal.path}, which `kllm report` reads"

    def metric(self, name: str) -> Metric:
        """The summary of a metric's repeats so far."""
        return Metric.of(self.values[name], **self._about[name])

    def ok_rows(self, series: str) -> Sequence[Mapping[str, Any]]:
        """Rows of the points that could run."""
        return [row for row in self.rows.get(series, []) if row.get("state", "ok") == "ok"]

    def result(self) -> RunResult:
        """Everything so far as one document."""
        self.clocks.look()
        notes = list(self.notes)
        if self.interrupted:
            notes.append("Interrupted: the points after the last one shown were not measured.")
        clocks = tuple(self.clocks.seen)
        return replace(
            self.header,
            duration_s=time.monotonic() - self._start,
            fingerprint=Fingerprint.from_dict(hardware.fingerprint(clocks)),
            metrics={name: self.metric(name) for name in self.values},
            series=tuple(
                Series.of(name, rows, self._units[name]) for name, rows in self.rows.items()
            ),
            notes=tuple(notes),
            claims=tuple(self.claims),
            verdict=self.verdict,
            boundary=self.boundary,
            extra={"interrupted": True} if self.interrupted else {},
        )

    def finish(self) -> tuple[RunResult, Path]:
        """Save the result and drop the journal.

        Raises:
            DataError: the place cannot be written; the journal is kept.
        """
        result = self.result()
        try:
            path = save(result, self.target)
        except DataError as error:
            raise DataError(f"{error}; {self.kept}") from error
        self._journal.path.unlink(missing_ok=True)
        return result, path
