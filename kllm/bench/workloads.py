"""What an engine is asked to do: how long requests are, how many, and how they arrive.

Two ways of arriving (Schroeder et al. 2006, "Open versus closed"): a closed loop keeps a number
of requests in flight, so the load adapts to the engine; an open loop lets them arrive on their
own clock (Poisson, or a recorded trace), so a slow engine builds a queue.
"""

import csv
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from kllm.errors import ConfigError, DataError

SMALL_FACTOR = 16  # tiny models and CPUs get a preset's lengths divided by this
SMALL_MIN_CONCURRENCY = 2
MOST_REQUESTS = 10_000_000  # of a workload; more is a slip of the keys
# What parsers raise for numbers, cells and nesting beyond their limits.
UNREADABLE = (OverflowError, RecursionError, csv.Error)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts, drawn uniformly from low..high, both ends included."""

    low: int
    high: int = 0  # 0: always `low`

    def __post_init__(self) -> None:
        if self.high == 0:
            object.__setattr__(self, "high", self.low)
        if not 1 <= self.low <= self.high:
            raise ConfigError(f"lengths must satisfy 1 <= low <= high, got {self}")

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Read "512" or "256-768".

        Raises:
            ConfigError: anything else.
        """
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
        if not found:
            raise ConfigError(f"cannot read length '{text}'; write 512, or 256-768 for a range")
        return cls(int(found[1]), int(found[2] or 0))

    @property
    def mean(self) -> float:
        """Expected token count."""
        return (self.low + self.high) / 2

    def scaled(self, factor: float) -> "Lengths":
        """The same shape with every length multiplied; never below one token."""
        return Lengths(max(1, int(self.low * factor)), max(1, int(self.high * factor)))


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request."""

    arrival_s: float  # from the trace's first request
    isl: int
    osl: int


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request to send."""

    prompt_ids: list[int]
    max_tokens: int
    arrival_s: float  # from the start of the run; 0 in a closed loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A reproducible set of requests: the same seed gives the same tokens and arrivals.

    Exactly one way of arriving: `concurrency` (closed loop), `rate` (open loop, Poisson), or
    neither with a `trace`, whose own arrival times are then used. With a trace, requests take
    its lengths in order, and `isl` and `osl` only describe it.
    """

    isl: Lengths  # prompt tokens
    osl: Lengths  # output tokens
    num_requests: int
    concurrency: int | None = None  # requests in flight
    rate: float | None = None  # requests a second
    seed: int = 0
    name: str = "custom"
    trace: tuple[TraceRow, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.num_requests <= MOST_REQUESTS:
            raise ConfigError(
                f"num_requests must be in 1..{MOST_REQUESTS}, got {self.num_requests}"
            )
        if self.concurrency is not None and self.rate is not None:
            raise ConfigError("a workload has either a concurrency or a rate, not both")
        if self.concurrency is None and self.rate is None and not self.trace:
            raise ConfigError("a workload needs a concurrency, a rate or a trace")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.rate is not None and not (self.rate > 0 and math.isfinite(self.rate)):
            raise ConfigError(f"rate must be a positive number of requests/s, got {self.rate}")
        if self.trace and self.num_requests > len(self.trace):
            raise ConfigError(
                f"the trace has {len(self.trace)} requests and {self.num_requests} are asked for"
            )

    @property
    def closed(self) -> bool:
        """Whether the load adapts to the engine."""
        return self.concurrency is not None

    @property
    def max_tokens(self) -> int:
        """Tokens that the longest request can hold, prompt and output."""
        if self.trace:
            return max(row.isl + row.osl for row in self.trace[: self.num_requests])
        return self.isl.high + self.osl.high

    def shapes(self) -> list[TraceRow]:
        """Arrival and lengths of each request, in order of arrival."""
        rng = np.random.default_rng(self.seed)
        count = self.num_requests
        isl = rng.integers(self.isl.low, self.isl.high, size=count, endpoint=True)
        osl = rng.integers(self.osl.low, self.osl.high, size=count, endpoint=True)
        arrivals = np.zeros(count)
        if self.trace:
            rows = self.trace[:count]
            isl, osl = np.array([r.isl for r in rows]), np.array([r.osl for r in rows])
            if not self.closed:
                arrivals = np.array([r.arrival_s for r in rows])
        if self.rate is not None:
            arrivals = np.cumsum(rng.exponential(1 / self.rate, size=count))
        return [
            TraceRow(float(a), int(i), int(o)) for a, i, o in zip(arrivals, isl, osl, strict=True)
        ]

    def items(self, vocab_size: int) -> Iterator[WorkItem]:
        """Requests with random prompts; made one by one, long prompts never all at once."""
        # A stream apart from the lengths', so that a longer prompt does not change later lengths.
        rng = np.random.default_rng([self.seed, 1])
        for row in self.shapes():
            prompt = rng.integers(0, vocab_size, size=row.isl).tolist()
            yield WorkItem(prompt, row.osl, row.arrival_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a result document."""
        arrival = (
            {"concurrency": self.concurrency}
            if self.closed
            else {"rate_per_s": self.rate if self.rate is not None else "trace"}
        )
        return {
            "name": self.name,
            "isl": str(self.isl),
            "osl": str(self.osl),
            **arrival,
            "num_requests": self.num_requests,
            "seed": self.seed,
        }


