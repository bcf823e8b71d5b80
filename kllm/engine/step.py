"""One step as the ranks of a layout get it: plain data that can be sent to other processes.

The engine makes a plan for each group of ranks that shares its requests (one for each dp rank).
`steps_of` cuts the plans into micro-batches and says, for all groups alike, how many tokens every
rank of a pipeline stage runs, so that ranks agree on shapes without asking each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kllm.config import ParallelConfig
from kllm.core import Outcome, Plan, TokenLogprobs
from kllm.parallel.stripes import Stripes
from kllm.scheduler.microbatch import split_plan


@dataclass(frozen=True, slots=True)
class MicroStep:
    """One micro-batch of a group's step."""

    plan: Plan | None  # None: the group has nothing to run
    sampled: NDArray[np.int64]  # [B] index among the step's sampled requests; -1: not sampled
    peer_tokens: tuple[int, ...]  # tokens of each rank of a stage
    decode_only: bool  # every token of every group is a request's newest
    width: int  # pages of the widest block table of any group


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What one rank sampled."""

    sampled: NDArray[np.int64]  # [S] index among the group's sampled requests
    token_ids: NDArray[np.int64]  # [S]
    logprobs: list[TokenLogprobs | None] | None = None
    run_s: float = 0.0  # host seconds from the plan to the tokens


def steps_of(
    plans: Sequence[Plan | None], layout: ParallelConfig, stripes: Stripes | None
) -> list[tuple[MicroStep, ...]]:
    """The micro-batches of each group, as many for every group.

    Args:
        plans: one for each dp rank.
        stripes: how prompts are dealt to the cp ranks; None without context parallelism.
    """
    # Steps without prompts are bound by reading weights, which every micro-batch does again.
    prompts = any(plan is not None and not _only_decodes(plan) for plan in plans)
    wanted = layout.pp if prompts else 1
    parts = [[] if plan is None else split_plan(plan, wanted) for plan in plans]
    count = max(map(len, parts))
    micro = [[group[i] if i < len(group) else None for group in parts] for i in range(count)]
    steps: list[list[MicroStep]] = [[] for _ in plans]
    for row in micro:
        peers = tuple(n for plan in row for n in rank_tokens(plan, layout, stripes))
        decode_only = not prompts or all(plan is None or _only_decodes(plan) for plan in row)
        width = max((plan.block_tables.shape[1] for plan in row if plan is not None), default=1)
        for group, (whole, part) in enumerate(zip(plans, row, strict=True)):
            sampled = np.zeros(0, np.int64)
            if whole is not None and part is not None:
                sampled = _sampled_indices(whole, part)
            steps[group].append(MicroStep(part, sampled, peers, decode_only, width))
    return [tuple(group) for group in steps]


def rank_tokens(plan: Plan | None, layout: ParallelConfig, stripes: Stripes | None) -> list[int]:
    """Tokens that each rank of one group runs in a stage; a rank with nothing runs one."""
    if plan is None:
        return [1] * (layout.cp * layout.tp)
    if stripes is None:
        return [plan.num_tokens] * layout.tp
    assert plan.owners is not None
    n = plan.num_decodes
    tokens = np.bincount(plan.owners[:n], minlength=layout.cp)
    ends = plan.context_lens[n:].tolist()
    starts = (plan.context_lens[n:] - plan.query_lens[n:]).tolist()
    for rank in range(layout.cp):
        for start, end in zip(starts, ends, strict=True):
            tokens[rank] += stripes.count(rank, end) - stripes.count(rank, start)
    return [max(1, count) for count in tokens.tolist() for _ in range(layout.tp)]


def sampled_on(micro: Sequence[MicroStep], cp: int, stripes: Stripes | None) -> list[int]:
    """Which of a group's sampled requests a cp rank samples, in the order in which it does."""
    found: list[int] = []
    for step in micro:
        if step.plan is None:
            continue
        here = step.sampled >= 0
        if stripes is not None:
            here &= _last_token_ranks(step.plan, stripes) == cp
        found += step.sampled[here].tolist()
    return found


def merge(parts: Sequence[RankOutcome], count: int) -> Outcome:
    """The tokens of `count` sampled requests from the ranks that sampled them; 0 where none did."""
    if len(parts) == 1 and len(parts[0].sampled) == count:
        part = parts[0]
        if (part.sampled[:-1] < part.sampled[1:]).all():  # in order, as without micro-batches
            return Outcome(part.token_ids, part.logprobs)
    tokens = np.zeros(count, np.int64)
    logprobs: list[TokenLogprobs | None] = [None] * count
    any_logprobs = False
    for part in parts:
        tokens[part.sampled] = part.token_ids
        if part.logprobs is not None:
            any_logprobs = True
            for index, value in zip(part.sampled.tolist(), part.logprobs, strict=True):
                logprobs[index] = value
    return Outcome(tokens, logprobs if any_logprobs else None)


def _last_token_ranks(plan: Plan, stripes: Stripes) -> NDArray[np.int64]:
    """[B] the cp rank that runs each request's last token."""
    assert plan.owners is not None
    ranks = stripes.rank_of(plan.context_lens.astype(np.int64) - 1)
    ranks[: plan.num_decodes] = plan.owners[: plan.num_decodes]
    return ranks


def _sampled_indices(whole: Plan, part: Plan) -> NDArray[np.int64]:
    """[B of part] the index of each request among those that `whole` samples; -1: not sampled."""
    order = np.arange(len(whole.samples))
    if not whole.samples.all():
        order = np.where(whole.samples, np.cumsum(whole.samples) - 1, -1)
    if part is whole:  # every step of a single stage: no loop over requests
        return order
    found = dict(zip(map(id, whole.requests), order.tolist(), strict=True))
    mine = np.array([found[id(request)] for request in part.requests], np.int64)
    return np.where(part.samples, mine, -1)


def _only_decodes(plan: Plan) -> bool:
    # A chunk of one token counts as a decode, but is not sampled unless it ends its prompt.
    return plan.num_decodes == len(plan.query_lens) and bool(plan.samples.all())
