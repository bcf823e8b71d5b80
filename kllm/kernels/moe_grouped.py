"""Routed experts as two grouped matrix products: no loop over experts, no host synchronisation.

Unlike the reference its shapes depend on the number of tokens only, so that a CUDA graph can
hold it.
"""

import torch
from torch import Tensor

from kllm import kernels


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float | None,
    first_expert: int,
) -> Tensor:
    """`kllm.kernels.reference.moe`, for dtypes that `torch._grouped_mm` takes (bfloat16)."""
    num_experts, k = w13.shape[0], topk_ids.shape[1]
    local = (topk_ids - first_expert).flatten()
    local = local.masked_fill((local < 0) | (local >= num_experts), num_experts)
    experts, order = local.sort(stable=True)  # foreign ones last
    ends = torch.searchsorted(
        experts, torch.arange(num_experts, device=x.device), right=True, out_int32=True
    )
    hidden = torch._grouped_mm(x[order // k], w13.transpose(1, 2), offs=ends)
    hidden = kernels.swiglu(hidden, limit)
    rows = torch._grouped_mm(hidden, w2.transpose(1, 2), offs=ends).float()
    # Rows behind the last expert are uninitialised memory: replaced, as 0 * NaN is NaN.
    rows.masked_fill_((experts == num_experts).unsqueeze(1), 0)
    unsorted = torch.empty_like(rows).index_copy_(0, order, rows)  # [T k, d]
    weighted = unsorted.view(-1, k, x.shape[1]) * topk_weights.unsqueeze(2)
    return weighted.sum(dim=1).to(x.dtype)
