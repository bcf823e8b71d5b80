"""Ring states of a step: the newest rows of each request, addressed by position.

A step writes the rows of its tokens and reads older ones. Requests that run one token
(decodes) are handled as tensors, with shapes that depend on the batch only, so that a CUDA
graph can hold them; longer ones (chunks) one by one, with lengths the host knows.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kllm.attention.context import ForwardContext


@dataclass(frozen=True, slots=True)
class Chunk:
    """A request that runs several tokens in this step."""

    request: int  # its index in the step
    rows: slice  # its tokens in the flat batch
    start: int  # position of the first of them
    end: int  # tokens of the request once the step has run


def chunks(ctx: ForwardContext) -> list[Chunk]:
    """The requests of the step that are not decodes, in order."""
    found: list[Chunk] = ctx.shared.get("chunks", [])
    if "chunks" not in ctx.shared:
        row = ctx.num_decodes
        for request in range(ctx.num_decodes, len(ctx.query_lens_host)):
            length, end = int(ctx.query_lens_host[request]), int(ctx.context_lens_host[request])
            found.append(Chunk(request, slice(row, row + length), end - length, end))
            row += length
        ctx.shared["chunks"] = found
    return found


def write_ring(ctx: ForwardContext, name: str, layer: int, rows: Tensor) -> None:
    """Store the rows [T, channels] of the step's tokens; of a long chunk only the newest fit."""
    length = ctx.pool.rings(name, layer).shape[1]
    slots = ctx.ring_slots(length)
    if any(chunk.end - chunk.start > length for chunk in chunks(ctx)):
        kept = _newest(ctx, length)
        slots, rows = slots[kept], rows[kept]
    ctx.pool.write(name, layer, slots, rows)


def _newest(ctx: ForwardContext, length: int) -> Tensor:
    """Indices of the step's tokens that are among the newest `length` of their request."""
    key = f"newest {length}"
    if key not in ctx.shared:
        parts = [np.arange(ctx.num_decodes)]
        for chunk in chunks(ctx):
            first = max(chunk.rows.start, chunk.rows.stop - length)
            parts.append(np.arange(first, chunk.rows.stop))
        ctx.shared[key] = torch.from_numpy(np.concatenate(parts)).to(ctx.positions.device)
    found: Tensor = ctx.shared[key]
    return found


def read_ring(
    ctx: ForwardContext, name: str, layer: int, request: int, start: int, end: int
) -> Tensor:
    """Rows [end - start, channels] of one request's positions start..end - 1."""
    length = ctx.pool.rings(name, layer).shape[1]
    positions = torch.arange(start, end, device=ctx.positions.device)
    return ctx.pool.read(name, layer, ctx.rows[request] * length + positions % length)


def window_slots(ctx: ForwardContext, length: int, window: int) -> Tensor:
    """[decodes, window] int64: ring slots of each decode's newest positions, its own last.

    `length` is the ring's. Positions before the first token give -1.
    """
    key = f"window {length} {window}"
    if key not in ctx.shared:
        count = ctx.num_decodes
        back = torch.arange(window - 1, -1, -1, device=ctx.positions.device)
        positions = ctx.positions[:count].unsqueeze(1) - back
        slots = ctx.rows[:count].unsqueeze(1) * length + positions % length
        ctx.shared[key] = slots.masked_fill(positions < 0, -1)
    found: Tensor = ctx.shared[key]
    return found
