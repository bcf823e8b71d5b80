"""Optuna storages by URL: a journal file by default, anything that Optuna knows otherwise."""

import fcntl
import os
import re
from pathlib import Path

import optuna
from optuna.exceptions import OptunaError
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.exc import SQLAlchemyError

from kllm.errors import DataError

JOURNAL = "journal:"


class FileLock:
    """An advisory lock that the kernel drops when its holder dies.

    Optuna's own locks are files; after a kill -9 the next process waits for their grace period.
    Whoever gets the lock also removes a line that a killed writer left half written: the
    journal could not be read any more once something follows it.
    """

    def __init__(self, path: Path) -> None:
        self._journal = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Wait for the lock."""
        descriptor = os.open(f"{self._journal}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._descriptor = descriptor
        _drop_torn_line(self._journal)
        return True

    def release(self) -> None:
        """Let the next one in."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _drop_torn_line(path: Path) -> None:
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return
        file.seek(size - 1)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def open_storage(url: str, *, resume: bool = False) -> BaseStorage:
    """Connect to a storage.

    Args:
        url: "journal:PATH", or a URL that Optuna takes (sqlite:///study.db, postgresql+...).
        resume: whether a journal must be there already.

    Raises:
        DataError: it cannot be reached, or is not a storage.
    """
    try:
        if url.startswith(JOURNAL):
            path = Path(url.removeprefix(JOURNAL))
            if resume and not path.exists():
                raise DataError(
                    f"there is no study to resume: {path} does not exist; start one without "
                    "--resume, or name the --output or --storage of another"
                )
            return _open_journal(path)
        return optuna.storages.get_storage(url)
    except ImportError as error:
        raise DataError(
            f"storage {without_password(url)} needs a driver that is not installed: {error}"
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError, SQLAlchemyError, OptunaError) as error:
        raise DataError(
            f"storage {without_password(url)} cannot be opened: {_first_line(error)}"
        ) from error


def without_password(text: str) -> str:
    """`text` with the password of a URL in it masked: messages and results are passed around."""
    return re.sub(r"(://[^:/@\s]*):[^\s]*@", r"\1:***@", text)


def _open_journal(path: Path) -> JournalStorage:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Optuna's base class of locks is private; only these two methods are called.
    backend = JournalFileBackend(str(path), lock_obj=FileLock(path))  # type: ignore[arg-type]
    with path.open("r+b"):  # fails here, in one sentence, and not at the first trial
        pass
    return JournalStorage(backend)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
