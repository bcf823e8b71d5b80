"""Search spaces as data: parameters, what is usable where, and what fits together.

A parameter is one line of data (`kllm.tuners.params`). `Space` combines the lines for one
`Site` (a model, a machine and a workload) and enumerates every valid point once. Searching an
enumerated set means that an invalid combination cannot be sampled, that nothing is measured
twice, and that a failed point is simply taken out.

Parameters that only make sense together (the degrees of a layout) are listed as rows: a point has
all values of one row.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kllm.config import EngineConfig
from kllm.errors import ConfigError

Value = bool | int | float | str
Settings = Mapping[str, Value]
Point = tuple[Value, ...]  # values in the order of Space.params

MAX_POINTS = 100_000  # beyond this, scoring every candidate takes longer than a trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What decides which values can be used: facts about model, machine and workload."""

    device: Literal["cpu", "cuda"]
    dtype: str  # compute dtype, resolved
    page_granule: int = 1  # tokens; page sizes are multiples of this
    default_page_size: int = 16  # what page_size 0 means here
    attention_backends: tuple[str, ...] = ()  # usable here; empty: the family has its own kernels
    kv_dtypes: tuple[str, ...] = ("auto",)  # usable here
    concurrency: int = 64  # most requests in flight
    prompt_tokens: int = 1024  # longest prompt
    request_tokens: int = 2048  # longest prompt with its output
    kv_memory_bytes: int | None = None  # for pages and request state; None: not known
    request_state_bytes: Mapping[str, int] = field(default_factory=dict)  # by KV dtype


def _everywhere(site: Site) -> bool:
    return True


def _any_value(value: Value, site: Site) -> bool:
    return True


def _always(settings: Settings) -> bool:
    return True


def _itself(value: Value, site: Site) -> Value:
    return value