# Means and spreads follow public traces where there is one. chat: Azure conversation 2023 (mean
# 1,155 in, 211 out; Patel et al. 2024). long-context: the middle of Mooncake's conversation
# trace (p50 6,909, p90 27,367 in, mean 343 out; Qin et al. 2025). agent: long tool context, short
# calls. batch: offline work, everything present from the start.
_PRESETS = {
    "chat": Workload(
        isl=Lengths(256, 2048), osl=Lengths(64, 384), num_requests=128, concurrency=32
    ),
    "long-context": Workload(
        isl=Lengths(7168, 27648), osl=Lengths(128, 576), num_requests=16, concurrency=4
    ),
    "agent": Workload(
        isl=Lengths(4096, 12288), osl=Lengths(32, 160), num_requests=64, concurrency=16
    ),
    "batch": Workload(isl=Lengths(512), osl=Lengths(512), num_requests=256, concurrency=256),
}
PRESETS = tuple(_PRESETS)


def preset(name: str, *, max_model_len: int, small: bool, seed: int = 0) -> Workload:
    """A named workload, cut to what the model can hold.

    Args:
        name: one of PRESETS.
        max_model_len: tokens a request may hold; lengths shrink in proportion to fit it.
        small: for tiny models and CPUs. Lengths are divided by SMALL_FACTOR, requests in flight
            and in total by 4, so that a run takes seconds; the shape stays.
        seed: of lengths and prompts.

    Raises:
        ConfigError: unknown name, or a model that holds less than two tokens.
    """
    if name not in _PRESETS:
        raise ConfigError(f"unknown workload '{name}'; known: {', '.join(PRESETS)}")
    workload = replace(_PRESETS[name], name=name, seed=seed)
    if small:
        assert workload.concurrency is not None
        workload = replace(
            workload,
            isl=workload.isl.scaled(1 / SMALL_FACTOR),
            osl=workload.osl.scaled(1 / SMALL_FACTOR),
            concurrency=max(SMALL_MIN_CONCURRENCY, workload.concurrency // 4),
            num_requests=max(8, workload.num_requests // 4),
        )
    return fit(workload, max_model_len)


def fit(workload: Workload, max_model_len: int) -> Workload:
    """Shrink lengths in proportion until the longest request fits.

    Raises:
        ConfigError: the workload is a trace, whose lengths are facts, or nothing can fit.
    """
    if workload.max_tokens <= max_model_len:
        return workload
    if workload.trace or max_model_len < 2:
        raise ConfigError(
            f"the longest request of workload '{workload.name}' has {workload.max_tokens} tokens "
            f"and the model holds {max_model_len}; choose shorter lengths"
        )
    factor = max_model_len / workload.max_tokens
    return replace(workload, isl=workload.isl.scaled(factor), osl=workload.osl.scaled(factor))


def parse(text: str, *, num_requests: int | None = None, seed: int = 0) -> Workload:
    """Read "ISL:OSL:C" (C requests in flight) or "ISL:OSL:R/s" (R requests a second).

    ISL and OSL are token counts or ranges: "512-1536:128:32". Without `num_requests` there are
    four requests for each one in flight, or 64 in an open loop.

    Raises:
        ConfigError: anything else.
    """
    parts = text.split(":")
    load = re.fullmatch(r"(\d+)|(\d*\.?\d+)/s", parts[2].strip()) if len(parts) == 3 else None
    if load is None:
        raise ConfigError(
            f"cannot read workload '{text}'; write ISL:OSL:C as in 512:128:16, ISL:OSL:R/s as in "
            f"512:128:2.5/s, or a preset: {', '.join(PRESETS)}"
        )
    concurrency = int(load[1]) if load[1] else None
    default = 4 * concurrency if concurrency else 64
    return Workload(
        name=text,
        isl=Lengths.parse(parts[0]),
        osl=Lengths.parse(parts[1]),
        concurrency=concurrency,
        rate=float(load[2]) if load[2] else None,
        num_requests=num_requests or max(1, default),
        seed=seed,
    )


def choose(
    text: str,
    *,
    max_model_len: int,
    small: bool,
    num_requests: int | None = None,
    seed: int = 0,
) -> Workload:
    """What a user means by a workload: a preset, a trace file, or "ISL:OSL:C".

    Raises:
        ConfigError: none of them, or too long for the model.
        DataError: a trace that cannot be read.
    """
    if text in _PRESETS:
        workload = preset(text, max_model_len=max_model_len, small=small, seed=seed)
        return replace(workload, num_requests=num_requests or workload.num_requests)
    if text.removesuffix(".gz").endswith((".csv", ".jsonl")):
        workload = from_trace(Path(text), num_requests=num_requests, seed=seed)
    else:
        workload = parse(text, num_requests=num_requests, seed=seed)
    if workload.max_tokens > max_model_len:
        raise ConfigError(
            f"the longest request of workload '{text}' has {workload.max_tokens} tokens and the "
            f"model holds {max_model_len}; choose shorter lengths"
        )
    return workload


def from_trace(
    path: Path,
    *,
    num_requests: int | None = None,
    concurrency: int | None = None,
    rate: float | None = None,
    seed: int = 0,
) -> Workload:
    """A workload with the lengths, and unless told otherwise the arrivals, of a trace file.

    Raises:
        DataError: the file cannot be read; the message names the line.
    """
    rows = read_trace(path)[:num_requests]
    return Workload(
        name=path.name,
        isl=Lengths(min(r.isl for r in rows), max(r.isl for r in rows)),
        osl=Lengths(min(r.osl for r in rows), max(r.osl for r in rows)),
        num_requests=len(rows),
        concurrency=concurrency,
        rate=rate,
        seed=seed,
        trace=tuple(rows),
    )


def read_trace(path: Path) -> list[TraceRow]:
    """Requests of a trace in order of arrival, rows of zero tokens left out.

    Two public formats, plain or gzipped: JSON lines with `timestamp` (ms), `input_length` and
    `output_length` (Mooncake), and CSV with TIMESTAMP (ISO 8601), ContextTokens and
    GeneratedTokens (Azure LLM inference trace).

    Raises:
        DataError: the file is missing or broken, or holds no request.
    """
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind not in ("csv", "jsonl"):
        raise DataError(f"trace {path} is neither .csv nor .jsonl (either may be gzipped)")
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise DataError(f"trace {path} cannot be read: {error}") from error
    rows = sorted(_rows(path, kind, lines), key=lambda row: row.arrival_s)
    rows = [row for row in rows if row.isl > 0 and row.osl > 0]
    if not rows:
        raise DataError(f"trace {path} holds no request")
    first = rows[0].arrival_s
    return [TraceRow(row.arrival_s - first, row.isl, row.osl) for row in rows]


def _rows(path: Path, kind: str, lines: list[str]) -> Iterator[TraceRow]:
    try:
        header = next(csv.reader(lines[:1]), []) if kind == "csv" else []
    except csv.Error as error:
        raise DataError(f"trace {path} line 1 cannot be read: {error}") from error
    for number, line in enumerate(lines[len(header) > 0 :], start=1 + (len(header) > 0)):
        if not line.strip():
            continue
        try:
            if kind == "csv":
                cells = dict(zip(header, next(csv.reader([line])), strict=True))
                arrival = datetime.fromisoformat(cells["TIMESTAMP"]).timestamp()
                yield TraceRow(arrival, int(cells["ContextTokens"]), int(cells["GeneratedTokens"]))
            else:
                data = json.loads(line)
                arrival = data["timestamp"] / 1000
                if not math.isfinite(arrival):
                    raise ValueError("timestamp is not finite")
                yield TraceRow(arrival, int(data["input_length"]), int(data["output_length"]))
        except (ValueError, KeyError, TypeError, *UNREADABLE) as error:
            raise DataError(f"trace {path} line {number} cannot be read: {error!r}") from error
