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

from kllm.core import Request, SamplingParams, TokenLogprobs
from kllm.sampling.penalties import Penalties, penalised

# Elements of logits that are drawn from at once: bounds the float64 temporaries.
AT_ONCE = 1 << 22


def work_bytes(rows: int, vocab_size: int) -> int:
    """Device memory that sampling `rows` requests may need, float32 logits included.

    24 bytes a logit for the logits, their copy and the penalties' counts; 60 more for those that
    are sorted and summed in float64 at once.
    """
    logits = rows * vocab_size
    return 24 * logits + 60 * min(logits, max(AT_ONCE, vocab_size))


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
            requests: [S]. Pass the same object while the batch stays the same: what derives from
                its parameters is kept.

        Returns:
            Token ids [S] int64 on the device, and the log probabilities where a request asks for
            them (natural, of the model's own distribution: before penalties and temperature).
        """
        batch = self._batch
        if batch is None or batch.requests is not requests:
            batch = self._batch = _Batch(requests, self.seed, logits.shape[1], self.device)
        penalties = batch.penalties
        adjusted = penalties.apply(logits) if penalties is not None else logits
        tokens = adjusted.argmax(dim=-1)
        for group in batch.groups:
            tokens[group.index] = group.draw(adjusted[group.index])
        return tokens, _logprobs(logits, tokens, requests) if batch.any_logprobs else None


class _Batch:
    """What sampling needs to know of a set of requests; kept while the set stays the same."""

    def __init__(
        self, requests: Sequence[Request], seed: int, vocab_size: int, device: torch.device
    ) -> None:
        self.requests = requests
        params = [request.params for request in requests]
        self.any_logprobs = any(p.logprobs is not None for p in params)
        self.penalties: Penalties | None = None
        if any(penalised(p) for p in params):
            self.penalties = Penalties(requests, vocab_size, device)
        plain = [i for i, p in enumerate(params) if not (p.greedy or _filtered(p))]
        filtered = [i for i, p in enumerate(params) if not p.greedy and _filtered(p)]
        size = max(1, AT_ONCE // vocab_size)
        self.groups = [
            _Group(requests, rows[at : at + size], seed, rows is filtered, device)
            for rows in (plain, filtered)
            for at in range(0, len(rows), size)
        ]


def _filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


class _Group:
    """Requests that are drawn in one go. Their parameters are columns [R, 1]."""

    def __init__(
        self,
        requests: Sequence[Request],
        rows: list[int],
        seed: int,
        filtered: bool,
        device: torch.device,
    ) -> None:
        def column(values: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        self._requests = [requests[i] for i in rows]
        self._seeds = np.array([_stream(r, seed) for r in self._requests], np.uint64)
        self._filtered = filtered
        self.index = torch.tensor(rows, dtype=torch.int64, device=device)  # [R] in the batch
        params = [request.params for request in self._requests]
        coldest = torch.finfo(torch.float32).tiny
        self._temperature = column([max(p.temperature, coldest) for p in params], torch.float32)
        if filtered:
            self._top_k = column([p.top_k or np.inf for p in params])
            self._top_p = column([p.top_p for p in params])
            self._min_p = column([p.min_p for p in params])

    def draw(self, logits: Tensor) -> Tensor:
        """The next token [R] of each request, from its logits [R, V] after penalties."""
        places = np.array([len(request.output_ids) for request in self._requests], np.uint64)
        at = torch.from_numpy(uniform(self._seeds, places)).to(logits.device)
        # The likeliest logit becomes 0 first: a tiny temperature overflows the others only.
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / self._temperature
        if not self._filtered:
            return _invert(torch.softmax(scaled, dim=-1).double(), at)
        values, order = scaled.sort(dim=-1, descending=True, stable=True)
        place = _invert(self._filter(values), at)
        return order.gather(1, place.unsqueeze(1)).squeeze(1)

    def _filter(self, values: Tensor) -> Tensor:
        """Mass [R, V] float64 that top-k, top-p and min-p leave, from logits in falling order."""
        rank = torch.arange(values.shape[1], device=values.device)
        values = values.masked_fill(rank >= self._top_k, -torch.inf)
        mass = torch.softmax(values, dim=-1).double()
        # A token stays while the mass before it is short of top-p: the likeliest one always stays.
        keep = mass.cumsum(dim=-1) - mass < self._top_p
        keep &= mass >= self._min_p * mass[:, :1]
        return mass * keep


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


def _invert(mass: Tensor, uniform: Tensor) -> Tensor:
    """First place where the running sum of `mass` [R, n] passes `uniform` [R] of the total."""
    running = mass.cumsum(dim=-1)
    total = running[:, -1]
    # Rounding must not lift the target to the total: the last place may have no mass.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(running, target.unsqueeze(1), right=True).squeeze(1)


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
