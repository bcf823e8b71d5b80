"""Rows in blocks, where what a row needs meanwhile grows with the context."""

from torch import Tensor

BLOCK_BYTES = 1 << 28  # of the scores, masks, index lists or expanded heads of a block


def row_blocks(count: int, row_bytes: int) -> list[slice]:
    """Slices that cover `count` rows, each of at most `BLOCK_BYTES` (but at least one row)."""
    size = max(1, BLOCK_BYTES // max(row_bytes, 1))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


class Rows:
    """A tensor [count, ...] that is made in blocks of rows.

    A block that has all rows is taken as it is; others are copied, and what they leave out has no
    value.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._rows: Tensor | None = None

    def put(self, rows: slice, values: Tensor) -> None:
        """Set some rows."""
        if len(values) == self._count:
            self._rows = values
            return
        if self._rows is None:
            self._rows = values.new_empty(self._count, *values.shape[1:])
        self._rows[rows] = values

    def finish(self) -> Tensor:
        """All rows; some must have been set."""
        assert self._rows is not None, "rows asked for before any was made"
        return self._rows
