"""One trial: a real run of the engine in a child process that may die without hurting the study.

The child (`kllm.tuners.worker`) lives on between trials and keeps the loaded weights; a new one
is started when it died. This side watches it: a limit on time, a limit on host memory, and a
rule that ends a run which has shown enough.
"""

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil

from kllm.bench.workloads import Workload
from kllm.config import EngineConfig
from kllm.errors import WorkerError, ending
from kllm.tuners import protocol
from kllm.tuners.outcome import Outcome, Progress, Served, State, Tick, thin
from kllm.tuners.stopping import Rule

WORKER = (sys.executable, "-m", "kllm.tuners.worker")
POLL_S = 0.1  # how often time and memory are checked
STOP_GRACE_S = 10.0  # a worker that does not end its run within this is killed
CLOSE_GRACE_S = 2.0
MEMORY_SHARE = 0.9  # of the free host memory, for a worker


class WorkerRunner:
    """Runs trials in a worker process.

    Args:
        memory_limit_bytes: host memory that a worker may use; None: no limit.
        command: how to start a worker.
    """

    def __init__(
        self,
        *,
        memory_limit_bytes: int | None = None,
        command: Sequence[str] = WORKER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.memory_limit_bytes = memory_limit_bytes
        self.command = tuple(command)
        self.clock = clock
        self._worker: _Worker | None = None

    def run(
        self,
        config: EngineConfig,
        workload: Workload,
        *,
        rule: Rule | None = None,
        timeout_s: float | None = None,
    ) -> Outcome:
        """Measure one config. Never raises for what the config does to the engine.

        One that does not fit the memory of a worker that ran others is tried in a new one.

        Args:
            config: of the engine.
            workload: what it serves.
            rule: ends a run that has shown enough.
            timeout_s: for everything, loading included; beyond it the worker is killed.

        Raises:
            WorkerError: no worker can be started.
        """
        start = self.clock()
        limit = None if timeout_s is None else start + timeout_s
        request = protocol.Run(config, workload, self.memory_limit_bytes)
        used = self._worker is not None and self._worker.alive
        outcome, begun = self._follow(request, rule, limit)
        if used and outcome.too_large and not begun:
            # What earlier runs left in the process may be why; in use it would have its own.
            outcome, _ = self._follow(request, rule, limit)
        return replace(
            outcome,
            total_s=self.clock() - start,
            fidelity=config.fidelity,
            ranks=config.parallel.world,
        )

    def _follow(
        self, request: protocol.Run, rule: Rule | None, limit: float | None
    ) -> tuple[Outcome, bool]:
        """One run in the worker that there is, or in a new one, and whether it got to serving."""
        if self._worker is None or not self._worker.alive:
            self.close()
            self._worker = _Worker(self.command)
        watch = _Watch(self._worker, rule, self.memory_limit_bytes, self.clock)
        try:
            outcome = watch.follow(request, limit)
        except BaseException:
            # Interrupted: the run's remains must not answer the next one, and nobody waits for it.
            self._worker.kill()
            self.close()
            raise
        if watch.broken:
            self.close()
        return outcome, watch.started is not None

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


class _Worker:
    """The process and its pipes."""

    def __init__(self, command: Sequence[str]) -> None:
        # A file and not a pipe: nobody has to read it, and it can be read after death.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                process_group=0,  # a Ctrl-C of the terminal is for the tuning process alone
            )
        except OSError as error:
            raise WorkerError(f"cannot start a worker ({command[0]}): {error.strerror}") from error
        assert self.process.stdout is not None
        self._out = self.process.stdout.fileno()
        os.set_blocking(self._out, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)
        self._buffer = b""
        self._lines: deque[bytes] = deque()
        self._open = True

    @property
    def alive(self) -> bool:
        """Whether it runs and can be heard."""
        return self._open and self.process.poll() is None

    def send(self, message: protocol.Request) -> None:
        """Write a message; a dead worker is noticed when it is read from."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(protocol.encode(message))
            self.process.stdin.flush()

    def receive(self, timeout_s: float) -> protocol.Reply | None:
        """The next message, or None when there is none within the time.

        Raises:
            EOFError: the worker closed its output: it died or is about to.
            WorkerError: it said something that is not a message.
        """
        if not self._lines and self._selector.select(timeout_s):
            self._read()
        if not self._lines:
            if not self._open:
                raise EOFError
            return None
        line = self._lines.popleft()
        try:
            return protocol.decode_reply(line)
        except msgspec.DecodeError:
            raise WorkerError(f"the worker answered nonsense: {line[:80]!r}") from None

    def _read(self) -> None:
        chunk = os.read(self._out, 1 << 16)
        if not chunk:
            self._open = False
            return
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        self._lines.extend(lines)

    def resident_bytes(self) -> int:
        """Host memory in use."""
        try:
            return int(psutil.Process(self.process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def how_it_ended(self) -> str:
        """One sentence."""
        code = self.process.wait(CLOSE_GRACE_S)
        if code == -signal.SIGKILL:
            return f"the worker {ending(code)}; the system may have run out of memory"
        return f"the worker {ending(code)}: {self._last_words()}"

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else "it said nothing"

    def kill(self) -> None:
        """End it now."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._open = False

    def close(self) -> None:
        """Ask it to end (its input closes), then make it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(CLOSE_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._selector.close()
        self.process.stdout.close()
        self._log.close()


class _Watch:
    """Follows one run from the request to its outcome."""

    def __init__(
        self,
        worker: _Worker,
        rule: Rule | None,
        memory_limit_bytes: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.worker, self.rule, self.clock = worker, rule, clock
        self.memory_limit_bytes = memory_limit_bytes
        self.started: protocol.Started | None = None
        self.ticks: list[Tick] = []
        self.rows: list[Served] = []
        self.reason = ""  # why the rule ended it
        self.broken = False  # the worker cannot be used again

    def follow(self, request: protocol.Run, limit: float | None) -> Outcome:
        """Send the request and return how it ended."""
        self.worker.send(request)
        while True:
            try:
                reply = self.worker.receive(POLL_S)
            except EOFError:
                self.broken = True
                return self._ended("failed", self._why_dead())
            except WorkerError as error:
                return self._killed(str(error))
            if isinstance(reply, protocol.Done):
                return self._finished(reply.outcome)
            if reply is not None:
                limit = self._hear(reply, limit)
            now = self.clock()
            if limit is not None and now > limit:
                if self.reason:
                    self.broken = True
                    self.worker.kill()
                    return self._ended("stopped", self.reason)
                return self._killed("it ran longer than its time limit")
            if self._too_big():
                return self._killed(self._memory_sentence())

    def _hear(self, reply: protocol.Started | protocol.Ticked, limit: float | None) -> float | None:
        if isinstance(reply, protocol.Started):
            self.started = reply
            return limit
        self.ticks.append(reply.tick)
        self.rows += reply.finished
        if self.rule is None or self.started is None or self.reason:
            return limit
        self.reason = (
            self.rule(
                Progress(
                    tick=reply.tick,
                    finished=reply.finished,
                    num_requests=self.started.num_requests,
                    num_output_tokens=self.started.num_output_tokens,
                )
            )
            or ""
        )
        if not self.reason:
            return limit
        self.worker.send(protocol.Stop())
        return self.clock() + STOP_GRACE_S

    def _finished(self, outcome: Outcome) -> Outcome:
        self.broken = outcome.state == "failed"  # what is left of it is in no known state
        # A run may reach its end just when it is told to stop.
        reason = self.reason if outcome.state == "stopped" else outcome.reason
        return replace(outcome, reason=reason)

    def _too_big(self) -> bool:
        limit = self.memory_limit_bytes
        return limit is not None and self.worker.resident_bytes() > limit

    def _memory_sentence(self) -> str:
        assert self.memory_limit_bytes is not None
        return f"out of host memory: it needed more than {self.memory_limit_bytes / 2**30:.1f} GiB"

    def _why_dead(self) -> str:
        try:
            return self.worker.how_it_ended()
        except subprocess.TimeoutExpired:
            return "the worker closed its output and did not end"

    def _killed(self, reason: str) -> Outcome:
        self.broken = True
        self.worker.kill()
        return self._ended("failed", reason)

    def _ended(self, state: State, reason: str) -> Outcome:
        """An outcome from what was heard, without the worker's own account."""
        return Outcome(
            state=state,
            reason=reason,
            run_s=self.ticks[-1].elapsed_s if self.ticks else 0.0,
            num_requests=self.started.num_requests if self.started else 0,
            num_output_tokens=self.started.num_output_tokens if self.started else 0,
            requests=tuple(self.rows),
            ticks=thin(self.ticks),
        )


def memory_limit(device: str) -> int | None:
    """Host memory that a worker may use: a share of what is free now; None on a GPU.

    On a GPU the device's memory is the limit, and drivers reserve host address space at will.
    """
    if device != "cpu":
        return None
    return int(psutil.virtual_memory().available * MEMORY_SHARE) if Path("/proc").exists() else None
