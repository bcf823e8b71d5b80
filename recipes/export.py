"""A recipe as the nearest command line of another engine, and what that command leaves out."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from kllm.recipes import checkpoints
from kllm.recipes.schema import Recipe
from kllm.recipes.sglang import SGLANG
from kllm.recipes.translation import Target, Translation, Words
from kllm.recipes.vllm import VLLM
from kllm.registry import Registry

TARGETS: Registry[Target] = Registry("engine to export to", {"sglang": SGLANG, "vllm": VLLM})


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A command line and how it differs from the recipe."""

    target: str  # the engine, with the version that the names are of
    lines: tuple[Words, ...]  # of the command: the program with the model, then a flag each
    missing: Mapping[str, str]  # by setting: what has no equivalent, and why it matters
    approximate: Mapping[str, str]  # by setting: what is kept only nearly

    @property
    def command(self) -> str:
        """The command as a POSIX shell reads it, one flag a line."""
        return " \\\n    ".join(shlex.join(words) for words in self.lines)

    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "target": self.target,
            "command": self.command,
            "arguments": [word for words in self.lines for word in words],
            "missing": dict(self.missing),
            "approximate": dict(self.approximate),
        }


def export(recipe: Recipe, to: str) -> Export:
    """Translate a recipe.

    Args:
        to: a key of `TARGETS`.

    Raises:
        ConfigError: for an engine that is not known.
    """
    target = TARGETS[to]
    config = recipe.config()
    if config.device == "auto":
        config = replace(config, device=recipe.hardware.device)
    model, said = checkpoints.served(config.model)
    parts: dict[str, Translation] = {
        setting: rule(attrgetter(setting)(config), config) for setting, rule in target.rules.items()
    } | {"model": said}
    return Export(
        target=target.title,
        lines=((*target.program, model), *(words for p in parts.values() for words in p.flags)),
        missing={setting: p.missing for setting, p in parts.items() if p.missing},
        approximate={s: p.approximate for s, p in parts.items() if p.approximate}
        | dict(target.differs),
    )
