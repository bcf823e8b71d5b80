"""Expert exchange by all-gather and reduce-scatter: every token goes to every rank.

All shapes are known on the host before the step, so that nothing synchronises and a CUDA graph can
hold it. For steps of few tokens, whose transfers cost their latency and hardly their bytes.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from kllm.parallel.communicator import Communicator, Handle
from kllm.parallel.expert_dispatch import DispatchStep, Routed, pack_routing, unpack_routing


class AllGather:
    """Sends every token to every rank.

    Args:
        per_rank: slots of each rank.
    """

    def __init__(self, comm: Communicator, per_rank: int) -> None:
        self._comm = comm
        self._first = comm.rank * per_rank

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
        return _Trip(self._comm, n, self._first, x_in, routing_in, handles)


@dataclass(frozen=True, slots=True)
class _Trip:
    comm: Communicator
    tokens: int
    first: int
    x: Tensor
    routing: Tensor
    handles: tuple[Handle, ...]

    def arrive(self) -> Routed:
        """See `Trip.arrive`."""
        for handle in self.handles:
            handle.wait()
        slots, weights = unpack_routing(self.routing)
        return Routed(self.x, slots, weights, self.first)

    def combine(self, y: Tensor) -> Tensor:
        """See `Trip.combine`: summed as the communicator does, in the dtype of `y`."""
        out = y.new_empty(y.shape[0] // self.comm.size, y.shape[1])
        self.comm.reduce_scatter(out, y).wait()
        return out[: self.tokens]
