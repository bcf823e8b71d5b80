"""A context-parallel group's step, cut into what each of its ranks runs. No torch.

The ranks share the prompts: each runs the stretches of a chunk that its stripes give it. Requests
that decode run on the rank that owns them, as under request-DP.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kllm.core import Plan
from kllm.parallel.stripes import Stripes


@dataclass(frozen=True, slots=True)
class Piece:
    """A prompt chunk that all ranks of the group run together."""

    start: int  # position of its first token
    end: int
    owner: int  # the rank that keeps the request's KV once the prompt is done
    entries: slice  # which requests of this rank's plan are its stretches of the chunk
    ends: bool  # whether the prompt is done with this chunk


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """What a rank knows of its group's step besides its own plan.

    Where KV lies in a request's pages: each rank holds the tokens of its stripes, packed by
    `Stripes.local`, except that the owner has every token's place at its position; "replicated"
    prompts are whole on every rank, at their positions.
    """

    rank: int
    stripes: Stripes
    kind: str  # "ring", "all_gather" or "replicated"
    pieces: tuple[Piece, ...]
    rows: NDArray[np.int32]  # [pieces] state rows, the same on all ranks
    block_tables: NDArray[np.int32]  # [pieces, max pages] on this rank

    @property
    def sharded(self) -> bool:
        """Whether each rank keeps its stripes only."""
        return self.kind != "replicated"

    def places(self, piece: Piece, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where this rank keeps positions of a piece's request in the request's pages."""
        if self.sharded and piece.owner != self.rank:
            return self.stripes.local(positions)
        return positions


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """One rank's part of its group's plan."""

    plan: Plan
    places: NDArray[np.int64]  # [T] where the tokens' KV goes in their request's pages
    origin: NDArray[np.int64]  # [B] index in the group's plan; -1: padding that nobody asked for
    step: SequenceStep


def local_plan(
    plan: Plan, stripes: Stripes, rank: int, *, kind: str, scratch_page: int, scratch_row: int
) -> LocalPlan:
    """What `rank` runs of a group's plan: the decodes it owns, then its stretches of chunks.

    A rank that would run nothing runs one token on the scratch page, so that no kernel meets an
    empty batch.
    """
    assert plan.owners is not None
    assert plan.shard_tables is not None
    n = plan.num_decodes
    tables = plan.shard_tables[rank]
    own = np.flatnonzero(plan.owners[:n] == rank)
    starts = np.zeros(len(plan.query_lens) + 1, np.int64)
    np.cumsum(plan.query_lens, out=starts[1:])
    positions = [plan.positions[:n][own]]
    tokens = [plan.token_ids[:n][own]]
    places = [positions[0]]
    origin = own.tolist()
    lens = [1] * len(own)
    samples = [True] * len(own)
    if not origin and not _runs_anything(plan, stripes, rank):
        tables = np.vstack((tables, np.full((1, tables.shape[1]), scratch_page, np.int32)))
        origin, lens, samples = [-1], [1], [False]
        zero = np.zeros(1, np.int64)
        positions, tokens, places = [zero], [zero], [zero]
    num_decodes = len(origin)
    step = SequenceStep(rank, stripes, kind, (), plan.rows[n:], plan.shard_tables[rank][n:])
    pieces = []
    for i in range(n, len(plan.query_lens)):
        end = int(plan.context_lens[i])
        start = end - int(plan.query_lens[i])
        first = len(origin)
        piece = Piece(start, end, int(plan.owners[i]), slice(0), bool(plan.samples[i]))
        for a, b in stripes.runs(rank, start, end):
            span = np.arange(a, b)
            positions.append(span)
            tokens.append(plan.token_ids[starts[i] + a - start : starts[i] + b - start])
            places.append(step.places(piece, span))
            origin.append(i)
            lens.append(b - a)
            samples.append(piece.ends and b == end)
        pieces.append(replace(piece, entries=slice(first, len(origin))))
    index = np.array(origin, np.int64)
    flat = np.concatenate(positions)
    query_lens = np.array(lens, np.int32)
    rows = np.where(index < 0, scratch_row, plan.rows[index]).astype(np.int32)
    local = Plan(
        step=plan.step,
        num_decodes=num_decodes,
        rows=rows,
        query_lens=query_lens,
        context_lens=flat[np.cumsum(query_lens) - 1].astype(np.int32) + 1,
        token_ids=np.concatenate(tokens),
        positions=flat,
        block_tables=tables[index],
        samples=np.array(samples, np.bool_),
        requests=tuple(plan.requests[i] for i in origin) if plan.requests else (),
    )
    step = replace(step, pieces=tuple(pieces))
    return LocalPlan(local, np.concatenate(places), index, step)


def _runs_anything(plan: Plan, stripes: Stripes, rank: int) -> bool:
    chunks = zip(plan.query_lens.tolist(), plan.context_lens.tolist(), strict=True)
    spans = list(chunks)[plan.num_decodes :]
    return any(stripes.runs(rank, end - length, end) for length, end in spans)
