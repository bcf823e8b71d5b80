"""A rank's process: it calls the engine's process, builds what it is told to, and runs steps until
the connection closes. `rank_supervisor` forks it, and kills it when the engine's process is gone.
"""

import os
import pickle
import select
import sys
import traceback
from typing import Any, NoReturn

import torch

from kllm import env
from kllm.config import EngineConfig
from kllm.engine.memory import KVBudget
from kllm.engine.rank import Rank
from kllm.engine.rank_answers import StepAnswers
from kllm.engine.rank_channel import STEPS, Address, Channel, SpinWait, call
from kllm.engine.rank_groups import joined_groups, try_groups
from kllm.engine.rank_protocol import (
    Allocate,
    Build,
    Failure,
    Join,
    Release,
    Settle,
    StandIn,
    Step,
)
from kllm.hardware import release_memory
from kllm.models.base import Groups
from kllm.models.load import ResolvedModel, resolve
from kllm.parallel import distributed, expert_deep_ep


class RankServer:
    """Answers messages one after the other."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._config: EngineConfig
        self._resolved: ResolvedModel
        self._device: torch.device
        self._groups: Groups | None = None
        self._rank: Rank | None = None
        self._steps: StepAnswers | None = None

    def reply(self, message: Any) -> Any:
        """The answer to a message, or what kept the rank from it."""
        try:
            return self._answer(message)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine must hear of it
            memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
            lines = str(error).strip().splitlines()
            text = lines[0] if lines else repr(error)
            if env.debug():  # only this process knows where it happened
                text += "\n" + traceback.format_exc()
            return Failure(type(error).__name__, text, memory)

    def _answer(self, message: Any) -> Any:
        match message:
            case Join():
                self._join(message)
                return True
            case StandIn():
                self._steps = StepAnswers(message.rank)
                return True
            case Build():
                return self._build()
            case Allocate():
                assert self._rank is not None
                self._rank.allocate(
                    message.budget, message.stripes, message.cp_kind, fill=message.fill
                )
                self._steps = StepAnswers(self._rank)
                return True
            case Settle():
                assert self._rank is not None
                return self._rank.settle()
            case Step():
                assert self._steps is not None, "no rank was built"
                return self._steps.answer(message)
            case Release():
                self._release()
                return True
        raise AssertionError(f"unknown message {type(message).__name__}")

    def _join(self, message: Join) -> None:
        config, world = message.config, message.config.parallel.world
        self._config, self._resolved = config, resolve(config)
        device = torch.device(self._resolved.device)
        if device.type == "cuda":
            local = int(os.environ.get("LOCAL_RANK", self.number))
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
        distributed.connect(message.store, message.prefix, self.number, world, device)
        self._groups, self._device = joined_groups(config), device
        try_groups(self._groups, device)

    def _build(self) -> KVBudget:
        assert self._groups is not None, "the ranks have not joined"
        self._rank = Rank(
            self._config, self._resolved, self._groups, number=self.number, device=self._device
        )
        return self._rank.budget

    def _release(self) -> None:
        if self._rank is not None:
            self._rank.close()
        self._rank = self._steps = self._groups = None
        release_memory()  # NCCL does not leave a group while a graph that has its calls is alive
        expert_deep_ep.release()
        distributed.disconnect()
        release_memory()  # of the groups


def serve(address: Address, key: str, number: int, processes: int) -> NoReturn:
    """Call the engine's process and answer until it ends the rank, or ends itself.

    Args:
        processes: of this machine that wait for each other, with the engine's.
    """
    try:
        steps = Channel(call(address, key, number, STEPS))
    except OSError as error:
        print(f"rank {number} cannot reach the engine at {address}: {error.strerror}", flush=True)
        _end(1)
    server, spin_wait, poll = RankServer(number), SpinWait(processes), select.poll()
    poll.register(steps.fileno(), select.POLLIN)
    try:
        while True:
            spin_wait.wait(poll)
            message = pickle.loads(steps.receive())
            if message is None:
                break
            steps.send(pickle.dumps(server.reply(message), pickle.HIGHEST_PROTOCOL))
    except (EOFError, OSError):
        _end(1)
    server.reply(Release())
    _end(0)


def _end(code: int) -> NoReturn:
    # Not sys.exit: a library's thread may never end, and this copy of the supervisor must.
    sys.stdout.flush()
    os._exit(code)
