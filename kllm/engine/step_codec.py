"""A group's steps as bytes, small and quick to read, for ranks in other processes.

Both sides keep the block tables of requests by state row, so that only entries that changed are
sent, and the requests of the last micro-batch. A step in which these decode one token more is
their tokens and lengths, however long the contexts are.
"""

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kllm.core import Plan
from kllm.engine.step import MicroStep


class _Requests(NamedTuple):
    """Whose tokens run: what of a plan stays the same while these are."""

    rows: bytes  # [B] int32
    owners: bytes | None  # [B] int32
    shape: tuple[int, ...]  # of the block tables [ranks, B, pages]


class _Chunks(NamedTuple):
    """What else must be said of a plan that is not one sampled token of each request."""

    query_lens: bytes  # [B] int32
    samples: bytes  # [B] bool
    sampled: bytes  # [B] int64


class _Packed(NamedTuple):
    """A micro-batch as tuples and bytes, which pickle reads in a tenth of the time of arrays."""

    peer_tokens: tuple[int, ...]
    decode_only: bool
    width: int
    step: int = 0
    num_decodes: int = 0
    requests: _Requests | None = None  # None: those of the last one
    chunks: _Chunks | None = None
    context_lens: bytes = b""  # [B] int32
    token_ids: bytes = b""  # [T] int64; empty: the group has nothing to run
    positions: bytes = b""  # [T] int64
    changed: bytes = b""  # [changes] int64, flat index into the block tables
    pages: bytes = b""  # [changes] int32, what stands there now


class StepCodec:
    """One side of a connection: what one packs, another unpacks in the same order."""

    def __init__(self) -> None:
        self._known: NDArray[np.int32] = np.zeros((0, 0, 0), np.int32)  # [ranks, rows, pages]
        # Of the last micro-batch. Its block tables go into `_known` when another one follows.
        self._requests: _Requests | None = None
        self._rows = np.zeros(0, np.int32)
        self._owners: NDArray[np.int32] | None = None
        self._tables = np.zeros((0, 0, 0), np.int32)  # [ranks, B, pages]
        self._singles = np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(0, np.int64)

    def pack(self, micro: Sequence[MicroStep]) -> bytes:
        """A step's micro-batches, without the requests themselves."""
        alone = len(micro) == 1
        packed = [tuple(self._pack(step, alone)) for step in micro]
        return pickle.dumps(packed, pickle.HIGHEST_PROTOCOL)

    def unpack(self, data: bytes) -> tuple[MicroStep, ...]:
        """What was packed. The arrays are good until the next call."""
        return tuple(self._unpack(_Packed(*packed)) for packed in pickle.loads(data))

    def _pack(self, step: MicroStep, alone: bool) -> _Packed:
        plan = step.plan
        if plan is None:
            return _Packed(step.peer_tokens, step.decode_only, step.width)
        tables = plan.block_tables[None] if plan.shard_tables is None else plan.shard_tables
        owners = None if plan.owners is None else plan.owners.tobytes()
        requests = _Requests(plan.rows.tobytes(), owners, tables.shape)
        known = requests == self._requests
        if not known:
            self._turn_to(requests)
        chunks = None
        if not (alone and step.decode_only):
            arrays = plan.query_lens, plan.samples, step.sampled
            chunks = _Chunks(*(array.tobytes() for array in arrays))
        changed = np.flatnonzero(tables != self._tables)
        pages = tables.reshape(-1)[changed]
        self._tables.reshape(-1)[changed] = pages
        return _Packed(
            step.peer_tokens,
            step.decode_only,
            step.width,
            step=plan.step,
            num_decodes=plan.num_decodes,
            requests=None if known else requests,
            chunks=chunks,
            context_lens=plan.context_lens.tobytes(),
            token_ids=plan.token_ids.tobytes(),
            positions=plan.positions.tobytes(),
            changed=changed.tobytes(),
            pages=pages.tobytes(),
        )

    def _unpack(self, packed: _Packed) -> MicroStep:
        same = packed.peer_tokens, packed.decode_only, packed.width
        if not packed.token_ids:
            return MicroStep(None, np.zeros(0, np.int64), *same)
        if packed.requests is not None:
            self._turn_to(packed.requests)
        if packed.changed:
            changed, pages = _array(packed.changed, np.int64), _array(packed.pages, np.int32)
            self._tables.reshape(-1)[changed] = pages
        query_lens, samples, sampled = self._singles
        if packed.chunks is not None:
            query_lens = _array(packed.chunks.query_lens, np.int32)
            samples = _array(packed.chunks.samples, np.bool_)
            sampled = _array(packed.chunks.sampled, np.int64)
        tables, owners = self._tables, self._owners
        plan = Plan(
            step=packed.step,
            num_decodes=packed.num_decodes,
            rows=self._rows,
            query_lens=query_lens,
            context_lens=_array(packed.context_lens, np.int32),
            token_ids=_array(packed.token_ids, np.int64),
            positions=_array(packed.positions, np.int64),
            block_tables=tables[0] if owners is None else tables[owners, range(len(owners))],
            samples=samples,
            owners=owners,
            shard_tables=None if owners is None else tables,
        )
        return MicroStep(plan, sampled, *same)

    def _turn_to(self, requests: _Requests) -> None:
        """Make these the last ones, with what is known of their block tables."""
        if self._requests is not None:
            self._known[:, self._rows, : self._tables.shape[2]] = self._tables
        rows = _array(requests.rows, np.int32)
        ranks, batch, width = requests.shape
        needed = np.maximum((ranks, int(rows.max()) + 1, width), self._known.shape)
        if tuple(needed) != self._known.shape:
            grown = np.zeros(tuple(needed.tolist()), np.int32)
            grown[tuple(map(slice, self._known.shape))] = self._known
            self._known = grown
        self._requests, self._rows = requests, rows
        self._owners = None if requests.owners is None else _array(requests.owners, np.int32)
        self._tables = np.ascontiguousarray(self._known[:, rows, :width])
        self._singles = np.ones(batch, np.int32), np.ones(batch, np.bool_), np.arange(batch)


def _array(data: bytes, dtype: DTypeLike) -> NDArray[Any]:
    return np.frombuffer(data, dtype).copy()  # one that torch may write to
