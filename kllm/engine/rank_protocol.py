"""What the engine's process and those of the ranks say to each other. Pickled, over a socket.

A rank answers each message with one value; None ends it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kllm.config import EngineConfig
from kllm.core import Request, TokenLogprobs
from kllm.engine.memory import KVBudget
from kllm.engine.step import MicroStep, RankOutcome
from kllm.parallel.stripes import Stripes

AUTHKEY = "KLLM_RANK_KEY"  # environment variable: what ranks prove themselves with
DEATH = "[kllm] "  # begins the line that says how a rank died


@dataclass(frozen=True, slots=True)
class Join:
    """Meet the other ranks and try every group's exchange once; the answer is True."""

    config: EngineConfig
    store: tuple[str, int]  # where the ranks meet
    prefix: str  # of this layout's keys there


class Runner(Protocol):
    """What runs a rank's share of a step."""

    def run(self, micro: Sequence[MicroStep], requests: Sequence[Request]) -> RankOutcome:
        """See `kllm.engine.rank.Rank.run`."""


@dataclass(frozen=True, slots=True)
class StandIn:
    """Run this in place of a rank, to measure what a step costs besides it; the answer is True."""

    rank: Runner


@dataclass(frozen=True, slots=True)
class Build:
    """Load this rank's share; the answer is its `KVBudget`."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """Make the KV pool, in place of one that is there; the answer is True."""

    budget: KVBudget
    stripes: Stripes | None
    cp_kind: str
    fill: bool = False  # with random entries


@dataclass(frozen=True, slots=True)
class Settle:
    """Finish what the device has to do; the answer is the rank's `DeviceMemory`."""


class Step(NamedTuple):
    """Run a step; the answer is what was `Sampled`. (Pickle reads tuples fastest.)"""

    plan: bytes  # of the rank's group, by `StepCodec`
    # Those sampled here, known ones by id; None: the same as before.
    requests: tuple[Request | str, ...] | None


class Sampled(NamedTuple):
    """A rank's part of a step's outcome."""

    token_ids: bytes  # [S] int64, in the order of the requests sampled here
    logprobs: list[TokenLogprobs | None] | None
    run_s: float  # as `RankOutcome`


@dataclass(frozen=True, slots=True)
class Release:
    """Forget the layout; the answer is True."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank's answer when it could not do what it was asked."""

    kind: str  # the error's class
    message: str
    out_of_memory: bool = False
