"""The child process that measures: `python -m kllm.tuners.worker`, JSON lines over its pipes.

It keeps the loaded weights while model, scale, dtype and layout stay the same (or the processes of
the ranks, where all of them run) and builds a new engine for each run. It may be killed at any
moment. It ends itself when its input closes, and the kernel ends it when the tuning process dies.
"""

import ctypes
import os
import queue
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from kllm.bench.serve_loop import Progress, RequestRow, WorkloadRun, run_workload, warm_up
from kllm.bench.timing import out_of_memory
from kllm.bench.workloads import Workload
from kllm.config import EngineConfig
from kllm.core import FinishReason
from kllm.engine.engine import Engine
from kllm.engine.rank_groups import sliced_groups
from kllm.engine.rank_pool import RankPool, launch
from kllm.errors import CapacityError, KllmError
from kllm.hardware import release_memory
from kllm.models.base import CausalLM, Groups
from kllm.models.load import load_model, resolve
from kllm.tuners import protocol
from kllm.tuners.outcome import Outcome, Served, State, Tick, thin

TICK_S = 0.02  # progress is sent this often, and whenever a request ends
PR_SET_PDEATHSIG = 1  # linux/prctl.h
RESET_PEAK_RSS = "5"  # Linux, proc_pid_clear_refs(5)


class Channel:
    """The two pipes. Whatever else prints goes to stderr, so stdout holds only messages."""

    def __init__(self) -> None:
        self._out: BinaryIO = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        # Unbuffered: a reader that holds a buffer's lock would abort the interpreter's exit.
        self._lines = os.fdopen(os.dup(0), "rb", buffering=0)
        self.runs: queue.Queue[protocol.Run] = queue.Queue()
        self.stop = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._lines:
            message = protocol.decode_request(line)
            if isinstance(message, protocol.Stop):
                self.stop.set()
            else:
                self.runs.put(message)
        # End of input: the tuning process closed it or is dead. A run may be in the middle of a
        # long step and nobody waits for it.
        os._exit(0)

    def send(self, message: protocol.Reply) -> None:
        """Write one message; the process ends when nobody listens."""
        try:
            self._out.write(protocol.encode(message))
        except BrokenPipeError:
            os._exit(0)


class Models:
    """What the last run leaves to the next one: its network, or the processes of its ranks."""

    def __init__(self) -> None:
        self._key: Any = None
        self._model: CausalLM | None = None
        self._how: tuple[str, str] | None = None  # attention backend and KV dtype it is set to
        self._ranks: RankPool | None = None

    def engine(self, config: EngineConfig) -> Engine:
        """An engine for a run. Raises as `Engine`."""
        world = config.parallel.world
        if world == 1 or config.fidelity == "rank-slice":
            return Engine(config, model=self.get(config))
        if self._ranks is None or not self._ranks.alive:
            self._ranks = launch(world)
        return Engine(config, ranks=self._ranks)

    def get(self, config: EngineConfig) -> CausalLM:
        """The network of one rank that `config` asks for, loaded if it is not the last one."""
        resolved = resolve(config)
        loaded = (config.model, config.scale, config.load, config.device, config.dtype, config.seed)
        # Both kinds of context parallelism run on the same network.
        layout = replace(config.parallel, cp_kind="auto")
        key = (*loaded, layout, config.slice_rank, config.link)
        how = (resolved.attention, resolved.kv_dtype)
        if self._model is None or key != self._key:
            self._model, self._key = None, None
            release_memory()
            device = torch.device(resolved.device)
            sliced = config.parallel.world > 1
            self._model = load_model(
                resolved,
                device=device,
                dtype=getattr(torch, resolved.dtype),
                groups=sliced_groups(config, device) if sliced else Groups.single(),
            )
            self._key, self._how = key, how
        elif how != self._how:
            # Its attention was chosen for other KV; no engine runs the network now.
            self._model.use_attention(*how)
            self._how = how
        return self._model


def main() -> None:
    """Serve runs until the input closes."""
    protect()
    channel, models = Channel(), Models()
    while True:
        request = channel.runs.get()
        channel.stop.clear()
        limit_memory(request.memory_limit_bytes)
        outcome = measure(request, models, channel)
        channel.send(protocol.Done(outcome))
        release_memory()  # the next engine is sized by what is free


