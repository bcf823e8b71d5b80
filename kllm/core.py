"""What the parts of the engine pass around. No torch.

Letters in shapes, everywhere: B requests of a step, T tokens of a step (all requests,
flat), H query heads, K KV heads, D head dimension, P pages, E experts, V vocabulary.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from kllm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn, and when it ends."""

    max_tokens: int = 256  # output tokens at most
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # keep the k likeliest; 0: all
    top_p: float = 1.0  # keep the smallest set with this probability mass
    min_p: float = 0.0  # keep tokens with at least this share of the likeliest one's probability
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits of seen tokens
    presence_penalty: float = 0.0  # subtracted once from tokens already in the output
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output
    seed: int | None = None  # own random stream: the same tokens whatever else runs
    logprobs: int | None = None  # also return the log probability and this many alternatives
    stop: tuple[str, ...] = ()  # end before any of these texts
    stop_token_ids: tuple[int, ...] = ()  # end at any of these tokens, besides the model's own
    ignore_eos: bool = False  # run to max_tokens

    def __post_init__(self) -> None:
        checks = (
            ("max_tokens", self.max_tokens >= 1, ">= 1"),
            ("temperature", 0 <= self.temperature < math.inf, "finite and >= 0"),
            ("top_k", self.top_k >= 0, ">= 0"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            # Bounds that no use needs: what penalties make of logits has to stay finite in float32.
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "in [0.01, 100]"),
            ("presence_penalty", abs(self.presence_penalty) <= 100, "in [-100, 100]"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 100, "in [-100, 100]"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 100, "in 0..100"),
            ("stop", all(self.stop), "non-empty texts"),
        )
        for name, good, want in checks:
            if not good:
                raise ConfigError(f"{name} must be {want}, got {getattr(self, name)!r}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a chosen token and of the likeliest ones (natural log)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log probability), likeliest first


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"


class Status(enum.Enum):
    """Where a request stands."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """One request from arrival to its last token. Identity is the object itself."""

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    arrival_s: float = 0.0  # engine clock
    priority: int = 0  # lower runs first
    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    preemptions: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # [output], only if asked for
    text: str = ""  # of the output so far, only if it is detokenised
    order: int = 0  # arrival number: ties of priority go to the older request
    row: int = -1  # state row while it runs, else -1

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: the prompt and the output."""
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(slots=True)
class Plan:
    """One step, as plain arrays: it can be logged, replayed and sent to other ranks.

    Requests stand in order of their query length: first those that run a single token
    (`num_decodes` of them), then longer ones, so that backends can split the batch.
    """

    step: int
    num_decodes: int  # leading requests with exactly one query token
    rows: NDArray[np.int32]  # [B] state slot of each request, constant while it runs
    query_lens: NDArray[np.int32]  # [B] tokens to run, at least 1
    context_lens: NDArray[np.int32]  # [B] tokens in the KV cache once the step has run
    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    block_tables: NDArray[np.int32]  # [B, max pages]; unused entries are 0
    samples: NDArray[np.bool_]  # [B] whether the last query token's logits are sampled
    requests: tuple[Request, ...] = ()  # [B] for sampling parameters; not needed by the model
    # With context parallelism only: `num_decodes` then counts decoding requests, not chunks of one
    # token, and `block_tables` are those of the owners.
    owners: NDArray[np.int32] | None = None  # [B] the CP rank that keeps a request's KV
    shard_tables: NDArray[np.int32] | None = None  # [cp, B, max pages] tables on each CP rank

    @property
    def num_tokens(self) -> int:
        """T: query tokens of all requests."""
        return len(self.token_ids)

    @property
    def sampled(self) -> tuple[Request, ...]:
        """[S] the requests that get a token in this step."""
        if self.samples.all():
            return self.requests
        return tuple(compress(self.requests, self.samples.tolist()))


@dataclass(slots=True)
class Outcome:
    """What a step gave back: one sampled token for each request with `plan.samples`."""

    token_ids: NDArray[np.int64]  # [S] in the plan's order
    logprobs: list[TokenLogprobs | None] | None = None  # [S], only if some request asked
