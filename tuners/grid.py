"""Exhaustive grids: every valid point measured once to its end, stored, read back.

A grid file is JSON lines (gzipped if its name ends in .gz): a header, then a line for each
point as it was measured, so that a recording that was cut short goes on where it ended.
"""

import gzip
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kllm.config import EngineConfig
from kllm.errors import DataError
from kllm.tuners.outcome import Outcome
from kllm.tuners.params import CONSTRAINTS, PARAMS
from kllm.tuners.prior import Prior
from kllm.tuners.space import Site, Space, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a grid was recorded on."""

    identity: dict[str, Any]  # model, scale, workload, machine: as of a study
    site: Site
    base: EngineConfig
    candidates: dict[str, list[Value]]  # by parameter
    concurrency: int | None  # of a closed loop
    predicted: list[float] = field(default_factory=list)  # `Prior.logs`
    predicted_slo: list[float] = field(default_factory=list)  # `Prior.slo_logs`


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One point of a grid."""

    settings: dict[str, Value]
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Grid:
    """A complete recording."""

    header: Header
    space: Space
    outcomes: tuple[Outcome, ...]  # in the order of space.points

    @property
    def prior(self) -> Prior | None:
        """What the cost model said on the recorded machine."""
        if not self.header.predicted:
            return None
        return Prior(np.array(self.header.predicted), np.array(self.header.predicted_slo))

    @property
    def run_s(self) -> float:
        """What the whole grid took."""
        return sum(outcome.total_s for outcome in self.outcomes)


def space_of(header: Header) -> Space:
    """The space that was recorded, whatever has been added to the parameters since."""
    params = [
        replace(
            param,
            choices=tuple(header.candidates[param.name]),
            applies=lambda site: True,
            usable=lambda value, site: True,
        )
        for param in PARAMS
        if param.name in header.candidates
    ]
    return Space(params, CONSTRAINTS, site=header.site, base=header.base)


def load(path: Path) -> Grid:
    """Read a complete grid.

    Raises:
        DataError: the file cannot be read, or points are missing.
    """
    header, found = read_lines(path)
    if header is None:
        raise DataError(
            f"there is no grid in {path}; record one with `kllm tune-quality {path} --record MODEL`"
        )
    space = space_of(header)
    outcomes: dict[int, Outcome] = {}
    for measured in found:
        index = space.find(measured.settings)
        if index is None:
            raise DataError(f"{path} has a point outside its own space: {measured.settings}")
        outcomes[index] = measured.outcome
    missing = len(space.points) - len(outcomes)
    if missing:
        raise DataError(f"{path} lacks {missing} of {len(space.points)} points; record the rest")
    return Grid(header, space, tuple(outcomes[i] for i in range(len(space.points))))


def read_lines(path: Path) -> tuple[Header | None, list[Measured]]:
    """Header and points of a grid file that may be incomplete; (None, []) if there is none.

    Raises:
        DataError: the file cannot be read; names the line.
    """
    if not path.exists():
        return None, []
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"grid {path} cannot be read: {error}") from error
    lines = raw.split(b"\n")[:-1]  # what follows the last newline was cut off while written
    header, points = None, []
    for number, line in enumerate(lines, start=1):
        try:
            if number == 1:
                header = msgspec.json.decode(line, type=Header)
            else:
                points.append(msgspec.json.decode(line, type=Measured))
        except (msgspec.DecodeError, RecursionError) as error:
            raise DataError(f"grid {path} line {number} cannot be read: {error}") from error
    return header, points


def record(
    path: Path,
    header: Header,
    measure: Callable[[Mapping[str, Value]], Outcome],
    *,
    seed: int = 0,
    progress: Callable[[int, int, Outcome], None] = lambda done, total, outcome: None,
) -> None:
    """Measure every point that the file lacks, in random order, and append each at once.

    Random order spreads a machine's drift over the space instead of along a parameter.

    Args:
        path: not gzipped.
        header: what is recorded; must equal that of an existing file.
        measure: runs settings to their end.
        seed: of the order.
        progress: told points done, points in all, and the last outcome.

    Raises:
        DataError: the file belongs to another recording, or cannot be written.
    """
    space = space_of(header)
    old, found = read_lines(path)
    encoded = msgspec.json.encode(header)
    if old is not None and msgspec.json.encode(old) != encoded:
        raise DataError(f"{path} was recorded for something else; choose another file")
    done = {space.find(measured.settings) for measured in found}
    order = [int(i) for i in np.random.default_rng(seed).permutation(len(space.points))]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        with path.open("ab") as file:
            if old is None:
                file.write(encoded + b"\n")
            for index in order:
                if index in done:
                    continue
                measured = Measured(
                    settings=space.settings(index), outcome=measure(space.settings(index))
                )
                file.write(msgspec.json.encode(measured) + b"\n")
                file.flush()
                done.add(index)
                progress(len(done), len(space.points), measured.outcome)
    except OSError as error:
        raise DataError(f"grid {path} cannot be written: {error.strerror}") from error


def _cut_torn_line(path: Path) -> None:
    if path.exists() and not (raw := path.read_bytes()).endswith(b"\n"):
        path.write_bytes(raw[: raw.rfind(b"\n") + 1])
