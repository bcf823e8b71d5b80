"""The exchange around expert parallelism: tokens go to the ranks of their experts and come back.

One protocol for every way to do it. A backend sends tokens and answers with a trip; the caller may
compute while it is under way, takes what arrived, and has the experts' answers brought back.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kllm import env
from kllm.errors import WorkerError
from kllm.parallel.communicator import Communicator


@dataclass(frozen=True, slots=True)
class DispatchStep:
    """What all ranks of an expert group know of a step, alike: choices may rest on it."""

    most: int  # tokens of the rank that sends the most
    decode_only: bool  # no rank runs a prompt


@dataclass(frozen=True, slots=True)
class Routed:
    """Tokens and the expert slots that they are for."""

    x: Tensor  # [n, d]
    slots: Tensor  # [n, k] int64
    weights: Tensor  # [n, k] float32
    first: int = 0  # slot of this rank's first expert; slots that are not its own do not count
    pairs: int | None = None  # how many of `slots` are this rank's, where that is known


class Trip(Protocol):
    """Tokens under way."""

    def arrive(self) -> Routed:
        """The tokens that came to this rank, its own among them."""

    def combine(self, y: Tensor) -> Tensor:
        """Bring the answers back.

        Args:
            y: [m, d] for each token that arrived the weighted sum over its experts of this rank.

        Returns:
            [n, d] for each token that was sent the sum over the ranks.
        """


class Dispatcher(Protocol):
    """One way of exchanging tokens. All ranks of the group call it alike."""

    def send(self, tokens: Routed, step: DispatchStep) -> Trip:
        """Start sending each token to the ranks that have its experts."""


def pack_routing(slots: Tensor, weights: Tensor) -> Tensor:
    """[n, k] slots and float32 weights as one message, [n, 2 k] int32."""
    return torch.cat((slots.int(), weights.view(torch.int32)), dim=1)


def unpack_routing(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The slots [n, k] int64 and weights [n, k] of a message of `pack_routing`."""
    slots, weights = packed.chunk(2, dim=1)
    return slots.long(), weights.contiguous().view(torch.float32)


def checks_counts(device: torch.device) -> bool:
    """Whether to compare counts now: in debug mode, but a captured graph cannot wait for them."""
    if not env.debug():
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def check_conservation(comm: Communicator, sent: int, received: int, device: torch.device) -> None:
    """Compare what all ranks sent with what all received. Synchronises: for debug mode.

    Raises:
        WorkerError: on every rank, when the totals differ.
    """
    totals = torch.tensor([sent, received], device=device)
    comm.all_reduce(totals).wait()
    all_sent, all_received = totals.tolist()
    if all_sent != all_received:
        raise WorkerError(
            f"{all_sent} tokens were sent to experts and {all_received} arrived: the exchange "
            f"between the {comm.size} ranks lost or made some; try another ep_backend"
        )
