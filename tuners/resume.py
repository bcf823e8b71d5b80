"""Continuing a study with the options that began it, which need not be repeated."""

from collections.abc import Callable, Collection
from typing import Any

import msgspec
from optuna.storages import BaseStorage

from kllm.errors import ConfigError
from kllm.models.load import resolve
from kllm.tuners.setup import Request
from kllm.tuners.study import newest_study, stored_identity

STORED = "the model of the study"  # stands for a model that was not given
REQUEST = "request"  # key of a study's options, beside what its first run found out

# The options that say what a study is about.
OPTIONS: dict[str, Callable[[Request], Any]] = {
    "--model": lambda r: r.config.model,
    "--scale": lambda r: r.config.scale,
    "--workload": lambda r: r.workload,
    "--isl": lambda r: r.isl,
    "--osl": lambda r: r.osl,
    "--concurrency": lambda r: r.concurrency,
    "--requests": lambda r: r.num_requests,
    "--objective": lambda r: r.objectives,
    "--slo": lambda r: r.slo,
    "--fix": lambda r: r.fixed,
    "--seed": lambda r: r.seed,
    "--world": lambda r: r.world,
    "--layout": lambda r: r.layout,
    "--fidelity": lambda r: r.fidelity,
    "--link": lambda r: r.config.link,
    "--device": lambda r: r.config.device,
    "--dtype": lambda r: r.config.dtype,
}


def resumed(
    storage: BaseStorage, name: str, request: Request, given: Collection[str]
) -> tuple[str, Request]:
    """The study to continue and its options.

    Args:
        storage: where it is kept.
        name: of the study; "": the newest, of the model where `given` has "--model".
        request: what the user asked for this time.
        given: the OPTIONS that the user gave; what they say must be what the study was made with.

    Raises:
        ConfigError: no such study, an option that differs, or a study that holds no options.
    """
    if not name:
        name = newest_study(storage, resolve(request.config).name if "--model" in given else None)
    stored = stored_identity(storage, name).get(REQUEST)
    if stored is None:
        if "--model" not in given:
            raise ConfigError(
                f"study '{name}' was made by an older kllm and does not hold its options; repeat "
                "--model and the others that it was begun with"
            )
        return name, request
    first = msgspec.convert(stored, Request)
    wrong = [
        (f"{option} {_words(value(request))}", f"{option} {_words(value(first))}")
        for option, value in OPTIONS.items()
        if option in given and value(request) != value(first)
    ]
    if wrong:
        now, then = (", ".join(side) for side in zip(*wrong, strict=True))
        raise ConfigError(
            f"study '{name}' was begun with {then} and cannot go on with {now}; leave that out, "
            "or begin another study without --resume"
        )
    return name, first


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        value = ",".join(value)
    return "not given" if value in (None, "") else str(value)
