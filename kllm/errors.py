"""Every error a user can act on, with the exit code the command line turns it into.

KllmError                 1  the run failed, or a threshold was missed
├── ConfigError           2  wrong usage: an option, a config, a layout or a model that cannot be
├── CapacityError         3  sound, but this machine cannot hold it (memory, devices)
├── DependencyError       1  an optional library is missing or too old
├── DataError             2  a file or storage that cannot be read, written or understood
└── WorkerError           1  a child process or a rank died, hung or answered nonsense
"""

import signal


class KllmError(Exception):
    """Base of all errors whose message is meant for the user: what, why, what to do instead."""

    exit_code = 1


class ConfigError(KllmError):
    """The request itself cannot be carried out, on any machine."""

    exit_code = 2


class CapacityError(KllmError):
    """The request is sound, but this machine cannot hold it."""

    exit_code = 3


class DependencyError(KllmError):
    """An optional library is needed and missing, or its version cannot be used."""


class DataError(KllmError):
    """A file or a storage that cannot be read or written as what it claims to be.

    As with `diff` and `grep`, trouble is 2: a 1 of `kllm compare` is a regression and nothing else.
    """

    exit_code = 2


class WorkerError(KllmError):
    """A child process or a rank died, hung, or broke the protocol."""


def one_line(error: BaseException) -> str:
    """An error as a table's cell or a part of a sentence; one of ours needs no name."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text if isinstance(error, KllmError) else f"{type(error).__name__}: {text}"


def ending(code: int) -> str:
    """How a process ended, by its exit code: of a signal where it is negative."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"was killed by signal {-code}"
