"""Expert exchange by all-gather and reduce-scatter: every token goes to every rank.

All shapes are known on the host before the step, so that nothing synchronises and a CUDA graph can
hold it. For steps of few tokens, whose transfers cost their latency and hardly their bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kllm.parallel.communicator import Communicator, Handle
from kllm.parallel.emulated import EmulatedComm
from kllm.parallel.expert_dispatch import DispatchStep, Routed, pack_routing, unpack_routing


class AllGather:
    """Sends every token to every rank.

    Args:
        per_rank: slots of each rank.
    """

    def __init__(self, comm: Communicator, per_rank: int) -> None:
        self._comm, self._per_rank = comm, per_rank
        self._first = comm.rank * per_rank
        self._stand_in: _StandIn | None = None

    def send(self, tokens: Routed, step: DispatchStep) -> "_Trip":
        """See `Dispatcher.send`."""
        n, ranks = tokens.x.shape[0], self._comm.size
        assert n <= step.most
        padding = (0, 0, 0, step.most - n)  # rows at the end
        x = F.pad(tokens.x, padding)
        # Slot -1 is nobody's.
        routing = pack_routing(
            F.pad(tokens.slots, padding, value=-1), F.pad(tokens.weights, padding)
        )
        x_in = x.new_empty(ranks * step.most, x.shape[1])
        routing_in = routing.new_empty(ranks * step.most, routing.shape[1])
        handles = (
            self._comm.all_gather(x_in, x),
            self._comm.all_gather(routing_in, routing),
        )
        if self._stand_in is None and isinstance(self._comm, EmulatedComm):
            self._stand_in = _StandIn(self._comm, self._per_rank, x.device)
        return _Trip(self._comm, n, self._first, x_in, routing_in, handles, self._stand_in)


@dataclass(frozen=True, slots=True)
class _Trip:
    comm: Communicator
    tokens: int
    first: int
    x: Tensor
    routing: Tensor
    handles: tuple[Handle, ...]
    stand_in: "_StandIn | None"

    def arrive(self) -> Routed:
        """See `Trip.arrive`."""
        for handle in self.handles:
            handle.wait()
        slots, weights = unpack_routing(self.routing)
        if self.stand_in is not None:
            slots = self.stand_in.foreign(slots)
        return Routed(self.x, slots, weights, self.first)

    def combine(self, y: Tensor) -> Tensor:
        """See `Trip.combine`: summed as the communicator does, in the dtype of `y`."""
        out = y.new_empty(y.shape[0] // self.comm.size, y.shape[1])
        self.comm.reduce_scatter(out, y).wait()
        return out[: self.tokens]


class _StandIn:
    """Where tokens of ranks that are not there go, which are copies of this rank's own.

    As they are, all ranks' tokens would want the same few experts, and a rank would read far less
    weights than it does. Each rank's choices are moved on by its distance from this one: every
    rank is sent as much as this rank sends, to experts as different as its own choices are.
    """

    def __init__(self, comm: EmulatedComm, per_rank: int, device: torch.device) -> None:
        slots = comm.size * per_rank
        self._ranks = torch.arange(comm.size, device=device).view(-1, 1, 1)
        moved = torch.arange(slots, device=device) + (self._ranks[:, 0] - comm.rank) * per_rank
        # [ranks, slots + 1]; the last column, which is index -1 too, is nobody's.
        self._table = F.pad(moved % slots, (0, 1), value=-1)

    def foreign(self, slots: Tensor) -> Tensor:
        """Slots [ranks * n, k] as the ranks would have chosen them."""
        by_rank = slots.view(len(self._ranks), -1, slots.shape[1])
        return self._table[self._ranks, by_rank].view_as(slots)
