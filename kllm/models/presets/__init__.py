"""Published model sizes: the content of each model's `config.json`, one file a model."""

import difflib
import json
from importlib import resources
from typing import Any

from kllm.errors import ConfigError

ALIASES = {"deepseek-v4": "deepseek-v4-flash"}


def names() -> list[str]:
    """The presets, sorted, without aliases."""
    files = resources.files(__name__).iterdir()
    return sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json"))


def canonical(name: str) -> str:
    """The preset that `name` or alias `name` (any case) stands for.

    Raises:
        ConfigError: for an unknown name; the message has the close matches or all presets.
    """
    wanted = name.lower()
    wanted = ALIASES.get(wanted, wanted)
    known = names()
    if wanted in known:
        return wanted
    close = difflib.get_close_matches(wanted, [*known, *ALIASES], n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"presets: {', '.join(known)}"
    raise ConfigError(
        f"unknown model '{name}': no preset, folder or GGUF file has this name; {hint}"
    )


def load(name: str) -> dict[str, Any]:
    """The `config.json` content of a preset.

    Raises:
        ConfigError: for an unknown name.
    """
    text = resources.files(__name__).joinpath(f"{canonical(name)}.json").read_text("utf-8")
    data: dict[str, Any] = json.loads(text)
    return data
