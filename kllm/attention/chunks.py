"""The requests of a step that run several tokens, one after the other: its chunks."""

from dataclasses import dataclass
from itertools import groupby

from kllm.attention.context import ForwardContext, once_a_step


@dataclass(frozen=True, slots=True)
class Chunk:
    """A request that runs several tokens in this step, or a stretch of a group's piece."""

    request: int  # its index in the step
    rows: slice  # its tokens in the flat batch
    start: int  # position of the first of them
    end: int  # position behind the last of them
    piece: int = -1  # which of the group's pieces it is a stretch of; -1: it runs on this rank only


@once_a_step
def chunks(ctx: ForwardContext) -> list[Chunk]:
    """The requests of the step that are not decodes, in order."""
    found: list[Chunk] = []
    pieces = {}
    if ctx.sequence is not None:
        for i, piece in enumerate(ctx.sequence.step.pieces):
            pieces.update(dict.fromkeys(range(piece.entries.start, piece.entries.stop), i))
    row = ctx.num_decodes
    for request in range(ctx.num_decodes, len(ctx.query_lens_host)):
        length, end = int(ctx.query_lens_host[request]), int(ctx.context_lens_host[request])
        rows = slice(row, row + length)
        found.append(Chunk(request, rows, end - length, end, pieces.get(request, -1)))
        row += length
    return found


def prompts(ctx: ForwardContext) -> list[list[Chunk]]:
    """The chunks of each prompt, in order: one, or the stretches of a group's piece."""
    found = groupby(chunks(ctx), key=lambda c: (c.piece, c.request if c.piece < 0 else 0))
    return [list(stretches) for _, stretches in found]
