"""Studies in storage: created, resumed, told apart, and their trials read back."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from kllm.errors import ConfigError, DataError
from kllm.results.schema import plain
from kllm.tuners.objective import Goal
from kllm.tuners.outcome import Outcome, from_plain
from kllm.tuners.sampler import PointSampler
from kllm.tuners.space import Space, Value

IDENTITY = "kllm"  # study attribute: what the study is about
EXTRA = "kllm.extra"  # study attribute: what else its first run found out

State = Literal["complete", "stopped", "failed", "pruned", "interrupted", "running"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trial as stored."""

    number: int
    settings: Mapping[str, Value]
    state: State
    reason: str
    metrics: Mapping[str, float]
    stored: Mapping[str, Any] | None  # its outcome as plain data

    @property
    def outcome(self) -> Outcome | None:
        """The run itself; decoded when asked for, because it is most of a trial's size.

        Raises:
            DataError: it was not written by this version of kLLM.
        """
        if self.stored is None:
            return None
        try:
            return from_plain(self.stored)
        except msgspec.ValidationError as error:
            raise DataError(
                f"trial {self.number} of the study cannot be read ({error}); use another --study"
            ) from error

    @property
    def measured(self) -> bool:
        """Whether it ran to its end."""
        return self.state == "complete"


def read_trial(frozen: FrozenTrial, space: Space) -> Trial:
    """A stored trial in our terms."""
    attrs = frozen.user_attrs
    stored = attrs.get("outcome")
    state: State = {
        TrialState.COMPLETE: "complete",
        TrialState.PRUNED: "stopped" if stored else "pruned",
        TrialState.FAIL: "interrupted" if attrs.get("retry") else "failed",
    }.get(frozen.state, "running")
    return Trial(
        number=frozen.number,
        settings={**space.default, **frozen.params},
        state=state,
        reason=attrs.get("reason", ""),
        metrics=attrs.get("metrics", {}),
        stored=stored,
    )


def open_study(
    storage: BaseStorage,
    name: str,
    *,
    goal: Goal,
    identity: Mapping[str, Any],
    resume: bool,
    sampler: PointSampler,
    extra: Mapping[str, Any] | None = None,
) -> optuna.Study:
    """Create a study, or continue one that is about the same thing.

    Args:
        storage: where studies are kept.
        name: of the study.
        goal: gives the directions.
        identity: everything that makes two studies' trials comparable, as plain data.
        resume: whether the study is expected to exist.
        sampler: suggests its trials.
        extra: kept with a new study's identity and not compared.

    Raises:
        ConfigError: it exists and should not, does not exist and should, or is about something
            else; the message names the differences.
    """
    exists = name in optuna.get_all_study_names(storage)
    if exists and not resume:
        raise ConfigError(
            f"study '{name}' exists already; continue it with --resume or choose another --study"
        )
    if resume and not exists:
        raise ConfigError(f"there is no study '{name}' to resume in this storage")
    if exists:
        study = optuna.load_study(study_name=name, storage=storage, sampler=sampler)
        check_identity(name, study.user_attrs.get(IDENTITY), plain(identity))
        return study
    study = optuna.create_study(
        study_name=name,
        storage=storage,
        sampler=sampler,
        directions=[objective.direction for objective in goal.objectives],
    )
    study.set_user_attr(IDENTITY, plain(identity))
    study.set_user_attr(EXTRA, plain(extra or {}))
    return study


def stored_identity(storage: BaseStorage, name: str) -> dict[str, Any]:
    """What an existing study is about, with what its first run found out.

    Raises:
        ConfigError: there is no such study, or kLLM did not make it.
    """
    if name not in optuna.get_all_study_names(storage):
        raise ConfigError(f"there is no study '{name}' to resume in this storage")
    attrs = optuna.load_study(study_name=name, storage=storage).user_attrs
    if not isinstance(attrs.get(IDENTITY), Mapping):
        raise ConfigError(f"study '{name}' was not made by kllm tune; choose another --study")
    return {**attrs[IDENTITY], **attrs.get(EXTRA, {})}


def check_identity(name: str, stored: Any, wanted: Mapping[str, Any]) -> None:
    """Refuse to mix trials that cannot be compared.

    Raises:
        ConfigError: with every difference.
    """
    if not isinstance(stored, Mapping):
        raise ConfigError(f"study '{name}' was not made by kllm tune; choose another --study")
    differences = list(_differences(stored, wanted, ""))
    if differences:
        raise ConfigError(
            f"study '{name}' was made for something else and cannot be continued: "
            + "; ".join(differences)
        )


def _differences(old: Any, new: Any, at: str) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(key), new.get(key), f"{at}.{key}" if at else str(key))
    elif old != new:
        yield f"{at} was {old}, now {new}"


def newest_study(storage: BaseStorage, model: str | None = None) -> str:
    """Name of the newest study, for `--resume` without a name.

    Args:
        storage: where studies are kept.
        model: name of the model that it must be about; None: any.

    Raises:
        ConfigError: there is none.
    """
    found = [
        summary
        for summary in optuna.get_all_study_summaries(storage)
        if (about := summary.user_attrs.get(IDENTITY)) and model in (None, about["model"])
    ]
    if not found:
        raise ConfigError(
            f"there is no study {f'of {model} ' if model else ''}to resume in this storage; "
            "start one without --resume"
        )
    # Ids are given out in order; a study that was interrupted at once has no start time.
    return max(found, key=lambda summary: summary._study_id).study_name
