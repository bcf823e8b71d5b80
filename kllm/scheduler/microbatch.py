"""Cutting a step into micro-batches, so that pipeline stages can work at the same time. No torch.

The stages run the micro-batches in order. A chunk may therefore be cut: its first part has been
stored in a stage's KV before the stage runs the second one.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kllm.core import Plan

Part = tuple[int, int, int]  # request of the plan, first and last + 1 of its query tokens


def split_plan(plan: Plan, count: int) -> list[Plan]:
    """Up to `count` plans that run in order do what `plan` does.

    Their token counts differ by one at most, and decodes are dealt evenly. A part of a chunk that
    is a single token stands with the decodes, as in any plan; with context parallelism it stays
    behind the requests that decode, as in the whole plan. A request is sampled with its last part.
    """
    total, decodes = plan.num_tokens, plan.num_decodes
    count = min(count, total)
    if count <= 1:
        return [plan]
    starts = np.zeros(len(plan.query_lens) + 1, np.int64)
    np.cumsum(plan.query_lens, out=starts[1:])
    ends = [i * total // count for i in range(count + 1)]
    # Decodes are dealt as if they were spread evenly among the tokens of the chunks.
    own = [end * decodes // total for end in ends]
    cuts = [decodes + end - before for end, before in zip(ends, own, strict=True)]
    plans = []
    for i in range(count):
        single = [(r, 0, 1) for r in range(own[i], own[i + 1])]
        chunks = _parts(starts, decodes, cuts[i], cuts[i + 1])
        if plan.owners is None:
            single += [part for part in chunks if part[2] - part[1] == 1]
            chunks = [part for part in chunks if part[2] - part[1] > 1]
        plans.append(_cut(plan, starts, single, chunks))
    return plans


def _parts(starts: NDArray[np.int64], first: int, begin: int, end: int) -> list[Part]:
    """The pieces of requests from `first` on that lie in tokens `begin` to `end` - 1."""
    found = []
    for r in range(first, len(starts) - 1):
        a, b = max(begin, int(starts[r])), min(end, int(starts[r + 1]))
        if a < b:
            found.append((r, a - int(starts[r]), b - int(starts[r])))
    return found


def _cut(plan: Plan, starts: NDArray[np.int64], single: list[Part], chunks: list[Part]) -> Plan:
    if plan.owners is None:
        chunks = sorted(chunks, key=lambda part: part[2] - part[1])
    requests, begins, ends = np.array([*single, *chunks], np.int64).T
    spans = zip(starts[requests] + begins, starts[requests] + ends, strict=True)
    tokens = np.concatenate([np.arange(first, stop) for first, stop in spans])
    left = plan.query_lens[requests] - ends
    return replace(
        plan,
        num_decodes=len(single),
        rows=plan.rows[requests],
        query_lens=(ends - begins).astype(np.int32),
        context_lens=(plan.context_lens[requests] - left).astype(np.int32),
        token_ids=plan.token_ids[tokens],
        positions=plan.positions[tokens],
        block_tables=plan.block_tables[requests],
        samples=plan.samples[requests] & (left == 0),
        requests=tuple(plan.requests[r] for r in requests) if plan.requests else (),
        owners=None if plan.owners is None else plan.owners[requests],
        shard_tables=None if plan.shard_tables is None else plan.shard_tables[:, requests],
    )
