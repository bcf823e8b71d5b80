"""The processes that ranks live in, seen from the engine's side.

The pool outlives the layouts that run on it. It listens to every rank: one that dies, stops to
answer, or reports an error ends them all, with one sentence that names the cause.
"""

import contextlib
import pickle
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kllm import env
from kllm.engine.rank_channel import SpinWait
from kllm.engine.rank_protocol import Failure
from kllm.engine.rank_start import HEARTBEAT_TIMEOUT_S, RankLink, Supervisor, start_here
from kllm.errors import CapacityError, ConfigError, DataError, DependencyError, WorkerError

LOOK_MS = 1000  # between two looks for heartbeats
CAUSE_S = 1.0  # after a first sign of trouble: how long to look for the rank that died
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """Until all ranks must have answered, and what is said of those that have not."""

    seconds: float
    missed: str  # what they did not do
    remedy: str

    def exceeded_by(self, ranks: Sequence[int]) -> str:
        """One sentence."""
        return (
            f"ranks {ranks} {self.missed} within {self.seconds:.0f} s and the job was ended; "
            f"{self.remedy}"
        )


class RankPool:
    """Ranks that wait for work.

    Args:
        ranks: in order of their numbers.
        supervisor: the parent of those that it started.
        host: where the ranks reach this process.
        local: how many of them run on this machine; None: all.
    """

    def __init__(
        self,
        ranks: Sequence[RankLink],
        supervisor: Supervisor,
        host: str = "127.0.0.1",
        local: int | None = None,
    ) -> None:
        self.ranks = list(ranks)
        self.host = host
        self.supervisor = supervisor
        self.taken = False  # by a layout
        self._spin_wait = SpinWait(1 + (len(ranks) if local is None else local))
        self._poll = select.poll()
        self._numbers: dict[int, int] = {}  # of ranks, by the descriptor of their connection
        for i, rank in enumerate(self.ranks):
            self._poll.register(rank.steps.fileno(), select.POLLIN)
            self._numbers[rank.steps.fileno()] = i

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    @property
    def alive(self) -> bool:
        """Whether it can be used."""
        return bool(self.ranks)

    def call(self, messages: Sequence[Any], limit: TimeLimit | None = None) -> list[Any]:
        """Send each of the first ranks its message; their answers.

        The same object for several ranks is pickled once.

        Args:
            limit: None: that of a step, `kllm.env.step_timeout_s`.

        Raises:
            torch.OutOfMemoryError: when a rank ran out of device memory.
            KllmError: what a rank reported, or a `WorkerError` when one died, hung or fell silent;
                the pool is closed then.
        """
        if not self.ranks:
            raise WorkerError("the ranks have ended already; start a new engine")
        try:
            packed: dict[int, bytes] = {}
            for i, message in enumerate(messages):
                data = packed.get(id(message))
                if data is None:
                    data = packed[id(message)] = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
                self._send(i, data)
            return self._answers(len(messages), limit or step_limit())
        except BaseException:
            self.kill()  # the ranks wait for each other, and no later answer could be trusted
            raise

    def _send(self, i: int, data: bytes) -> None:
        try:
            self.ranks[i].steps.send(data)
        except TimeoutError:
            raise WorkerError(_silent(i)) from None
        except OSError:
            pass  # dead: noticed when its answer is awaited

    def _answers(self, count: int, limit: TimeLimit) -> list[Any]:
        answers: dict[int, Any] = {}
        begin_s = looked_s = time.monotonic()
        for rank in self.ranks:
            rank.heard_s = begin_s
        while len(answers) < count:
            for descriptor, _ in self._spin_wait.wait(self._poll, LOOK_MS):
                i = self._numbers[descriptor]
                answers[i] = self._read(i)
            now = time.monotonic()
            late = [i for i in range(count) if i not in answers]
            if late and now - begin_s > limit.seconds:
                raise WorkerError(limit.exceeded_by(late))
            if now - looked_s > LOOK_MS / 1e3:
                looked_s = now
                self._look_after(late)
        return [answers[i] for i in range(count)]

    def _look_after(self, late: Sequence[int]) -> None:
        """Check that ranks that have not answered are alive."""
        for i in late:
            rank = self.ranks[i]
            rank.listen()
            if time.monotonic() - rank.heard_s > HEARTBEAT_TIMEOUT_S:
                raise WorkerError(_silent(i))

    def _read(self, i: int) -> Any:
        try:
            message = pickle.loads(self.ranks[i].steps.receive())
        except TimeoutError:  # it was stopped in the middle of its answer
            raise WorkerError(_silent(i)) from None
        except (EOFError, OSError):
            raise WorkerError(self._cause(i)) from None
        if isinstance(message, Failure):
            self._fail(i, message)
        return message

    def _fail(self, i: int, failure: Failure) -> None:
        """Raise what a rank reported, or the death of another rank that made it fail."""
        if failure.out_of_memory:
            raise torch.OutOfMemoryError(f"rank {i}: {failure.message}")
        for known in (ConfigError, CapacityError, DataError, DependencyError):
            if failure.kind == known.__name__:
                raise known(failure.message)
        dead = self._dead()
        raise WorkerError(dead or f"rank {i} failed and the job was ended: {failure.message}")

    def _cause(self, i: int) -> str:
        return self._dead() or f"rank {i} closed its connection and the job was ended"

    def _dead(self) -> str | None:
        """Which rank died and how; waits a moment, as survivors may be heard before the death."""
        end = time.monotonic() + CAUSE_S
        while True:
            how = self.supervisor.first_death()
            if how is not None:
                return f"{how}; the job was ended"
            if time.monotonic() > end:
                return None
            time.sleep(0.02)

    def kill(self) -> None:
        """End every rank now."""
        for rank in self.ranks:
            rank.close()
        if self.ranks:
            self.supervisor.kill()
        self.ranks = []

    def close(self) -> None:
        """Ask the ranks to end, then make them."""
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.steps.send(pickle.dumps(None))
        waiting, end = set(self._numbers), time.monotonic() + CLOSE_S
        while self.ranks and waiting and (left := end - time.monotonic()) > 0:
            for descriptor, _ in self._poll.poll(left * 1000):  # those that have ended
                self._poll.unregister(descriptor)
                waiting.remove(descriptor)
        self.kill()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _silent(i: int) -> str:
    return (
        f"rank {i} has not been heard from for {HEARTBEAT_TIMEOUT_S:.0f} s and the job was ended; "
        "see whether its process was stopped or its machine is overloaded"
    )


def step_limit() -> TimeLimit:
    """Of a step."""
    return TimeLimit(
        env.step_timeout_s(),
        "did not finish a step",
        "set KLLM_STEP_TIMEOUT_S higher if steps may take that long",
    )


def launch(world: int) -> RankPool:
    """Start `world` ranks on this machine.

    Raises:
        CapacityError: when this machine's memory does not hold their processes.
        WorkerError: when they cannot be started or do not call back.
    """
    return RankPool(*start_here(world))
