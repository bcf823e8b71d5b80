"""The requests of a step that run several tokens, one after the other: its chunks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from kllm.attention.context import ForwardContext, once_a_step


@dataclass(frozen=True, slots=True)
class Chunk:
    """A request that runs several tokens in this step, or a stretch of a group's piece."""

    request: int  # its index in the step; of a stretch the first of those that it is made of
    rows: slice  # its tokens in the flat batch
    start: int  # position of the first of them
    end: int  # position behind the last of them
    piece: int = -1  # which of the group's pieces it is a stretch of; -1: it runs on this rank only


@once_a_step
def chunks(ctx: ForwardContext) -> list[Chunk]:
    """The requests of the step that are not decodes, in order.

    Stripes of a piece that follow one another on this rank are one stretch: the fewer chunks, the
    fewer and larger the calls that a layer makes.
    """
    found: list[Chunk] = []
    pieces = {}
    if ctx.sequence is not None:
        for i, piece in enumerate(ctx.sequence.step.pieces):
            pieces.update(dict.fromkeys(range(piece.entries.start, piece.entries.stop), i))
    row = ctx.num_decodes
    for request in range(ctx.num_decodes, len(ctx.query_lens_host)):
        length, end = int(ctx.query_lens_host[request]), int(ctx.context_lens_host[request])
        chunk = Chunk(request, slice(row, row + length), end - length, end, pieces.get(request, -1))
        row += length
        if found and _follows(chunk, found[-1]):
            rows = slice(found[-1].rows.start, row)
            chunk = replace(found.pop(), rows=rows, end=end)
        found.append(chunk)
    return found


def _follows(chunk: Chunk, before: Chunk) -> bool:
    return chunk.piece == before.piece >= 0 and chunk.start == before.end


@once_a_step
def prompts(ctx: ForwardContext) -> list[list[Chunk]]:
    """The chunks of each prompt, in order: one, or the stretches of a group's piece.

    Their rows are neighbours in the flat batch.
    """
    found = groupby(chunks(ctx), key=lambda c: (c.piece, c.request if c.piece < 0 else 0))
    return [list(stretches) for _, stretches in found]


def rows_of(runs: Sequence[Chunk]) -> slice:
    """The rows of neighbouring chunks in the flat batch; empty without chunks."""
    return slice(runs[0].rows.start, runs[-1].rows.stop) if runs else slice(0, 0)


def tokens_seen(runs: Sequence[Chunk], row: int) -> int:
    """How many tokens of its prompt a row of the flat batch sees, itself included."""
    run = next(run for run in runs if row < run.rows.stop)
    return run.start + row - int(run.rows.start) + 1
