"""Rows in blocks, where what a row needs meanwhile grows with the context."""

BLOCK_BYTES = 1 << 28  # of the scores, masks, index lists or expanded heads of a block


def row_blocks(count: int, row_bytes: int) -> list[slice]:
    """Slices that cover `count` rows, each of at most `BLOCK_BYTES` (but at least one row)."""
    size = max(1, BLOCK_BYTES // max(row_bytes, 1))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
