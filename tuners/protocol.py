"""What a tuning process and its worker say to each other: JSON, one message a line."""

import msgspec

from kllm.bench.workloads import Workload
from kllm.config import EngineConfig
from kllm.tuners.outcome import Outcome, Served, Tick


class Run(msgspec.Struct, tag="run", frozen=True):
    """To the worker: measure this."""

    config: EngineConfig
    workload: Workload
    memory_limit_bytes: int | None = None  # host memory that the worker may use, in all


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """To the worker: end the running measurement now and send what there is."""


class Started(msgspec.Struct, tag="started", frozen=True):
    """From the worker: engine built and warm; the measurement begins."""

    num_requests: int
    num_output_tokens: int


class Ticked(msgspec.Struct, tag="ticked", frozen=True):
    """From the worker: how far it is."""

    tick: Tick
    finished: tuple[Served, ...] = ()  # since the last message


class Done(msgspec.Struct, tag="done", frozen=True):
    """From the worker: the end of one measurement. A `failed` one may be followed by its exit."""

    outcome: Outcome


Request = Run | Stop
Reply = Started | Ticked | Done

_requests = msgspec.json.Decoder(Request)
_replies = msgspec.json.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    """What the tuning process sent.

    Raises:
        msgspec.DecodeError: something else.
    """
    return _requests.decode(line)


def decode_reply(line: bytes) -> Reply:
    """What the worker sent.

    Raises:
        msgspec.DecodeError: something else.
    """
    return _replies.decode(line)
