"""The KLLM_* environment variables: name, type, default and meaning, each read once.

Options of the command line have variables of their own (KLLM_TUNE_TRIALS for
`kllm tune --trials`); this table holds the variables that are not options.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kllm.errors import ConfigError


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("expected 0 or 1")


def _folder(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("it names the home folder of nobody; set it to a folder") from None


def _seconds(text: str) -> float:
    if not 0 < (seconds := float(text)) < float("inf"):
        raise ValueError("expected a number of seconds above 0")
    return seconds


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: how to read it and what it means."""

    name: str
    parse: Callable[[str], Any]
    default: str
    meaning: str


VARIABLES = (
    Variable("KLLM_DEBUG", _flag, "0", "Print tracebacks of errors; check invariants each step."),
    Variable("KLLM_HOME", _folder, "~/.cache/kllm", "Where measured ceilings are cached."),
    Variable(
        "KLLM_STEP_TIMEOUT_S", _seconds, "300", "A step of several ranks that takes longer is hung."
    ),
    Variable("KLLM_CONFIG", Path, "", "TOML file with defaults of the command line's options."),
)
_BY_NAME = {variable.name: variable for variable in VARIABLES}


@cache
def read(name: str) -> Any:
    """The parsed value of one variable of `VARIABLES`.

    Raises:
        ConfigError: when its text cannot be parsed.
    """
    variable = _BY_NAME[name]
    text = os.environ.get(name, variable.default)
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text!r} cannot be read: {error}") from None


def check() -> None:
    """Read every variable now.

    Raises:
        ConfigError: when one cannot be parsed.
    """
    for variable in VARIABLES:
        read(variable.name)


def debug() -> bool:
    """Whether KLLM_DEBUG asks for tracebacks and invariant checks."""
    return bool(read("KLLM_DEBUG"))


def home() -> Path:
    """The folder for what kLLM measured about this machine."""
    return Path(read("KLLM_HOME"))


def step_timeout_s() -> float:
    """Seconds after which a step of several ranks counts as hung."""
    return float(read("KLLM_STEP_TIMEOUT_S"))
