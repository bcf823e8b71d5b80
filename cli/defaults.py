"""Defaults of options from a TOML file: `[tune] trials = 40` is `kllm tune --trials 40`.

Precedence: option on the command line, KLLM_* variable, config file, built-in default. The
file is KLLM_CONFIG when set, else `kllm.toml` in the working folder, else none.
"""

import tomllib
from pathlib import Path
from typing import Any

import typer

from kllm import env
from kllm.errors import ConfigError, DataError

LOCAL_FILE = Path("kllm.toml")


def config_path() -> Path | None:
    """The config file in force, if there is one.

    Raises:
        ConfigError: when KLLM_CONFIG names a file that is not there.
    """
    named = env.read("KLLM_CONFIG")
    if named != Path(""):
        if not named.is_file():
            raise ConfigError(
                f"KLLM_CONFIG names {named}, which is not a file; correct or unset it"
            )
        return Path(named)
    return LOCAL_FILE if LOCAL_FILE.is_file() else None


def read_defaults(path: Path, command: Any) -> dict[str, Any]:
    """The file's tables as click's `default_map`, every key checked against the commands.

    Args:
        path: a TOML file.
        command: the root command, whose sub-commands and parameters are the valid keys.

    Raises:
        DataError: when the file cannot be read, or is not TOML.
        ConfigError: naming file and key, for a command or option that does not exist or a
            value of the wrong type.
    """
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"config file {path} cannot be read: {reason}") from None
    return _checked(path, data, command, ())


def _checked(path: Path, table: Any, command: Any, at: tuple[str, ...]) -> dict[str, Any]:
    commands = getattr(command, "commands", {})
    params = {p.opts[0].lstrip("-"): p for p in command.params if p.name != "help"}
    result: dict[str, Any] = {}
    for key, value in table.items():
        where = ".".join((*at, key))
        if isinstance(value, dict) and key in commands:
            result[key] = _checked(path, value, commands[key], (*at, key))
        elif (param := params.get(key.replace("_", "-"))) is not None and at:
            _check_value(path, where, param, value, typer.Context(command))
            result[param.name] = value
        else:
            known = ", ".join(sorted([*commands, *(params if at else [])]))
            raise ConfigError(f"config file {path}: unknown key '{where}'; known here: {known}")
    return result


def _check_value(path: Path, where: str, param: Any, value: Any, ctx: typer.Context) -> None:
    if isinstance(value, bool) != bool(getattr(param, "is_flag", False)):
        kind = "true or false" if param.is_flag else "a value that is not true or false"
        raise ConfigError(f"config file {path}: '{where}' takes {kind}, got {value!r}")
    try:
        param.process_value(ctx, value)
    except (ValueError, TypeError, typer.BadParameter) as error:
        reason = getattr(error, "message", "") or str(error)
        raise ConfigError(f"config file {path}: '{where}': {reason}, got {value!r}") from None
