"""How long a prompt takes, from steps at some of its places. Plain numbers, no torch.

A prompt of L tokens runs in steps of c tokens. What a step takes depends on the tokens behind it,
so it is measured at places from the first to the last of them and read off straight lines between;
the last step, which hands the prompt over and samples, is always measured itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from kllm.parallel.stripes import Stripes

WIDEST = 8.0  # of two neighbouring places, the later has at most so many times the tokens behind it


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A step that is measured: the tokens `start` to `end` - 1 of a prompt."""

    start: int
    end: int
    last: bool  # whether the prompt ends with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a step or a whole prompt costs one rank."""

    seconds: float
    exposed_s: float = 0.0  # waiting for transfers of the context-parallel group
    transfer_s: float = 0.0  # that its link is busy
    passing_bytes: float = 0.0  # of tensors that live within a step, at most


def last_start(tokens: int, chunk: int) -> int:
    """Where the last step of a prompt begins."""
    return (tokens - 1) // chunk * chunk


def places(prompts: Sequence[int], chunk: int) -> list[Place]:
    """Where steps are measured for prompts of these lengths, in the order of their tokens."""
    starts = {0} if any(tokens > chunk for tokens in prompts) else set()
    starts |= {last_start(n, chunk) - chunk for n in prompts if n > chunk}
    grid = sorted(starts)
    for low, high in pairwise(grid):
        starts |= _between(max(low, chunk), high, chunk)
    steps = {Place(start, start + chunk, False) for start in starts}
    return sorted(steps | {Place(last_start(n, chunk), n, True) for n in prompts})


def _between(low: int, high: int, chunk: int) -> set[int]:
    """Steps that divide a wide gap evenly on a logarithmic scale."""
    parts = int(np.ceil(np.log(high / low) / np.log(WIDEST) - 1e-9))
    ratio = (high / low) ** (1 / max(1, parts))
    return {round(low * ratio**i / chunk) * chunk for i in range(1, parts)}


def prompt_cost(tokens: int, chunk: int, measured: Mapping[Place, Cost]) -> Cost:
    """The cost of a whole prompt.

    Args:
        measured: of `places`, those of this prompt at least.
    """
    end = last_start(tokens, chunk)
    steps = np.arange(0, end, chunk)
    near = sorted(place for place in measured if not place.last and place.start < end)
    last = measured[Place(end, tokens, True)]
    totals = {}
    for field in fields(Cost):
        values = [getattr(measured[place], field.name) for place in near]
        at_end = getattr(last, field.name)
        if field.name == "passing_bytes":
            totals[field.name] = max([*values, at_end])
        else:
            between = np.interp(steps, [p.start for p in near], values) if near else steps
            totals[field.name] = float(between.sum()) + at_end
    return Cost(**totals)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Seconds of the same steps of a prompt on every rank."""

    tokens: int  # of the prompt
    seconds: Mapping[Place, Sequence[float]]  # of each step, by rank

    @property
    def over_mean(self) -> float:
        """The busiest rank of each step, summed, over the mean rank; 1 where all take as long."""
        mean = sum(sum(times) / len(times) for times in self.seconds.values())
        return sum(map(max, self.seconds.values())) / mean


def critical_path(tokens: int, chunk: int, deal: Stripes) -> float:
    """Work of the busiest rank of each step, summed over a prompt, over the mean rank's.

    Work is counted in pairs of a query and a token that it sees.
    """
    longest = total = 0.0
    for start in range(0, tokens, chunk):
        end = min(start + chunk, tokens)
        work = [
            sum((b - a) * (a + b + 1) / 2 for a, b in deal.runs(rank, start, end))
            for rank in range(deal.ranks)
        ]
        longest += max(work)
        total += sum(work)
    return longest * deal.ranks / total
