"""Recipes: one way of running a model, with the numbers that speak for it. Small TOML files.

A recipe says for which model, machine, workload and SLO it was found, which engine settings it
consists of, what was measured, and where it stops being the best (the boundary).
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec
import tomli_w

from kllm.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from kllm.errors import ConfigError, DataError
from kllm.results.store import write_atomic

RECIPE_VERSION = 1
# What keeps a text from being a recipe; nesting can be too deep to parse.
UNUSABLE = (
    tomllib.TOMLDecodeError,
    RecursionError,
    msgspec.ValidationError,
    ConfigError,
    DataError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machine that the numbers belong to."""

    device: Literal["cpu", "cuda"]
    name: str  # of the processor or GPU
    count: int = 1  # devices
    memory_gib: float | None = None  # of one device


@dataclass(frozen=True, slots=True, kw_only=True)
class SloLimits:
    """Limits that a share of the requests must meet."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    attainment: float = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One metric of the recipe's settings."""

    unit: str
    median: float
    ci95: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Where the settings were better than the next best ones."""

    statement: str  # one sentence
    # Factor on both SLO limits for which the settings stayed the best; None: no SLO, or not known.
    slo_factor: tuple[float, float] | None = None
    # By parameter: values tried with everything else equal that came within 5 % of it.
    near: dict[str, list[bool | int | float | str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A tuned deployment."""

    name: str
    model: str
    scale: str
    dtype: str
    hardware: Hardware
    workload: dict[str, Any]
    engine: dict[str, Any]  # EngineConfig fields that differ from the defaults, nested
    measured: dict[str, Measured]
    fidelity: Literal["real", "rank-slice", "modelled"]
    verdict: str  # against the default settings, one sentence
    recipe_version: int = RECIPE_VERSION
    objectives: list[str] = field(default_factory=list)
    slo: SloLimits | None = None
    boundary: Boundary | None = None
    results: list[str] = field(default_factory=list)  # run ids or file names it came from
    commit: str | None = None
    created_at: str | None = None  # ISO 8601, UTC

    def __post_init__(self) -> None:
        if self.recipe_version > RECIPE_VERSION:
            raise DataError(
                f"recipe_version is {self.recipe_version}, this kllm reads up to "
                f"{RECIPE_VERSION}; update kllm"
            )
        self.config()  # refuses engine settings that cannot be

    def config(self) -> EngineConfig:
        """The engine's config that the recipe stands for.

        Raises:
            ConfigError: an unknown setting, or a value that the engine refuses.
        """
        base = EngineConfig(model=self.model, scale=self.scale, dtype=self.dtype)
        config = _with(base, self.engine, "engine")
        assert isinstance(config, EngineConfig)
        return config

    @property
    def missed_slo(self) -> str:
        """Why the recipe's own figures do not meet its SLO, one sentence; "" where they do."""
        attained = self.measured.get("attainment")
        if self.slo is None or attained is None or attained.median >= self.slo.attainment:
            return ""
        return (
            f"it misses its own SLO: {attained.median:.0%} of requests met the limits and "
            f"{self.slo.attainment:.0%} must; tune again with a looser --slo or a lower load"
        )

    def shortage(self, gpus: int) -> str:
        """Why a machine with so many GPUs cannot run it, half a sentence; "" where it can."""
        needed = self.hardware.count if self.hardware.device == "cuda" else 0
        if gpus >= needed:
            return ""
        wants = f"{needed} GPU{'s' if needed > 1 else ''}"
        return f"it needs {wants} and this machine has {gpus or 'none'}"

    def misfits(self, device: str, device_name: str) -> list[str]:
        """Why the numbers may not hold on a machine; empty when it is the same kind."""
        reasons = []
        if device != self.hardware.device:
            reasons.append(f"it was measured on {self.hardware.device}, this machine has {device}")
        elif device_name != self.hardware.name:
            reasons.append(f"it was measured on {self.hardware.name}, this is {device_name}")
        return reasons


def _with(config: Any, changes: Mapping[str, Any], at: str) -> Any:
    known = {f.name for f in fields(config)}
    values = {}
    for name, value in changes.items():
        if name not in known:
            raise ConfigError(
                f"{at}.{name} is not an engine setting; known: {', '.join(sorted(known))}"
            )
        old = getattr(config, name)
        if is_dataclass(old):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{at}.{name} must be a table")
            values[name] = _with(old, value, f"{at}.{name}")
        elif type(old) is float and type(value) is int:
            values[name] = float(value)
        elif type(value) is not type(old):
            raise ConfigError(f"{at}.{name} must be of type {type(old).__name__}, got {value!r}")
        else:
            values[name] = value
    return replace(config, **values)


def engine_changes(config: EngineConfig) -> dict[str, Any]:
    """What a config changes from the defaults, nested as in a recipe.

    Model, scale and dtype are the recipe's own fields and left out.
    """
    changes = _changes(config, EngineConfig(model=config.model))
    return {k: v for k, v in changes.items() if k not in ("model", "scale", "dtype")}


def _changes(config: Any, base: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in fields(config):
        new, old = getattr(config, item.name), getattr(base, item.name)
        if isinstance(new, CacheConfig | SchedulerConfig | ParallelConfig):
            if nested := _changes(new, old):
                found[item.name] = nested
        elif new != old:
            found[item.name] = new
    return found


def dumps(recipe: Recipe) -> str:
    """The TOML text; the first lines say what it is and who measured it when."""
    head = (
        f"# {recipe.name}: {recipe.verdict}\n"
        f"# Measured on {recipe.hardware.name}, {recipe.created_at or 'date unknown'}, "
        f"commit {recipe.commit or 'unknown'}, fidelity {recipe.fidelity}.\n\n"
    )
    return head + tomli_w.dumps(_plain(asdict(recipe)))


def _plain(value: Any) -> Any:
    """TOML has no null and no tuples; what is None is left out."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.6g}")
    return value


def save(recipe: Recipe, path: Path) -> None:
    """Write a recipe.

    Raises:
        DataError: the place cannot be written.
    """
    write_atomic(path, dumps(recipe).encode())


def loads(text: str, origin: str) -> Recipe:
    """Read a recipe's text; `origin` names it in messages.

    Raises:
        DataError: not TOML, a missing or wrong field, or settings that the engine refuses; the
            message names the field.
    """
    try:
        return msgspec.convert(tomllib.loads(text), Recipe)
    except UNUSABLE as error:
        raise DataError(f"recipe {origin} cannot be used: {error}") from error


def load(name: str) -> Recipe:
    """Read a recipe from a file, or a packaged one by its name.

    Args:
        name: path of a TOML file, or a name that `kllm recipes list` shows.

    Raises:
        DataError: it cannot be read.
        ConfigError: there is no such file or name.
    """
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        try:
            return loads(path.read_text("utf-8"), name)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"recipe {name} cannot be read: {error}") from error
    packaged = dict(packaged_texts())
    if name not in packaged:
        known = ", ".join(sorted(packaged)) or "none are packaged"
        raise ConfigError(f"there is no recipe '{name}'; known: {known}; or give a .toml file")
    return loads(packaged[name], name)


def packaged_texts() -> Iterator[tuple[str, str]]:
    """(name, text) of the recipes that come with kLLM; a name is "model/file"."""
    for folder in resources.files("kllm.recipes").iterdir():
        if not folder.is_dir():
            continue
        for file in folder.iterdir():
            if file.name.endswith(".toml"):
                yield f"{folder.name}/{file.name.removesuffix('.toml')}", file.read_text("utf-8")
