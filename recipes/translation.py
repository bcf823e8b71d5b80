"""What one engine setting becomes on the command line of another engine.

An engine's table (`Target.rules`) has a rule for every setting of `EngineConfig`, under its path
as in "scheduler.max_batch". A rule gives flags, or says why there are none and what that changes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kllm.config import EngineConfig

Words = tuple[str, ...]  # what stands on one line: a flag and its value


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """One setting, in another engine's words."""

    flags: tuple[Words, ...] = ()
    missing: str = ""  # what has no equivalent and why it matters, one sentence
    approximate: str = ""  # how the flags, or the engine's default, differ from the setting


SAME = Translation()  # what the engine does without a flag
Rule = Callable[[Any, EngineConfig], Translation]  # of a setting's value and the whole config


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An engine that recipes are exported to."""

    title: str  # with the version that the names are of
    program: Words  # what starts the server, up to the model
    rules: Mapping[str, Rule]  # by setting, in the order of the command line; all but the model
    differs: Mapping[str, str]  # what is no setting of a recipe and still changes the numbers


def flag(name: str, *, unless: object = None) -> Rule:
    """The value behind a flag; left out for the value that the engine has anyway."""

    def rule(value: Any, config: EngineConfig) -> Translation:
        return SAME if value == unless else Translation(flags=((name, str(value)),))

    return rule


def missing(why: str, *, unless: object) -> Rule:
    """No equivalent, which is said of every value but one; `why` may name {value}."""

    def rule(value: Any, config: EngineConfig) -> Translation:
        return SAME if value == unless else Translation(missing=why.format(value=value))

    return rule


def choice(known: Mapping[str, Translation], why: str) -> Rule:
    """A value's own translation; values that are not `known` are missing, as in `missing`."""

    def rule(value: Any, config: EngineConfig) -> Translation:
        return known.get(value) or Translation(missing=why.format(value=value))

    return rule


def of_slices(why: str) -> Rule:
    """No equivalent, and of meaning only where one rank of a layout stood for all."""

    def rule(value: Any, config: EngineConfig) -> Translation:
        if config.fidelity != "rank-slice":
            return SAME
        return Translation(missing=why.format(value=value))

    return rule


def stage_ranks(config: EngineConfig) -> int:
    """Ranks of a pipeline stage, over which experts can be spread."""
    return config.parallel.world // config.parallel.pp


def _scale(value: str, config: EngineConfig) -> Translation:
    if value in ("auto", "full"):
        return SAME
    if value == "tiny":
        return Translation(
            missing="the recipe is of a tiny model, whose dimensions are its own: none of its "
            "settings or numbers carries over to the model that the command serves"
        )
    return Translation(
        missing=f"the recipe was found on a part of the model ({value}); the command serves all of "
        "it, which takes more memory and may have other best settings"
    )


def _fidelity(value: str, config: EngineConfig) -> Translation:
    if value == "real":
        return SAME
    return Translation(
        missing=f"one rank of {config.parallel.world} was measured on one device; the command "
        f"needs {config.parallel.world} devices"
    )


# How a recipe was measured: nothing that a server could be told, whatever the engine. It comes
# first, as it decides what the rest is worth.
MEASUREMENT: Mapping[str, Rule] = {
    "scale": _scale,
    "fidelity": _fidelity,
    "link": of_slices(
        "transfers were emulated as over {value}; they take what the links of your machine take"
    ),
    "slice_rank": of_slices("rank {value} stood for all; the command runs every rank"),
    "cache.rewind_tokens": missing(
        "room to take back {value} tokens is kept for speculation; other engines reserve what the "
        "speculation that they are told to run needs",
        unless=0,
    ),
}
