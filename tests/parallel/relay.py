"""Pipeline stages that run one after the other in one thread, each step from first to last."""

from collections import deque

from torch import Tensor

from kllm.parallel.single import Done, SingleComm


class Relay(SingleComm):
    """One of the stages: what is sent to it waits until it runs."""

    def __init__(self, rank: int, mail: list[deque[Tensor]]) -> None:
        self.rank, self.size = rank, len(mail)
        self.mail = mail

    def send(self, x: Tensor, to: int) -> Done:
        self.mail[to].append(x.clone())
        return Done()

    def receive(self, out: Tensor, source: int) -> Done:
        out.copy_(self.mail[self.rank].popleft())
        return Done()


def relays(size: int) -> list[Relay]:
    """All stages of a pipeline."""
    mail: list[deque[Tensor]] = [deque() for _ in range(size)]
    return [Relay(rank, mail) for rank in range(size)]