def protect() -> None:
    """Die with the parent; be the first to go when the system runs out of memory."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError):  # a hardened system forbids it: the memory limit alone has to do
        Path("/proc/self/oom_score_adj").write_text("1000")


def limit_memory(limit_bytes: int | None) -> None:
    """Make allocations beyond the limit fail here, instead of having the system choose a victim."""
    if limit_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY:
            limit_bytes = min(limit_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))


def measure(request: protocol.Run, models: Models, channel: Channel) -> Outcome:
    """Build, warm up and run; what goes wrong for lack of memory or by config is an outcome.

    Every other error ends the process, with its traceback in the log: the engine's state could
    not be trusted after it.
    """
    begin = time.monotonic()
    observer = _Observer(request.workload, channel)
    engine: Engine | None = None
    try:
        engine = models.engine(request.config)
        built = time.monotonic()
        warm_up(engine, request.workload)
        warm = time.monotonic()
        if not apart(request.config):
            reset_peak_memory(request.config)
        channel.send(observer.started)
        run = run_workload(engine, request.workload, observer=observer)
    except CapacityError as error:
        return Outcome(state="failed", reason=str(error), too_large=True)
    except KllmError as error:
        return Outcome(state="failed", reason=str(error))
    except (RuntimeError, MemoryError) as error:
        if not (reason := out_of_memory(error)):
            raise
        return Outcome(state="failed", reason=reason, too_large=True)
    finally:
        if engine is not None:
            engine.close()
    return replace(
        observer.outcome(run),
        start_s=built - begin,
        warmup_s=warm - built,
        peak_memory_bytes=None if apart(request.config) else peak_memory(request.config),
    )


def apart(config: EngineConfig) -> bool:
    """Whether the ranks run in processes of their own."""
    return config.parallel.world > 1 and config.fidelity == "real"


class _Observer:
    """Streams progress and keeps what an outcome needs."""

    def __init__(self, workload: Workload, channel: Channel) -> None:
        self.channel = channel
        self.started = protocol.Started(
            workload.num_requests, sum(row.osl for row in workload.shapes())
        )
        self.tokens = 0
        self.ticks: list[Tick] = []
        self.rows: list[Served] = []
        self.unsent: list[Served] = []
        self.sent_s = 0.0

    def __call__(self, progress: Progress) -> str | None:
        """Called after each step."""
        sample = progress.sample
        # A step gives one token to each decoding request and to each whose prefill ended.
        self.tokens += sample.num_decodes + len(progress.first_tokens)
        rows = [served(row) for row in progress.finished]
        self.rows += rows
        self.unsent += rows
        if self.unsent or sample.end_s - self.sent_s >= TICK_S:
            tick = Tick(sample.end_s, self.tokens, sample.running, sample.waiting)
            self.ticks.append(tick)
            self.channel.send(protocol.Ticked(tick, tuple(self.unsent)))
            self.unsent.clear()
            self.sent_s = sample.end_s
        return "told to stop" if self.channel.stop.is_set() else None

    def outcome(self, run: WorkloadRun) -> Outcome:
        """How the run ended."""
        state: State = "failed" if run.failure else "stopped" if run.stopped else "complete"
        return Outcome(
            state=state,
            reason=run.failure or run.stopped,
            run_s=run.duration_s,
            num_requests=self.started.num_requests,
            num_output_tokens=self.started.num_output_tokens,
            requests=tuple(self.rows),
            ticks=thin(self.ticks),
        )


def served(row: RequestRow) -> Served:
    """A request's row in the stored form."""
    fine = row.finish in (FinishReason.LENGTH, FinishReason.STOP)
    return Served(
        finished_s=row.arrival_s + row.e2e_s,
        ttft_s=row.ttft_s,
        tpot_s=row.tpot_s,
        e2e_s=row.e2e_s,
        isl=row.isl,
        osl=row.osl,
        ok=fine,
    )


def reset_peak_memory(config: EngineConfig) -> None:
    """Start a new maximum."""
    if torch.cuda.is_available() and config.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        return
    with suppress(OSError):  # not Linux, or forbidden: the peak is then that of the process
        Path("/proc/self/clear_refs").write_text(RESET_PEAK_RSS)


def peak_memory(config: EngineConfig) -> int:
    """Largest memory since the reset: the device's, or this process's on a CPU."""
    if torch.cuda.is_available() and config.device != "cpu":
        return torch.cuda.max_memory_reserved()
    return resident_peak()


def resident_peak() -> int:
    """Peak resident memory of this process in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
