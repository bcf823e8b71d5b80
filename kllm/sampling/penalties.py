"""Penalties on tokens that were seen, as they are defined by the OpenAI and CTRL conventions."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kllm.core import Request, SamplingParams


def penalised(params: SamplingParams) -> bool:
    """Whether any penalty is set."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


class Penalties:
    """What the penalised requests of a batch have seen, counted as their outputs grow.

    Tokens are counted once, when the batch is made; after that a step adds only the new ones, so
    its cost does not grow with the length of the outputs.

    Args:
        requests: the batch; those without penalties are left alone.
    """

    def __init__(self, requests: Sequence[Request], vocab_size: int, device: torch.device) -> None:
        places = [i for i, request in enumerate(requests) if penalised(request.params)]
        self._requests = [requests[i] for i in places]
        self._place = torch.tensor(places, dtype=torch.int64, device=device)  # [R] in the batch
        shape = len(places), vocab_size
        self._seen = torch.zeros(shape, dtype=torch.bool, device=device)  # in prompt or output
        self._counts = torch.zeros(shape, dtype=torch.int32, device=device)  # in the output
        self._counted = [0] * len(places)
        self._mark_seen([request.prompt_ids for request in self._requests])

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

        params = [request.params for request in self._requests]
        self._repetition = column([p.repetition_penalty for p in params])
        self._presence = column([p.presence_penalty for p in params])
        self._frequency = column([p.frequency_penalty for p in params])

    def apply(self, logits: Tensor) -> Tensor:
        """New logits [S, V]; rows of requests without penalties are as they were.

        repetition (Keskar et al. 2019), over prompt and output: positive logits are divided,
        negative ones multiplied. presence and frequency, over the output: subtracted once, and
        once per occurrence.
        """
        self._count()
        values = logits[self._place]
        by = torch.where(self._seen, self._repetition, 1.0)
        values = torch.where(values > 0, values / by, values * by)
        values -= self._presence * (self._counts > 0) + self._frequency * self._counts
        return logits.index_copy(0, self._place, values)

    def _count(self) -> None:
        """Add the output tokens that are new since the last step."""
        fresh = [r.output_ids[n:] for r, n in zip(self._requests, self._counted, strict=True)]
        self._counted = [len(request.output_ids) for request in self._requests]
        rows, ids = self._mark_seen(fresh)
        ones = torch.ones_like(ids, dtype=torch.int32)
        self._counts.index_put_((rows, ids), ones, accumulate=True)

    def _mark_seen(self, tokens: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Enter each row's tokens; their places as rows [N] and ids [N]."""
        lengths = [len(ids) for ids in tokens]
        flat = np.empty((2, sum(lengths)), np.int64)
        flat[0] = np.repeat(np.arange(len(tokens)), lengths)
        flat[1] = [token for ids in tokens for token in ids]
        rows, ids = torch.from_numpy(flat).to(self._seen.device)
        self._seen[rows, ids] = True
        return rows, ids
