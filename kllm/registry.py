"""Registries: dictionaries from a name to a factory, visible in one place."""

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from kllm.errors import ConfigError

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A read-only mapping whose missing keys are a user's typing error, not a KeyError.

    Args:
        kind: what the names stand for, used in the message ("attention backend").
        entries: name to factory. A factory imports its heavy library inside itself.

    Raises:
        ConfigError: on look-up of an unknown name; the message lists the known ones.
    """

    def __init__(self, kind: str, entries: Mapping[str, T]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            known = ", ".join(sorted(self._entries))
            raise ConfigError(f"unknown {self.kind} '{name}'; known: {known}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
