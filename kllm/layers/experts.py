"""Routed experts on a rank: their weights, which of them it holds, and who uses them how often."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kllm import kernels
from kllm.layers.linear import shard_size
from kllm.parallel.communicator import Communicator
from kllm.parallel.expert_dispatch import Routed
from kllm.parallel.expert_placement import ExpertPlacement
from kllm.parallel.single import SingleComm


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The ranks around a block of experts.

    With `ep` of one rank every expert's hidden features are split over `tp`, otherwise experts
    are whole. The ranks of `tp` lie side by side in `ep`.
    """

    tp: Communicator  # hold the same tokens
    ep: Communicator  # hold different experts
    backend: str = "auto"  # one of `kllm.config.EP_BACKENDS`

    @classmethod
    def single(cls) -> "ExpertRanks":
        """One rank has everything."""
        return cls(SingleComm(), SingleComm())

    @property
    def same_tokens(self) -> bool:
        """Whether all ranks of `ep` hold the same tokens."""
        return self.ep.size <= self.tp.size


class RoutedExperts(nn.Module):
    """This rank's experts, stacked by slot: w13 [S, 2 I, dim], gate first; w2 [S, dim, I].

    Attributes:
        comm: the ranks that hidden features are split over; the loader asks.
        held: the expert in each slot; the loader asks.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        placement: ExpertPlacement,
        ranks: ExpertRanks,
        limit: float | None,
    ) -> None:
        super().__init__()
        assert placement.ranks == ranks.ep.size
        self.comm = ranks.tp if ranks.ep.size == 1 else SingleComm()
        self.held = placement.held(ranks.ep.rank)
        self.num_experts, self.per_rank = placement.num_experts, placement.per_rank
        self.limit = limit
        inner = shard_size("hidden features of an expert", hidden, self.comm.size)
        slots = placement.per_rank
        self.w13 = nn.Parameter(torch.empty(slots, 2 * inner, dim), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(slots, dim, inner), requires_grad=False)
        self.slot_of: Tensor | None  # [E, most copies] int64
        self.copies: Tensor | None  # [E] int64
        slot_of, copies = (None, None) if placement.plain else _slot_table(placement.copies())
        self.register_buffer("slot_of", slot_of, persistent=False)
        self.register_buffer("copies", copies, persistent=False)

    def slots(self, ids: Tensor, offset: int) -> Tensor:
        """The slots [T, k] of the experts `ids` [T, k].

        The copies of an expert take turns from token to token; `offset` is added to the token's
        index, so that ranks with few tokens each do not all begin with the same copy.
        """
        if self.slot_of is None or self.copies is None:
            return ids
        index = torch.arange(offset, offset + ids.shape[0], device=ids.device).unsqueeze(1)
        return self.slot_of[ids, index % self.copies[ids]]

    def forward(self, tokens: Routed) -> Tensor:
        """What this rank's weights add to each token, [n, dim]: a part of the sum over ranks."""
        t = tokens
        return kernels.moe(t.x, t.slots, t.weights, self.w13, self.w2, self.limit, t.first, t.pairs)


def _slot_table(copies: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    counts = [len(slots) for slots in copies]
    padded = [[*slots, *[-1] * (max(counts) - len(slots))] for slots in copies]
    return torch.tensor(padded), torch.tensor(counts)


class RoutingCounts:
    """How often each expert was chosen for tokens that this rank routed."""

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self._counts = torch.zeros(num_experts, dtype=torch.int64, device=device)

    def add(self, ids: Tensor) -> None:
        """Count a step's choices [T, k]; stays on the device (`bincount` would synchronise)."""
        chosen = ids.flatten()
        self._counts.scatter_add_(0, chosen, torch.ones_like(chosen))

    def read(self) -> list[int]:
        """[E] so far."""
        found: list[int] = self._counts.tolist()
        return found