def _alone(value: Value, settings: Settings, site: Site) -> Value:
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A numeric range, searched on a grid of `steps` values from `low` to `high`."""

    low: float
    high: float
    steps: int
    log: bool = False
    integer: bool = True

    def values(self) -> tuple[Value, ...]:
        """The grid, ascending, without repeats."""
        spaced = np.geomspace if self.log else np.linspace
        grid = [float(v) for v in spaced(self.low, self.high, self.steps)]
        if self.integer:
            return tuple(dict.fromkeys(round(v) for v in grid))
        return tuple(grid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One thing that a trial may set.

    `meaning` turns a value that asks for something ("auto", 0) into what it comes to at a site;
    two values with one meaning are one candidate. `within` turns that into what it comes to beside
    the other values of a point; two points that come to the same are one. An inactive parameter
    (`when` is false) keeps its default.
    """

    name: str
    target: str  # dotted path in EngineConfig
    choices: tuple[Value, ...] | Range
    log: bool = False  # numbers whose ratio matters, not their difference
    grows: bool = False  # a larger value never needs less memory
    applies: Callable[[Site], bool] = _everywhere
    usable: Callable[[Value, Site], bool] = _any_value
    when: Callable[[Settings], bool] = _always
    meaning: Callable[[Value, Site], Value] = _itself
    within: Callable[[Value, Settings, Site], Value] = _alone

    def effect(self, settings: Settings, site: Site) -> Value:
        """What the parameter comes to in a point."""
        return self.within(self.meaning(settings[self.name], site), settings, site)

    def candidates(self, site: Site, default: Value) -> tuple[Value, ...]:
        """The default first, then every usable choice that means something else."""
        if not self.applies(site):
            return (default,)
        listed = self.choices.values() if isinstance(self.choices, Range) else self.choices
        by_meaning = {_key(self.meaning(default, site)): default}
        for value in listed:
            if self.usable(value, site):
                by_meaning.setdefault(_key(self.meaning(value, site)), value)
        return tuple(by_meaning.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What must hold between parameters of one point."""

    reason: str  # "token_budget must be at least max_batch"
    needs: tuple[str, ...]  # parameters that it reads; not checked where one is missing
    holds: Callable[[Settings, Site], bool]


def _key(value: Value) -> tuple[str, Value]:
    # 1, 1.0 and True are equal as dictionary keys but are different settings.
    return type(value).__name__, value


class Space:
    """Every valid point of some parameters at a site.

    Args:
        params: the parameters, in the order points list their values.
        constraints: what must hold between them.
        site: facts about model, machine and workload.
        base: the engine's settings before tuning; holds the defaults.
        fixed: parameter name to the one value it may take.
        rows: values of the parameters that belong together, the default ones first.

    Raises:
        ConfigError: a fixed value is unknown or unusable here, the default settings are not a
            valid point, or the space is too large to enumerate.
    """

    def __init__(
        self,
        params: Sequence[Param],
        constraints: Sequence[Constraint],
        *,
        site: Site,
        base: EngineConfig,
        fixed: Settings | None = None,
        rows: Sequence[Settings] = (),
    ) -> None:
        self.params = tuple(params)
        self.constraints = tuple(constraints)
        self.site = site
        self.base = base
        self.joint = tuple(rows[0]) if rows else ()  # names of the parameters that have rows
        self._targets = {p.name: p.target for p in self.params}
        self.rows = self._matching(rows, fixed or {})
        self._fix(fixed or {})
        self.default = self._settings(tuple(_get(self.base, p.target) for p in self.params))
        self.candidates = {p.name: self._candidates(p) for p in self.params}
        plain = [len(c) for name, c in self.candidates.items() if name not in self.joint]
        size = int(np.prod([float(len(self.rows) or 1), *plain]))
        if size > MAX_POINTS:
            raise ConfigError(
                f"the search space has {size} combinations and at most {MAX_POINTS} can be "
                "searched; pin parameters with --fix NAME=VALUE"
            )
        broken = self.broken(self.default)
        if broken:
            raise ConfigError(
                f"the settings to start from are not valid here: {broken}; "
                "pin what has to change with --fix NAME=VALUE"
            )
        self.points = self._enumerate()
        self.index = {self._identity(point): i for i, point in enumerate(self.points)}

    def _matching(self, rows: Sequence[Settings], fixed: Settings) -> tuple[Settings, ...]:
        """The rows that have the fixed values; the first one becomes the default."""
        wanted = {name: value for name, value in fixed.items() if name in self.joint}
        found = tuple(row for row in rows if all(row[n] == v for n, v in wanted.items()))
        if rows and not found:
            words = " and ".join(f"{name}={value}" for name, value in wanted.items())
            raise ConfigError(
                f"no usable combination of {', '.join(self.joint)} has {words}; leave one of "
                "these out of --fix"
            )
        if found:
            values = {self._targets[name]: value for name, value in found[0].items()}
            self.base = with_values(self.base, values)
        return found

    def _candidates(self, param: Param) -> tuple[Value, ...]:
        if param.name in self.joint:
            return tuple(dict.fromkeys(row[param.name] for row in self.rows))
        if param.name in self.fixed:
            return (self.default[param.name],)
        return param.candidates(self.site, self.default[param.name])

    def _fix(self, fixed: Settings) -> None:
        by_name = {p.name: p for p in self.params}
        for name, value in fixed.items():
            if name not in by_name:
                raise ConfigError(
                    f"there is no parameter '{name}' to fix; known: {', '.join(sorted(by_name))}"
                )
            if name in self.joint:
                continue
            param = by_name[name]
            default = _get(self.base, param.target)
            usable = param.applies(self.site) and param.usable(value, self.site)
            if type(value) is not type(default) or (value != default and not usable):
                raise ConfigError(f"{name}={value} cannot be used with this model and machine")
            self.base = with_values(self.base, {param.target: value})
        self.fixed = dict(fixed)

    def _settings(self, point: Point) -> dict[str, Value]:
        return {p.name: value for p, value in zip(self.params, point, strict=True)}

    def _identity(self, point: Point) -> tuple[tuple[str, Value], ...]:
        return tuple(_key(value) for value in point)

    def _enumerate(self) -> tuple[Point, ...]:
        points: dict[tuple[tuple[str, Value], ...], Point] = {}
        plain = [p.name for p in self.params if p.name not in self.joint]
        values = [self.candidates[name] for name in plain]
        for row, raw in itertools.product(self.rows or ({},), itertools.product(*values)):
            chosen = {**row, **dict(zip(plain, raw, strict=True))}
            settings = {
                p.name: chosen[p.name] if p.when(chosen) else self.default[p.name]
                for p in self.params
            }
            if not self.broken(settings):
                effects = tuple(_key(p.effect(settings, self.site)) for p in self.params)
                points.setdefault(effects, tuple(settings.values()))
        return tuple(points.values())

    def broken(self, settings: Settings) -> str:
        """The first constraint that does not hold, or ""."""
        for constraint in self.constraints:
            present = all(name in settings for name in constraint.needs)
            if present and not constraint.holds(settings, self.site):
                return constraint.reason
        return ""

    @property
    def free(self) -> tuple[str, ...]:
        """Names of parameters with something to choose."""
        return tuple(p.name for p in self.params if len(self.candidates[p.name]) > 1)

    def settings(self, index: int) -> dict[str, Value]:
        """The settings of point `index`, fixed ones included."""
        return self._settings(self.points[index])

    def holds_more(self, one: int, other: int, *, alike: bool) -> bool:
        """Whether point `one` needs no less memory than `other` by all parameters that `grow`.

        Points of different rows cannot be told.

        Args:
            one: a point.
            other: a point.
            alike: ask in addition that all other parameters are equal.
        """
        pairs = zip(self.params, self.points[one], self.points[other], strict=True)
        return all(
            float(a) >= float(b) if p.grows else a == b or not (alike or p.name in self.joint)
            for p, a, b in pairs
        )

    def row_of(self, index: int) -> Point:
        """The values of point `index` that belong together."""
        return tuple(self.points[index][i] for i in self._joint_columns)

    @cached_property
    def _joint_columns(self) -> tuple[int, ...]:
        return tuple(i for i, p in enumerate(self.params) if p.name in self.joint)

    def find(self, settings: Settings) -> int | None:
        """Index of the point with these settings (names that are missing: the default)."""
        point = tuple(settings.get(p.name, self.default[p.name]) for p in self.params)
        return self.index.get(self._identity(point))

    def config(self, settings: Settings) -> EngineConfig:
        """The engine's config with these settings.

        Raises:
            ConfigError: a value that the config refuses.
        """
        named = {p.target: settings[p.name] for p in self.params if p.name in settings}
        return with_values(self.base, named)

    def describe(self) -> dict[str, list[Value]]:
        """Plain data that tells two spaces apart: each parameter's candidates."""
        return {name: list(values) for name, values in self.candidates.items()}

    @cached_property
    def features(self) -> NDArray[np.float64]:
        """[points, columns] in [0, 1]: numbers (log where ratios matter), names one-hot."""
        columns: list[NDArray[np.float64]] = []
        every = [self._settings(point) for point in self.points]
        for param in self.params:
            meanings = [param.effect(settings, self.site) for settings in every]
            distinct = list(dict.fromkeys(meanings))
            if len(distinct) < 2:
                continue
            numeric = all(isinstance(m, int | float) and not isinstance(m, bool) for m in distinct)
            if numeric:
                values = np.array([float(m) for m in meanings])
                values = np.log2(values) if param.log else values
                columns.append((values - values.min()) / np.ptp(values))
            else:
                # Half the distance of two numbers' ends: a name is one change, not a direction.
                columns += [0.5 * np.array([m == d for m in meanings], float) for d in distinct]
        return np.stack(columns, axis=1) if columns else np.zeros((len(self.points), 0))


def _get(config: EngineConfig, path: str) -> Value:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    assert isinstance(value, bool | int | float | str)
    return value


def with_values(config: EngineConfig, values: Settings) -> EngineConfig:
    """The config with values by dotted path; those of one part are set at once.

    Raises:
        ConfigError: values that the config refuses.
    """
    parts: dict[str, dict[str, Value]] = {}
    changes: dict[str, Any] = {}
    for path, value in values.items():
        head, _, rest = path.partition(".")
        if rest:
            parts.setdefault(head, {})[rest] = value
        else:
            changes[head] = value
    changes |= {head: replace(getattr(config, head), **new) for head, new in parts.items()}
    return replace(config, **changes)


def parse_fixed(texts: Sequence[str], params: Sequence[Param], base: EngineConfig) -> Settings:
    """Read NAME=VALUE texts; the value's type is that of the parameter's default.

    Raises:
        ConfigError: no such parameter, no value, or a value of another type.
    """
    by_name = {p.name: p for p in params}
    fixed: dict[str, Value] = {}
    for text in texts:
        name, equals, raw = text.partition("=")
        if not equals or name not in by_name:
            known = ", ".join(sorted(by_name))
            raise ConfigError(f"--fix takes NAME=VALUE, got '{text}'; known names: {known}")
        default = _get(base, by_name[name].target)
        try:
            fixed[name] = _parse(raw, default)
        except ValueError:
            kind = {bool: "true or false", int: "a whole number", float: "a number"}[type(default)]
            raise ConfigError(f"--fix {name} needs {kind}, got '{raw}'") from None
    return fixed


def _parse(raw: str, like: Value) -> Value:
    if isinstance(like, bool):
        if raw.lower() not in ("true", "false"):
            raise ValueError(raw)
        return raw.lower() == "true"
    if isinstance(like, int | float):
        return type(like)(raw)
    return raw
