"""Which pages and state rows are free. Plain numpy: the bytes live in `kllm.cache.pool`."""

import numpy as np
from numpy.typing import NDArray


class BlockPool:
    """A stack of free ids 0 .. size - 1, with every hand-out and return checked.

    An id that is returned twice, or was never handed out, is a bug of ours and raises
    `RuntimeError` at once: found days later it is another request's garbled answer.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._stack = np.arange(size - 1, -1, -1, dtype=np.int32)  # low ids on top
        self._top = size
        self._used = np.zeros(size, bool)

    @property
    def free(self) -> int:
        """Ids that can be taken."""
        return self._top

    @property
    def used(self) -> int:
        """Ids handed out."""
        return self.size - self._top

    def take(self, count: int) -> NDArray[np.int32]:
        """Hand out `count` ids; the caller has checked that they are there."""
        if count > self._top:
            raise RuntimeError(f"{count} blocks taken where {self._top} are free")
        self._top -= count
        ids = self._stack[self._top : self._top + count][::-1].copy()
        self._used[ids] = True
        return ids

    def give(self, ids: NDArray[np.int32]) -> None:
        """Take ids back."""
        if not self._used[ids].all() or len(np.unique(ids)) != len(ids):
            raise RuntimeError("blocks given back that nobody holds")
        self._used[ids] = False
        self._stack[self._top : self._top + len(ids)] = ids[::-1]
        self._top += len(ids)
