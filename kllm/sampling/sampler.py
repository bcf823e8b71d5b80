"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, in this order.

A token is drawn by inverting the cumulative distribution at one uniform number, and that
number is a hash of the request's seed and of the token's place in the output. So a request's
tokens do not depend on what else is in the batch, nor on preemption, and no random state is
kept.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kllm.core import Request, TokenLogprobs
from kllm.sampling.penalties import apply_penalties, penalised


class Sampler:
    """Draws one token for each row of logits.

    Args:
        seed: of requests that have no seed of their own; their ids make the difference.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.device = device
        self._batch: _Batch | None = None

    def __call__(
        self, logits: Tensor, requests: Sequence[Request]
    ) -> tuple[Tensor, list[TokenLogprobs | None] | None]:
        """One token for each request.

        Args:
            logits: [S, V] float32.
            requests: [S].

        Returns:
            Token ids [S] int64 on the device, and the log probabilities where a request asks for
            them (natural, of the model's own distribution: before penalties and temperature).
        """
        batch = self._batch
        if batch is None or batch.requests is not requests:
            batch = self._batch = _Batch(requests, self.seed, self.device)
        raw = logits
        if batch.any_penalty:
            logits = apply_penalties(logits, requests)
        tokens = logits.argmax(dim=-1)
        for rows, filters in ((batch.plain, None), (batch.filtered, batch.filters)):
            if len(rows):
                uniform = batch.uniform(rows)
                index = torch.from_numpy(rows).to(self.device)
                scaled = logits[index] / batch.temperature[index].unsqueeze(1)
                tokens[index] = _draw(scaled, torch.from_numpy(uniform).to(self.device), filters)
        return tokens, _logprobs(raw, tokens, requests) if batch.any_logprobs else None


class _Filters:
    """top-k, top-p and min-p of some requests, as columns [R, 1]."""

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)

        self.top_k = column([r.params.top_k or np.inf for r in requests])
        self.top_p = column([r.params.top_p for r in requests])
        self.min_p = column([r.params.min_p for r in requests])


class _Batch:
    """What sampling needs to know of a set of requests; kept while the set stays the same."""

    def __init__(self, requests: Sequence[Request], seed: int, device: torch.device) -> None:
        self.requests = requests
        params = [request.params for request in requests]
        drawn = np.array([not p.greedy for p in params], bool)
        some = np.array([p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params], bool)
        self.any_penalty = any(penalised(p) for p in params)
        self.any_logprobs = any(p.logprobs is not None for p in params)
        self.plain = np.flatnonzero(drawn & ~some)
        self.filtered = np.flatnonzero(drawn & some)
        self.filters = _Filters([requests[i] for i in self.filtered], device)
        if drawn.any():
            self._seeds = np.array([_stream(r, seed) for r in requests], np.uint64)
            warm = [p.temperature or 1.0 for p in params]
            self.temperature = torch.tensor(warm, dtype=torch.float32, device=device)

    def uniform(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """A number in [0, 1) for the next token of each of these requests."""
        place = np.array([len(self.requests[i].output_ids) for i in rows], np.uint64)
        return uniform(self._seeds[rows], place)


def uniform(seeds: NDArray[np.uint64], places: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1), a function of seed and place alone.

    The finaliser of SplitMix64 (Steele, Lea and Flood 2014), applied to each in turn.
    """
    mixed = _mix(_mix(seeds) + places * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _stream(request: Request, seed: int) -> int:
    if request.params.seed is not None:
        return request.params.seed % 2**64
    digest = hashlib.blake2b(f"{seed} {request.id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _draw(logits: Tensor, uniform: Tensor, filters: _Filters | None) -> Tensor:
    """Invert the cumulative distribution of each row at its uniform number."""
    if filters is None:
        return _invert(torch.softmax(logits, dim=-1).double(), uniform)
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(values.shape[1], device=values.device)
    values = values.masked_fill(rank >= filters.top_k, -torch.inf)
    mass = torch.softmax(values, dim=-1).double()
    # A token stays while the mass before it is short of top-p: the likeliest one always stays.
    keep = mass.cumsum(dim=-1) - mass < filters.top_p
    keep &= mass >= filters.min_p * mass[:, :1]
    place = _invert(mass * keep, uniform)
    return order.gather(1, place.unsqueeze(1)).squeeze(1)


def _invert(mass: Tensor, uniform: Tensor) -> Tensor:
    """First place where the running sum of `mass` [R, n] passes `uniform` [R] of the total."""
    total = mass.cumsum(dim=-1)
    target = (uniform * total[:, -1]).unsqueeze(1)
    return torch.searchsorted(total, target, right=True).squeeze(1).clamp_max(mass.shape[1] - 1)


def _logprobs(
    logits: Tensor, tokens: Tensor, requests: Sequence[Request]
) -> list[TokenLogprobs | None]:
    wanted = [i for i, r in enumerate(requests) if r.params.logprobs is not None]
    index = torch.tensor(wanted, device=logits.device)
    values = torch.log_softmax(logits[index], dim=-1)
    chosen = tokens[index]
    own = values.gather(1, chosen.unsqueeze(1)).squeeze(1).tolist()
    most = max(requests[i].params.logprobs or 0 for i in wanted)
    best, ids = values.topk(min(most, values.shape[1]), dim=-1)
    out: list[TokenLogprobs | None] = [None] * len(requests)
    rows = zip(wanted, chosen.tolist(), own, ids.tolist(), best.tolist(), strict=True)
    for i, token, logprob, top_ids, top_values in rows:
        count = requests[i].params.logprobs
        top = tuple(zip(top_ids[:count], top_values[:count], strict=True))
        out[i] = TokenLogprobs(token, logprob, top)
    return out
