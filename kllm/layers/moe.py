"""Mixture of experts: routers, stacked experts, and the block that joins them.

A router answers with expert ids [T, k] int64 and weights [T, k] float32. Experts are whole on
a rank: with an expert-parallel group each rank holds an equal, contiguous range of them,
computes what its own experts add, and the sums are all-reduced.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kllm import kernels
from kllm.layers.linear import shard_size
from kllm.parallel.communicator import Communicator
from kllm.registry import Registry

SUM_FLOOR = 1e-20  # keeps the normalisation finite when all chosen scores underflow


def _sqrt_softplus(logits: Tensor) -> Tensor:
    return F.softplus(logits).sqrt()


SCORES: Registry[Callable[[Tensor], Tensor]] = Registry(
    "router scoring function", {"sqrtsoftplus": _sqrt_softplus, "sigmoid": torch.sigmoid}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What a router needs to know besides its weights."""

    num_experts: int
    top_k: int
    scoring: str  # a key of SCORES
    scaling: float  # the weights of a token add up to this (when normalised)
    normalize: bool = True
    groups: int = 1  # node-limited routing (DeepSeek-V3): experts come in equal groups,
    kept_groups: int = 1  # and only those of the best groups can be chosen

    def weigh(self, scores: Tensor, ids: Tensor) -> Tensor:
        """Weights [T, k] float32 of the chosen experts from the scores [T, E] of all."""
        weights = scores.gather(1, ids)
        if self.normalize:
            weights = weights / (weights.sum(dim=1, keepdim=True) + SUM_FLOOR)
        return weights * self.scaling


class _Gate(nn.Module):
    """Scores of all experts; float32 whatever the model's dtype, as routing is discrete."""

    def __init__(self, dim: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        shape = (routing.num_experts, dim)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)

    def scores(self, x: Tensor) -> Tensor:
        """[T, dim] -> [T, E] float32."""
        return SCORES[self.routing.scoring](F.linear(x.float(), self.weight))


class ScoreRouter(_Gate):
    """The k experts with the largest score + bias; the bias never enters the weights."""

    def __init__(self, dim: int, routing: Routing) -> None:
        super().__init__(dim, routing)
        bias = torch.empty(routing.num_experts, dtype=torch.float32)
        self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[T, dim] -> expert ids [T, k] and weights [T, k]; `token_ids` play no part."""
        scores = self.scores(x)
        ids = self._limit_groups(scores + self.bias).topk(self.routing.top_k, sorted=False).indices
        return ids, self.routing.weigh(scores, ids)

    def _limit_groups(self, choice: Tensor) -> Tensor:
        """Mask the groups whose two best experts together fall short (DeepSeek-V3)."""
        routing = self.routing
        if routing.groups == routing.kept_groups:
            return choice
        grouped = choice.view(choice.shape[0], routing.groups, -1)  # [T, groups, E / groups]
        strength = grouped.topk(2, dim=-1).values.sum(dim=-1)
        kept = strength.topk(routing.kept_groups, sorted=False).indices
        dropped = torch.ones_like(strength, dtype=torch.bool).scatter_(1, kept, False)
        return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).view_as(choice)


class HashRouter(_Gate):
    """Experts fixed by the token's id; only their weights are learned (DeepSeek-V4)."""

    def __init__(self, dim: int, routing: Routing, vocab_size: int) -> None:
        super().__init__(dim, routing)
        table = torch.empty(vocab_size, routing.top_k, dtype=torch.int64)
        self.tid2eid = nn.Parameter(table, requires_grad=False)

    def forward(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[T, dim] and token ids [T] -> expert ids [T, k] and weights [T, k]."""
        ids = self.tid2eid[token_ids]
        return ids, self.routing.weigh(self.scores(x), ids)


class RoutedExperts(nn.Module):
    """This rank's experts, stacked: w13 [E / size, 2 I, dim], gate first; w2 [E / size, dim, I]."""

    def __init__(
        self, dim: int, hidden: int, num_experts: int, comm: Communicator, limit: float | None
    ) -> None:
        super().__init__()
        local = shard_size("routed experts", num_experts, comm.size)
        self.w13 = nn.Parameter(torch.empty(local, 2 * hidden, dim), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(local, dim, hidden), requires_grad=False)
        self.first_expert = comm.rank * local
        self.limit = limit
        self.comm = comm

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[T, dim], ids and weights [T, k] -> [T, dim], summed over the ranks."""
        y = kernels.moe(x, ids, weights, self.w13, self.w2, self.limit, self.first_expert)
        if self.comm.size > 1:
            self.comm.all_reduce(y).wait()
        return y


class MoE(nn.Module):
    """Routed experts chosen by a router, plus an expert that all tokens share."""

    def __init__(self, router: nn.Module, experts: RoutedExperts, shared: nn.Module | None) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared

    def forward(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """[T, dim] and the ids [T] of the tokens -> [T, dim]."""
        ids, weights = self.router(x, token_ids)
        y: Tensor = self.experts(x, ids, weights)
        return y if self.shared is None else y + self.shared(x)
