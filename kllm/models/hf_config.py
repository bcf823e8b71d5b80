"""Reading keys of a Hugging Face `config.json`, with errors that name the key."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kllm.errors import ConfigError

_STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ABSENT = object()
MOST = 1 << 31  # of a size; what is beyond belongs to no model
MOST_LAYERS = 10_000  # which are listed one by one


class ConfigReader:
    """Typed access to the keys of a config.

    Rotary keys are looked up where both generations of the format put them: in
    `rope_parameters` (newer), in `rope_scaling`, or at the top level.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self._rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        if not isinstance(self._rope, Mapping):
            raise ConfigError(f"config.json: rope_scaling must be an object, got {self._rope!r}")

    def number(self, key: str, default: float | None = None) -> float:
        """A number, or `default` where the key is absent or null.

        Raises:
            ConfigError: when it is absent without a default, or no number.
        """
        return _number(key, self.data.get(key), default)

    def positive(self, key: str, default: int | None = None, most: int = MOST) -> int:
        """A whole number in 1..`most`, or `default` where the key is absent or null.

        Raises:
            ConfigError: when it is absent without a default, or anything else.
        """
        value = self.number(key, default)
        if not 1 <= value <= most or value != int(value):
            raise ConfigError(
                f"config.json: {key} must be a whole number in 1..{most}, got {value!r}"
            )
        return int(value)

    def require(self, key: str, allowed: Sequence[Any]) -> None:
        """Check that `key` is absent or one of the values the network implements.

        Raises:
            ConfigError: otherwise.
        """
        value = self.data.get(key, _ABSENT)
        if value is not _ABSENT and value not in allowed:
            known = ", ".join(repr(a) for a in allowed)
            raise ConfigError(f"config.json: {key} = {value!r} is not supported; only {known}")

    def rope_type(self, allowed: Sequence[str]) -> str:
        """The kind of frequency scaling, "default" where none is named.

        Raises:
            ConfigError: when it is not one of `allowed`.
        """
        kind = self._rope.get("rope_type") or self._rope.get("type") or "default"
        if kind not in allowed:
            raise ConfigError(
                f"config.json: rope type '{kind}' is not supported; known: {', '.join(allowed)}"
            )
        return str(kind)

    def rope_number(self, key: str, default: float | None = None) -> float:
        """A number of the rotary settings.

        Raises:
            ConfigError: when it is absent without a default, or no number.
        """
        return _number(key, self._rope.get(key, self.data.get(key)), default)

    def stored_dtype(self) -> str:
        """The checkpoint's main dtype as safetensors spells it; bfloat16 where not said."""
        name = self.data.get("dtype") or self.data.get("torch_dtype") or "bfloat16"
        if name not in _STORED:
            raise ConfigError(
                f"config.json: torch_dtype = {name!r} is not supported; known: {', '.join(_STORED)}"
            )
        return _STORED[name]

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of them, or nothing, as a tuple."""
        value = self.data.get(key)
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (int(value),)


def _number(key: str, value: Any, default: float | None) -> float:
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"config.json: {key} must be a number, got {value!r}")
    if not -math.inf < value < math.inf:
        raise ConfigError(f"config.json: {key} must be finite, got {value!r}")
    return value
