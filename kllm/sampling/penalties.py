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


def apply_penalties(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Logits [S, V] with each request's penalties; rows without any come back as they were.

    repetition (Keskar et al. 2019), over prompt and output: positive logits are divided,
    negative ones multiplied. presence and frequency, over the output: subtracted once, and once
    per occurrence.
    """
    logits = logits.clone()
    for i, request in enumerate(requests):
        params = request.params
        if not penalised(params):
            continue
        row = logits[i]
        if params.repetition_penalty != 1.0:
            seen = _tensor(np.unique([*request.prompt_ids, *request.output_ids]), row)
            values = row[seen]
            by = params.repetition_penalty
            row[seen] = torch.where(values > 0, values / by, values * by)
        if request.output_ids and (params.presence_penalty or params.frequency_penalty):
            ids, counts = np.unique(request.output_ids, return_counts=True)
            amount = params.presence_penalty + params.frequency_penalty * _tensor(counts, row)
            row[_tensor(ids, row)] -= amount.to(row.dtype)
    return logits


def _tensor(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
