"""Result files on disk: written atomically, read with errors that name the file and the field.

<name>-<run_id>.json            one RunResult
<name>-<run_id>.<series>.csv    a series too long to be inline
<name>-<run_id>.partial.jsonl   a run in progress (or one that died): see `RunJournal`
"""

import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import msgspec
import pandas as pd

from kllm.errors import DataError
from kllm.results.schema import (
    Direction,
    Metric,
    RunResult,
    Sample,
    Series,
    decode,
    encode,
    plain,
)

MAX_INLINE_ROWS = 500
PARTIAL = ".partial.jsonl"
MAX_FILE_BYTES = 1 << 28  # many times the largest result: beyond it is a device, or another file


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file so that a crash at any moment leaves the old one or the new one.

    What is no file, such as /dev/stdout or a named pipe, is written to and stays what it is.

    Raises:
        DataError: the folder cannot be created or written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as handle:
                handle.write(content)
                handle.flush()
                os.fsync(handle.fileno())
            Path(name).chmod(0o644)  # mkstemp makes private files; results are meant to be shared
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself must survive a power cut
        finally:
            os.close(folder)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and those above it; the ones that were not there, the lowest first.

    Raises:
        OSError: it cannot be made.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return made


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders up to the first that holds something."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def slug(text: str) -> str:
    """A name that is safe in a file name on every system."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "result"


def result_path(folder: Path, result: RunResult) -> Path:
    """Where `save` puts a result in a folder."""
    return folder / f"{slug(result.name)}-{slug(result.run_id)}.json"


def save(result: RunResult, target: Path) -> Path:
    """Write a result; long series go to CSV files beside it.

    Args:
        result: what to write.
        target: a path ending in ".json", or a folder.

    Returns:
        The JSON file's path.

    Raises:
        DataError: the place cannot be written, or a value has no JSON form.
    """
    path = target if target.suffix == ".json" else result_path(target, result)
    series = []
    for item in result.series:
        if item.rows is not None and len(item.rows) > MAX_INLINE_ROWS:
            file = f"{path.stem}.{slug(item.name)}.csv"
            text = frame(item).to_csv(index=False)
            write_atomic(path.parent / file, text.encode())
            item = replace(item, rows=None, file=file)
        series.append(item)
    write_atomic(path, encode(replace(result, series=tuple(series))))
    return path


def load(path: Path) -> RunResult:
    """Read one result with all of its series inline.

    Raises:
        DataError: missing, not JSON, or a field is wrong; names the file and the field.
    """
    result = parse(path, read_bytes(path))
    return replace(result, series=tuple(_inline(s, path) for s in result.series))


def read_bytes(path: Path) -> bytes:
    """A file's content.

    Raises:
        DataError: it cannot be read, or is no result by its size.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise DataError(
            f"{path} holds more than {MAX_FILE_BYTES >> 20} MiB, more than any result does"
        )
    return raw


def parse(path: Path, raw: bytes) -> RunResult:
    """Decode a result whose errors name the file."""
    try:
        return decode(raw)
    except DataError as error:
        raise DataError(f"{path} is not a usable kLLM result: {error}") from error


def _inline(series: Series, path: Path) -> Series:
    if series.file is None:
        return series
    beside = path.parent / series.file
    text = read_bytes(beside).decode("utf-8", errors="replace")
    try:
        table = pd.read_csv(StringIO(text))
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise DataError(f"{beside}, series '{series.name}', is not CSV: {error}") from error
    names = [c.name for c in series.columns]
    if missing := [n for n in names if n not in table.columns]:
        raise DataError(f"{beside} lacks column '{missing[0]}' of series '{series.name}'")
    rows = tuple(tuple(plain(cell) for cell in row) for row in table[names].to_numpy(object))
    return replace(series, rows=rows, file=None)


