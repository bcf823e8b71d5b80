"""Reading buffers of one process from another through a library that is loaded in both.

The two processes are started for one library and serve nothing else: one that crashes or hangs
takes them with it, and costs a bounded time and a sentence.
"""

import multiprocessing.connection
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.multiprocessing as mp
from torch import Tensor

from kllm.errors import WorkerError, ending, one_line
from kllm.hardware.chain import REPEATS, WARMUP
from kllm.hardware.links import INNER, Call

START_S = 90.0  # for both processes to be there, before the library is
LIMIT_S = 30.0  # for both to load the library and to move every buffer
BUFFER_S = 4.0  # of reads of one buffer, so that a slow library is measured all the same
CLOSE_S = 3.0  # for a process to end when its answer is there
MOST_OF_LOG = 200  # characters of a library's last line
SEED = 1


class Endpoint(Protocol):
    """A library in one process."""

    def offered(self, x: Tensor) -> AbstractContextManager[Any]:
        """Let the other process read `x`; gives what it has to know, which can be pickled."""
        ...

    def reader(self, x: Tensor, offer: Any) -> AbstractContextManager[Call]:
        """Gives a call that reads what the other process offers into `x` and waits for it."""
        ...


Open = Callable[[], Endpoint]  # imports the library; a function of a module, or a partial of one


def seconds_between(open_end: Open, kind: str, sizes: Sequence[int]) -> list[float]:
    """Seconds that rank 0 takes to read a buffer of each size from rank 1.

    Args:
        open_end: what is called in both processes.
        kind: "cuda" (a GPU for each rank) or "cpu".
        sizes: bytes.

    Raises:
        WorkerError: the library failed, ended a process or did not answer within LIMIT_S; the
            message is the reason, without a full stop.
    """
    context = mp.get_context("spawn")
    ends = context.Pipe()  # this process keeps both open: ranks see no end of file, only silence
    answers = [context.Pipe(duplex=False) for _ in ends]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(len(ends))]
        processes = [
            context.Process(
                target=_enter,
                args=(rank, open_end, kind, sizes, ends[rank], answers[rank][1], logs[rank]),
                daemon=True,
            )
            for rank in range(len(ends))
        ]
        for process in processes:
            process.start()
        for _, sender in answers:
            sender.close()  # so that the end of a process is seen at the other side
        try:
            found = _answer([receiver for receiver, _ in answers], processes, logs)
            for process in processes:
                process.join(CLOSE_S)
            return found
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answer(
    receivers: Sequence[Connection], processes: Sequence[Any], logs: Sequence[Path]
) -> list[float]:
    """What the first rank to speak or to die has to say, once both are there."""
    for rank, receiver in enumerate(receivers):
        if not receiver.poll(START_S):
            raise WorkerError(f"its processes did not start within {START_S:.0f} s")
        _receive(receiver, processes[rank], logs[rank])
    ready = multiprocessing.connection.wait(receivers, LIMIT_S)
    if not ready:
        raise WorkerError(f"it did not answer within {LIMIT_S:.0f} s" + _last_line(logs))
    rank = next(rank for rank, receiver in enumerate(receivers) if receiver in ready)
    message: list[float] | str = _receive(receivers[rank], processes[rank], logs[rank])
    if isinstance(message, str):
        raise WorkerError(message + _last_line([logs[rank]]))
    return message


def _receive(receiver: Connection, process: Any, log: Path) -> Any:
    try:
        return receiver.recv()
    except EOFError:
        process.join()
    raise WorkerError(f"its process {ending(process.exitcode)}" + _last_line([log]))


def _last_line(logs: Sequence[Path]) -> str:
    """The last that was written to the first of the logs with anything in it; "" if none has."""
    for log in logs:
        text = log.read_text(errors="replace") if log.exists() else ""
        if lines := text.strip().splitlines():
            return f" (the last line of its log: {lines[-1].strip()[:MOST_OF_LOG]})"
    return ""


def _enter(
    rank: int,
    open_end: Open,
    kind: str,
    sizes: Sequence[int],
    other: Connection,
    answer: Connection,
    log: Path,
) -> None:
    with log.open("wb") as file:  # libraries write to both, and results go to standard output
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # as the processes of the other ways
    answer.send(None)  # here
    try:
        end = open_end()
        if rank:
            _offer(end, device, sizes, other)
        else:
            answer.send(_read(end, device, sizes, other))
            other.send("end")
    except Exception as error:  # noqa: BLE001 - whatever it is, the measuring process must hear it
        answer.send(one_line(error))


def _buffer(size: int, device: torch.device) -> Tensor:
    """Bytes that are the same in both processes and differ from one another."""
    generator = torch.Generator(device).manual_seed(SEED)
    return torch.randint(256, (size,), dtype=torch.uint8, device=device, generator=generator)


def _offer(end: Endpoint, device: torch.device, sizes: Sequence[int], other: Connection) -> None:
    for size in sizes:
        x = _buffer(size, device)
        _settle(device)  # the library reads on no stream of ours
        with end.offered(x) as offer:
            other.send(offer)
            other.recv()
    other.recv()  # a process that ended before rank 0 answered would look like a crash


def _read(
    end: Endpoint, device: torch.device, sizes: Sequence[int], other: Connection
) -> list[float]:
    found = []
    for size in sizes:
        x = torch.zeros(size, dtype=torch.uint8, device=device)
        _settle(device)
        with end.reader(x, other.recv()) as read:
            found.append(_seconds_of(read, device))
        if not torch.equal(x, _buffer(size, device)):
            raise WorkerError(f"it read other bytes than were offered, in a buffer of {size}")
        other.send("read")
    return found


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds_of(read: Call, device: torch.device) -> float:
    """As `seconds_of_call`, of a call that returns when all is there and that needs no other rank.

    As many calls and the same statistic; fewer calls where they would take longer than BUFFER_S.
    """
    times: list[float] = []
    end_s = time.perf_counter() + BUFFER_S
    while len(times) < 2 or (
        len(times) < (WARMUP + REPEATS) * INNER and time.perf_counter() < end_s
    ):
        begin_s = time.perf_counter()
        read()
        times.append(time.perf_counter() - begin_s)
    kept = times[max(1, len(times) * WARMUP // (WARMUP + REPEATS)) :]
    return min(kept) if device.type == "cpu" else statistics.median(kept)
