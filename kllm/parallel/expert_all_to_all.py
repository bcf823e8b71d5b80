"""Expert exchange by all-to-all with exact counts: nothing is sent that is not needed.

A token goes to a rank at most once, however many of its experts live there. The counts travel
first, and the host waits for them: they are the shapes of what follows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kllm.parallel.communicator import Communicator, Handle
from kllm.parallel.expert_dispatch import (
    DispatchStep,
    Routed,
    check_conservation,
    checks_counts,
    pack_routing,
    unpack_routing,
)


class AllToAll:
    """Sends each token to the ranks that need it, and to no others.

    Args:
        per_rank: slots of each rank.
    """

    def __init__(self, comm: Communicator, per_rank: int) -> None:
        self._comm = comm
        self._per_rank = per_rank

    def send(self, tokens: Routed, step: DispatchStep) -> "_Trip":
        """See `Dispatcher.send`."""
        comm, device = self._comm, tokens.x.device
        n, ranks = tokens.x.shape[0], comm.size
        home = tokens.slots // self._per_rank  # [n, k]
        wanted = torch.zeros(n, ranks, dtype=torch.bool, device=device).scatter_(1, home, True)
        pairs = torch.zeros(ranks, dtype=torch.int64, device=device)
        pairs.scatter_add_(0, home.flatten(), torch.ones_like(home).flatten())
        leaving = torch.stack((wanted.sum(dim=0), pairs), dim=1)  # [ranks, 2]
        coming = torch.empty_like(leaving)
        comm.all_to_all(coming, leaving, [1] * ranks, [1] * ranks).wait()
        counts = torch.stack((leaving[:, 0], coming[:, 0], coming[:, 1])).tolist()
        sent, received, own_pairs = counts
        if checks_counts(device):
            check_conservation(comm, sum(sent), sum(received), device)
        # Rows in order of rank, then token: a stable sort, as `nonzero` would synchronise.
        order = (~wanted).t().flatten().byte().argsort(stable=True)[: sum(sent)]
        rank, token = order // max(n, 1), order % max(n, 1)
        # Slots as the receiver counts them: they are valid wherever the rows end up.
        slots = tokens.slots[token] - (rank * self._per_rank).unsqueeze(1)
        slots = slots.masked_fill((slots < 0) | (slots >= self._per_rank), -1)
        routing = pack_routing(slots, tokens.weights[token])
        x_in = tokens.x.new_empty(sum(received), tokens.x.shape[1])
        routing_in = routing.new_empty(sum(received), routing.shape[1])
        handles = (
            comm.all_to_all(x_in, tokens.x[token], received, sent),
            comm.all_to_all(routing_in, routing, received, sent),
        )
        shape = (n, min(tokens.slots.shape[1], ranks))
        return _Trip(comm, shape, order, sent, received, sum(own_pairs), x_in, routing_in, handles)


@dataclass(frozen=True, slots=True)
class _Trip:
    comm: Communicator
    shape: tuple[int, int]  # tokens, and ranks that one token can go to
    order: Tensor  # [rows] rank * tokens + token of each row sent
    sent: list[int]  # [ranks] rows
    received: list[int]
    pairs: int
    x: Tensor
    routing: Tensor
    handles: tuple[Handle, ...]

    def arrive(self) -> Routed:
        """See `Trip.arrive`."""
        for handle in self.handles:
            handle.wait()
        slots, weights = unpack_routing(self.routing)
        return Routed(self.x, slots, weights, pairs=self.pairs)

    def combine(self, y: Tensor) -> Tensor:
        """See `Trip.combine`: float32, summed in order of the ranks."""
        rows, (n, ways) = len(self.order), self.shape
        back = y.new_empty(rows + 1, y.shape[1])
        handle = self.comm.all_to_all(back[:rows], y, self.sent, self.received)
        place = self.order.new_full((self.comm.size * n,), rows)
        place[self.order] = torch.arange(rows, device=y.device)
        # A token's rows by rank, then the row of zeros for ranks that it was not sent to.
        places = place.view(self.comm.size, n).sort(dim=0).values[:ways]
        handle.wait()
        back[rows].zero_()
        total = y.new_zeros(n, y.shape[1], dtype=torch.float32)
        for at in places:
            total += back[at]
        return total