def frame(series: Series) -> pd.DataFrame:
    """A series as a table; columns that hold numbers are numeric, "inf" included."""
    names = [c.name for c in series.columns]
    table = pd.DataFrame(list(series.rows or ()), columns=names)
    for name in names:
        try:
            table[name] = pd.to_numeric(table[name])
        except (ValueError, TypeError):
            continue  # names and states stay as they are
    return table


def list_results(folder: Path) -> list[Path]:
    """The result files of a folder and of the folders below it, by path.

    Raises:
        DataError: no such folder.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    return sorted(p for p in folder.rglob("*.json") if not p.name.startswith("."))


class RunJournal:
    """What a run has measured so far, one synced line each: nothing measured is ever lost.

    Args:
        folder: where the result will be saved.
        header: the result without its measurements (identity, machine, workload).

    Raises:
        DataError: the file cannot be created.
    """

    def __init__(self, folder: Path, header: RunResult) -> None:
        self._folder = folder
        try:
            self._made = make_folder(folder)
        except OSError as error:
            raise DataError(f"cannot write {folder}: {error.strerror or error}") from error
        self.path = result_path(folder, header).with_suffix(PARTIAL)
        write_atomic(self.path, _line({"header": msgspec.to_builtins(header)}))
        try:
            self._file: TextIO = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror or error}") from error

    def __enter__(self) -> "RunJournal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def record(
        self,
        metric: str,
        value: float,
        *,
        unit: str,
        direction: Direction,
        sample: Sample = "repeat",
    ) -> None:
        """Store one repeat of one metric."""
        about = {"unit": unit, "direction": direction, "sample": sample}
        self._append({"metric": metric, "value": value, **about})

    def row(self, series: str, row: Mapping[str, Any]) -> None:
        """Store one row of a series."""
        self._append({"series": series, "row": dict(row)})

    def finish(self, result: RunResult) -> Path:
        """Save the complete result, then drop the journal."""
        path = save(result, self._folder)
        self._file.close()
        self.path.unlink(missing_ok=True)
        return path

    def discard(self) -> None:
        """Remove it, and the folders that were made for it: nothing was measured."""
        self._file.close()
        self.path.unlink(missing_ok=True)
        remove_empty(self._made)

    def _append(self, entry: Mapping[str, Any]) -> None:
        try:
            self._file.write(_line(entry).decode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror or error}") from error


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(plain(entry), allow_nan=False).encode() + b"\n"


def recover(path: Path) -> RunResult:
    """The result of a run that died, from its journal; a torn last line is skipped.

    Raises:
        DataError: not a journal, or a line before the last is damaged.
    """
    entries = _entries(path, read_bytes(path))
    first = next(entries, {})
    if "header" not in first:
        raise DataError(f"{path} is not a run journal: its first line has no header")
    header = parse(path, msgspec.json.encode(first["header"]))
    values: dict[str, list[float]] = {}
    about: dict[str, dict[str, Any]] = {}
    rows: dict[str, list[Mapping[str, Any]]] = {}
    try:
        for entry in entries:
            if "metric" in entry:
                value = math.nan if entry["value"] is None else float(entry["value"])
                values.setdefault(entry["metric"], []).append(value)
                about[entry["metric"]] = {k: entry[k] for k in ("unit", "direction", "sample")}
            else:
                rows.setdefault(entry["series"], []).append(entry["row"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} has an entry that is not a measurement: {error}") from error
    return replace(
        header,
        metrics={name: Metric.of(values[name], **about[name]) for name in values},
        series=tuple(Series.of(name, table) for name, table in rows.items()),
        notes=(*header.notes, "The run did not finish; these are the measurements it made."),
    )


def _entries(path: Path, raw: bytes) -> Iterator[dict[str, Any]]:
    lines = raw.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not raw.endswith(b"\n"):
                return
            raise DataError(f"{path} line {number} is damaged: {error}") from error
        if not isinstance(entry, dict):
            raise DataError(f"{path} line {number} is not an object")
        yield entry
