"""What "better" means: service-level objectives, objectives, and the score of a trial."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kllm.errors import ConfigError
from kllm.registry import Registry

UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
DEFAULT_SLO = "ttft=2s,tpot=50ms"
DEFAULT_ATTAINMENT = 0.9  # share of requests that must meet the limits


class Timed(Protocol):
    """A request that ended."""

    @property
    def ttft_s(self) -> float:
        """Arrival to first token."""

    @property
    def tpot_s(self) -> float | None:
        """Mean time between later tokens; None for a single one."""

    @property
    def ok(self) -> bool:
        """Whether it ran to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits that a share of the requests must meet."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    attainment: float = DEFAULT_ATTAINMENT

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Read "ttft=2s,tpot=50ms" or "ttft=500ms,attainment=0.99"; units s, ms, us.

        Raises:
            ConfigError: an unknown key, a missing unit, or a limit that is not positive.
        """
        values: dict[str, float] = {}
        for part in text.split(","):
            key, _, raw = (piece.strip() for piece in part.partition("="))
            if key in values or key not in ("ttft", "tpot", "attainment"):
                problem = "given twice" if key in values else "unknown"
                raise ConfigError(
                    f"SLO '{text}': '{key}' is {problem}; write it as ttft=2s,tpot=50ms"
                )
            values[key] = _share(raw, text) if key == "attainment" else _seconds(raw, text)
        names = {"ttft": "ttft_s", "tpot": "tpot_s", "attainment": "attainment"}
        slo = cls(**{names[key]: value for key, value in values.items()})
        if not slo.limited:
            raise ConfigError(f"SLO '{text}' has no limit; give ttft=..., tpot=... or both")
        return slo

    @property
    def limited(self) -> bool:
        """Whether there is a limit at all."""
        return math.isfinite(self.ttft_s) or math.isfinite(self.tpot_s)

    def met_by(self, row: Timed) -> bool:
        """Whether one request met every limit."""
        fast = row.tpot_s is None or row.tpot_s <= self.tpot_s
        return row.ok and row.ttft_s <= self.ttft_s and fast

    def ratio(self, row: Timed) -> float:
        """The request's worst time over its limit; at most 1 meets the SLO."""
        if not row.ok:
            return math.inf
        return max(row.ttft_s / self.ttft_s, (row.tpot_s or 0.0) / self.tpot_s)

    def scaled(self, factor: float) -> "Slo":
        """Both limits times `factor`."""
        return Slo(
            ttft_s=self.ttft_s * factor, tpot_s=self.tpot_s * factor, attainment=self.attainment
        )

    def __str__(self) -> str:
        limits = [
            f"{name} {_duration(value)}"
            for name, value in (("TTFT", self.ttft_s), ("TPOT", self.tpot_s))
            if math.isfinite(value)
        ]
        if not limits:
            return "no SLO"
        return f"{' and '.join(limits)} for {self.attainment:.0%} of requests"

    def to_dict(self) -> dict[str, float]:
        """Plain data for results and recipes; limits that are not set are left out."""
        values = {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "attainment": self.attainment}
        return {k: v for k, v in values.items() if math.isfinite(v)} if self.limited else {}


def _seconds(raw: str, text: str) -> float:
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(s|ms|us)", raw)
    value = float(found[1]) * UNITS_S[found[2]] if found else 0.0
    if value <= 0:
        raise ConfigError(
            f"SLO '{text}': '{raw}' is not a positive time with its unit (s, ms, us), as in 50ms"
        )
    return value


def _share(raw: str, text: str) -> float:
    try:
        value = float(raw.removesuffix("%")) / (100 if raw.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0.1 <= value <= 1:
        raise ConfigError(f"SLO '{text}': attainment must be a share from 0.1 to 1, got '{raw}'")
    return value


def _duration(seconds: float) -> str:
    for unit, size in UNITS_S.items():
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One figure to push up or down."""

    name: str
    metric: str  # a key of kllm.tuners.outcome.METRICS
    direction: Literal["maximize", "minimize"]
    unit: str

    @property
    def sign(self) -> int:
        """Multiplies a value so that more is better."""
        return 1 if self.direction == "maximize" else -1


OBJECTIVES: Registry[Objective] = Registry(
    "objective",
    {
        "goodput": Objective(
            name="goodput", metric="goodput_tokens_per_s", direction="maximize", unit="tokens/s"
        ),
        "throughput": Objective(
            name="throughput", metric="output_tokens_per_s", direction="maximize", unit="tokens/s"
        ),
        "latency": Objective(name="latency", metric="e2e_p50_ms", direction="minimize", unit="ms"),
    },
)


@dataclass(frozen=True, slots=True)
class Goal:
    """Objectives under an SLO."""

    objectives: tuple[Objective, ...]
    slo: Slo

    @classmethod
    def of(cls, names: Sequence[str], slo: str | None) -> "Goal":
        """Read option values; goodput without an SLO gets DEFAULT_SLO.

        Raises:
            ConfigError: unknown or repeated objective, or an SLO that cannot be read.
        """
        if len(set(names)) != len(names):
            raise ConfigError(f"an objective is given twice: {', '.join(names)}")
        objectives = tuple(OBJECTIVES[name] for name in names or ("goodput",))
        text = slo or (DEFAULT_SLO if any(o.name == "goodput" for o in objectives) else "")
        return cls(objectives, Slo.parse(text) if text else Slo())

    @property
    def single(self) -> bool:
        """Whether there is one objective, hence one best trial."""
        return len(self.objectives) == 1

    def values(self, metrics: Mapping[str, float]) -> list[float] | None:
        """The objectives' values, or None when a metric is missing."""
        found = [metrics.get(o.metric) for o in self.objectives]
        return [v for v in found if v is not None] if None not in found else None

    def feasible(self, metrics: Mapping[str, float]) -> bool:
        """Whether a run met its SLO."""
        return not self.slo.limited or metrics.get("attainment", 0.0) >= self.slo.attainment

    def deficit(self, metrics: Mapping[str, float]) -> float:
        """How far attainment is below its target; 0 or less is feasible."""
        return self.slo.attainment - metrics.get("attainment", 0.0) if self.slo.limited else 0.0

    def better(self, new: Mapping[str, float], old: Mapping[str, float] | None) -> bool:
        """Whether `new` beats `old` in the first objective; meeting the SLO comes first."""
        if self.values(new) is None:
            return False
        if old is None:
            return True
        if self.feasible(new) != self.feasible(old):
            return self.feasible(new)
        if not self.feasible(new):
            return new.get("attainment", 0.0) > old.get("attainment", 0.0)
        first = self.objectives[0]
        return first.sign * new[first.metric] > first.sign * old[first.metric]

    def dominates(self, a: Mapping[str, float], b: Mapping[str, float]) -> bool:
        """Whether `a` is at least as good as `b` everywhere and better somewhere."""
        pairs = [(o.sign * a[o.metric], o.sign * b[o.metric]) for o in self.objectives]
        return all(x >= y for x, y in pairs) and any(x > y for x, y in pairs)

    def front(self, runs: Sequence[Mapping[str, float]]) -> list[int]:
        """Indices of the runs that no other dominates, among those that meet the SLO."""
        fine = [i for i, m in enumerate(runs) if self.values(m) is not None and self.feasible(m)]
        return [i for i in fine if not any(self.dominates(runs[j], runs[i]) for j in fine)]

    def to_dict(self) -> dict[str, object]:
        """Plain data for results and for telling studies apart."""
        return {"objectives": [o.name for o in self.objectives], "slo": self.slo.to_dict()}
