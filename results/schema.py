"""The result document: what was measured, where, how often, and what kind of number it is.

One `RunResult` is one JSON file. Field names end in their unit where they have one. The same
dataclasses give the published JSON Schema (`results/schema.json`, made by `json_schema`), so a
file that validates there loads here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from kllm.errors import DataError
from kllm.results.stats import median_ci

SCHEMA_VERSION = 1

Direction = Literal["higher", "lower", "none"]
Fidelity = Literal["real", "rank-slice", "modelled"]
Kind = Literal["bench", "tune", "load"]
# repeat: measured again in the same process; process: one value for each process; request: one
# value for each request (not independent repeats); exact: a count that repeats bit for bit.
Sample = Literal["repeat", "process", "request", "exact"]
Cell = float | int | bool | str | None
# State of a row, as "ok" and "failed" are: nothing went wrong, but the point was not to be begun.
LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device of the machine."""

    name: str
    memory_gib: float | None = None
    driver: str | None = None
    sm_clock_mhz: tuple[float, float] | None = None  # lowest and highest seen during the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The machine and software a number belongs to. None means that nobody recorded it."""

    platform: str | None = None  # operating system and architecture, without the host's name
    cpu: str | None = None
    cores: int | None = None
    memory_gib: float | None = None
    gpus: tuple[Gpu, ...] = ()
    link: str | None = None  # what joins the devices: "nvlink", "pcie", "none"
    python: str | None = None
    libraries: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Fingerprint":
        """Build one from plain data, as the hardware probe gives it; unknown keys are ignored.

        Raises:
            DataError: a field has another type.
        """
        try:
            return msgspec.convert(dict(values), cls, strict=False)
        except msgspec.ValidationError as error:
            raise DataError(f"machine fingerprint cannot be used: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One measured quantity with every repeat.

    `median` and `ci95` (percentile bootstrap) are over `values`; both are None when every
    repeat failed. `dropped` counts repeats that gave no finite number.
    """

    unit: str
    direction: Direction
    values: tuple[float, ...]
    median: float | None
    ci95: tuple[float, float] | None = None  # None with fewer than 3 values
    sample: Sample = "repeat"
    dropped: int = 0

    @classmethod
    def of(
        cls,
        values: Sequence[float],
        *,
        unit: str,
        direction: Direction,
        sample: Sample = "repeat",
    ) -> "Metric":
        """Summarise repeats; NaN and infinity become `dropped`, because JSON has neither."""
        finite = tuple(float(v) for v in values if math.isfinite(v))
        median, ci95 = median_ci(finite) if finite else (None, None)
        return cls(
            unit=unit,
            direction=direction,
            values=finite,
            median=median,
            ci95=ci95,
            sample=sample,
            dropped=len(values) - len(finite),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a series."""

    name: str
    unit: str = ""  # "" for names, states and plain counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A table: a sweep, the trials of a study, the requests of a run.

    Exactly one of `rows` (inline) and `file` (a CSV beside the JSON, header = column names) is
    set. Infinite cells are the strings "inf" and "-inf", missing ones null.
    """

    name: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...] | None = None
    file: str | None = None

    def __post_init__(self) -> None:
        if (self.rows is None) == (self.file is None):
            raise DataError(f"series '{self.name}' must have either rows or a file")
        width = len(self.columns)
        for index, row in enumerate(self.rows or ()):
            if len(row) != width:
                raise DataError(
                    f"series '{self.name}' row {index} has {len(row)} cells for {width} columns"
                )

    @classmethod
    def of(
        cls, name: str, rows: Sequence[Mapping[str, Any]], units: Mapping[str, str] | None = None
    ) -> "Series":
        """Make an inline series from dictionaries; a key that a row lacks is null there.

        Args:
            name: see `kllm.results.charts` for the names that reports draw.
            rows: one dictionary a row; columns appear in order of first use.
            units: column name to unit.
        """
        names = list(dict.fromkeys(key for row in rows for key in row))
        units = units or {}
        return cls(
            name=name,
            columns=tuple(Column(name=n, unit=units.get(n, "")) for n in names),
            rows=tuple(tuple(plain(row.get(n)) for n in names) for row in rows),
        )

    def to_dicts(self) -> list[dict[str, Cell]]:
        """The inline rows by column name, as `of` takes them; none where they are in a file."""
        names = [column.name for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows or ()]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Everything one bench, tune or load run has to say."""

    run_id: str
    command: tuple[str, ...]
    kind: Kind
    name: str  # which bench, or the study's name
    started_at: str  # ISO 8601, UTC
    model: str
    scale: str  # "full", "layers:N" or "tiny"
    dtype: str
    fidelity: Fidelity
    schema_version: int = SCHEMA_VERSION
    duration_s: float | None = None
    kllm_version: str | None = None  # None: another tool wrote it
    commit: str | None = None
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    layout: dict[str, Any] = field(default_factory=dict)  # parallel sizes
    workload: dict[str, Any] = field(default_factory=dict)  # ISL, OSL, concurrency, SLO
    settings: dict[str, Any] = field(default_factory=dict)  # engine settings
    metrics: dict[str, Metric] = field(default_factory=dict)
    series: tuple[Series, ...] = ()
    # Runs measured in alternation share this id: value i of one is the partner of value i.
    interleave: str | None = None
    claims: tuple[str, ...] = ()  # ids in kllm.results.claims that this run answers to
    notes: tuple[str, ...] = ()
    verdict: str | None = None  # one sentence
    boundary: str | None = None  # where the verdict stops being true, one sentence
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.schema_version > SCHEMA_VERSION:
            raise DataError(
                f"schema_version is {self.schema_version}, this kllm reads up to "
                f"{SCHEMA_VERSION}; update kllm"
            )
        names = [series.name for series in self.series]
        for name in names:
            if names.count(name) > 1:
                raise DataError(f"two series are named '{name}'")

    def find_series(self, name: str) -> Series | None:
        """The series of that name, or None."""
        return next((s for s in self.series if s.name == name), None)


def plain(value: Any) -> Any:
    """Turn a value into strict JSON data: NaN to None, infinity to "inf", numpy to Python."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "item") and callable(value.item) and getattr(value, "ndim", 0) == 0:
        value = value.item()  # numpy and torch scalars
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def encode(result: RunResult) -> bytes:
    """Strict, indented JSON.

    Raises:
        DataError: a dictionary field holds something that JSON has no form for.
    """
    try:
        raw = msgspec.json.encode(plain(msgspec.to_builtins(result)))
    except (TypeError, OverflowError) as error:
        raise DataError(f"result '{result.run_id}' cannot be written as JSON: {error}") from error
    return msgspec.json.format(raw, indent=1) + b"\n"


def decode(raw: bytes) -> RunResult:
    """Parse and validate one document.

    Raises:
        DataError: not JSON, a missing field or a wrong type; the message names the field.
    """
    try:
        return msgspec.json.decode(raw, type=RunResult)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DataError(str(error)) from error


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a result file."""
    schema = msgspec.json.schema(RunResult)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"kLLM run result, version {SCHEMA_VERSION}",
        **schema,
    }


def json_schema_text() -> str:
    """The exact text of results/schema.json."""
    return msgspec.json.format(msgspec.json.encode(json_schema()), indent=2).decode() + "\n"
