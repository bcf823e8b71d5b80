"""Mixture of experts: routers, stacked experts, and the block that joins them.

A router answers with expert ids [T, k] int64 and weights [T, k] float32. Whatever is split, every
rank ends with a part of the block's output, and one all-reduce over the tensor-parallel ranks adds
the parts of routed and shared experts up:

* one expert rank: each expert's hidden features are split over the tensor-parallel ranks;
* expert ranks that hold the same tokens: each computes its own experts for all of them;
* otherwise each tensor-parallel rank routes its share of the tokens to the ranks of their experts
  (`kllm.parallel.expert_dispatch`), and adds nothing to the other tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kllm.attention.context import ForwardContext
from kllm.layers.experts import ExpertRanks, RoutedExperts, RoutingCounts
from kllm.layers.mlp import GatedMLP
from kllm.parallel.expert_backends import Backends, exchanges
from kllm.parallel.expert_dispatch import DispatchStep, Routed
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
        each = routing.num_experts // routing.groups
        grouped = choice.view(-1, routing.groups, each)  # [T, groups, E / groups]
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


class MoE(nn.Module):
    """Routed experts chosen by a router, plus an expert that all tokens share.

    Args:
        shared: split over the same tensor-parallel ranks.
    """

    def __init__(
        self,
        router: ScoreRouter | HashRouter,
        experts: RoutedExperts,
        shared: GatedMLP | None,
        ranks: ExpertRanks,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.ranks = ranks
        self.counts: RoutingCounts | None = None
        self.backends: Backends | None = None
        if exchanges(ranks.backend, ranks.tp.size, ranks.ep.size):
            self.backends = Backends(
                ranks.backend,
                ranks.ep,
                per_rank=experts.per_rank,
                dim=experts.w2.shape[1],
                top_k=router.routing.top_k,
                device=experts.w2.device,
                dtype=experts.w2.dtype,
            )

    def count_routing(self) -> RoutingCounts:
        """Count from now on which experts are chosen."""
        self.counts = RoutingCounts(self.experts.num_experts, self.experts.w2.device)
        return self.counts

    def forward(self, x: Tensor, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, dim] and the ids [T] of the tokens -> [T, dim], the same on all ranks of `tp`."""
        tp, ep = self.ranks.tp, self.ranks.ep
        if self.backends is None:
            tokens = self._route(x, token_ids, 0)
            y = self._shared(x)
            y += self.experts(replace(tokens, first=ep.rank * self.experts.per_rank))
        else:
            each = -(-x.shape[0] // tp.size)
            share = slice(tp.rank * each, (tp.rank + 1) * each)  # of the tokens; empty if few
            step = self._step(x, ctx)
            tokens = self._route(x[share], token_ids[share], ep.rank)
            trip = self.backends.choose(step).send(tokens, step)
            y = self._shared(x)  # while the tokens travel
            y[share] += trip.combine(self.experts(trip.arrive()))
        if tp.size > 1:
            tp.all_reduce(y).wait()
        return y

    def _route(self, x: Tensor, token_ids: Tensor, offset: int) -> Routed:
        ids, weights = self.router(x, token_ids)
        if self.counts is not None:
            self.counts.add(ids)
        return Routed(x, self.experts.slots(ids, offset), weights)

    def _shared(self, x: Tensor) -> Tensor:
        """This rank's part of what the shared expert gives, in memory of its own."""
        return torch.zeros_like(x) if self.shared is None else self.shared.partial(x)

    def _step(self, x: Tensor, ctx: ForwardContext) -> DispatchStep:
        peers = (x.shape[0],) if self.ranks.same_tokens else ctx.peer_tokens
        assert peers, "the step does not say how many tokens the other expert ranks run"
        return DispatchStep(-(-max(peers) // self.ranks.tp.size), ctx.decode_only)
