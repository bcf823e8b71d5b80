"""Routed experts as two grouped matrix products: no loop over experts, no host synchronisation.

Unlike the reference its shapes depend on the number of tokens only, so that a CUDA graph can
hold it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kllm import kernels


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float | None,
    first_expert: int,
    pairs: int | None = None,
) -> Tensor:
    """`kllm.kernels.reference.moe`, for dtypes that `torch._grouped_mm` takes (bfloat16).

    Args:
        pairs: how many of `topk_ids` are in the range, where that is known: work space is for
            these only.
    """
    (tokens, dim), num_experts, k = x.shape, w13.shape[0], topk_ids.shape[1]
    local = (topk_ids - first_expert).flatten()
    local = local.masked_fill((local < 0) | (local >= num_experts), num_experts)
    experts, order = local.sort(stable=True)  # foreign ones last
    ends = torch.searchsorted(
        experts, torch.arange(num_experts, device=x.device), right=True, out_int32=True
    )
    used = tokens * k if pairs is None else pairs
    # One row more, for all foreign pairs: those behind the last expert are uninitialised memory,
    # which no weight of 0 can remove, as 0 * NaN is NaN.
    source = F.pad(order[:used] // k, (0, 1))
    hidden = torch._grouped_mm(x[source], w13.transpose(1, 2), offs=ends)
    hidden = kernels.swiglu(hidden, limit)
    rows = torch._grouped_mm(hidden, w2.transpose(1, 2), offs=ends)
    rows[used].zero_()
    place = torch.empty_like(order)
    place[order] = torch.arange(tokens * k, device=x.device)
    place = place.masked_fill(local == num_experts, used).view(tokens, k)
    # In order of the choices, so that the sum is the same each time.
    y = x.new_zeros(tokens, dim, dtype=torch.float32)
    for choice in range(k):
        y += rows[place[:, choice]] * topk_weights[:, choice : choice + 1]
    return y.to(x.dtype)
