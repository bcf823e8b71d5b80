"""The process that starts ranks: `python -m kllm.engine.rank_supervisor ADDRESS FIRST COUNT`.

It forks them and stays: it sends the engine's process a heartbeat for each, and kills them when
that process is gone. No rank could do so for itself, as a library may hold Python's lock for as
long as a collective takes.
"""

import contextlib
import ctypes
import gc
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import NoReturn

import psutil

from kllm.engine.rank_channel import HEARTBEAT, Address, call, parse_address
from kllm.engine.rank_process import serve
from kllm.engine.rank_protocol import AUTHKEY, DEATH
from kllm.errors import ending

HEARTBEAT_S = 1.0  # between two heartbeats
PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>


def supervise(address: Address, key: str, ranks: range) -> Iterator[tuple[int, int]]:
    """Fork these ranks; yield each that ends and its exit code, as `subprocess` has it.

    They are killed when the engine's process, this process or its parent is gone. They are forked
    once everything is imported: that takes seconds, and memory, only once. No thread may run, and
    no device may be in use.
    """
    # With torchrun the others of this machine are not this process's children.
    processes = 1 + int(os.environ.get("LOCAL_WORLD_SIZE", len(ranks)))
    gc.freeze()  # a collection would copy every page that the ranks share
    numbers = {_fork(address, key, number, processes): number for number in ranks}
    watch = (address, key, numbers.copy(), os.getppid())
    threading.Thread(target=_watch, args=watch, daemon=True).start()
    while numbers:
        pid, status = os.wait()
        yield numbers.pop(pid), os.waitstatus_to_exitcode(status)


def _fork(address: Address, key: str, number: int, processes: int) -> int:
    supervisor, pid = os.getpid(), os.fork()
    if pid == 0:
        _be_rank(supervisor, address, key, number, processes)
    return pid


def _be_rank(supervisor: int, address: Address, key: str, number: int, processes: int) -> NoReturn:
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == supervisor:  # else it was gone before it was watched
            serve(address, key, number, processes)
    except Exception:  # noqa: BLE001 - nobody above may take this copy for the supervisor
        traceback.print_exc()
    finally:
        os._exit(1)


def _watch(address: Address, key: str, numbers: Mapping[int, int], parent: int) -> None:
    """Send heartbeats of the ranks while the engine's process and `parent` live; kill them then.

    Args:
        numbers: of the ranks, by their process.
    """
    try:
        lines = {pid: call(address, key, number, HEARTBEAT) for pid, number in numbers.items()}
        poll = select.poll()
        for line in lines.values():
            line.setblocking(False)
            poll.register(line, select.POLLIN)
        # The parent is looked at too: a process that the engine's has forked may keep the lines.
        while os.getppid() == parent and not poll.poll(HEARTBEAT_S * 1000):
            for pid, line in lines.items():
                if not _stopped(pid):
                    with contextlib.suppress(BlockingIOError):  # nobody has read for minutes
                        line.send(b".")
    except OSError:
        pass  # the engine's process is gone
    finally:
        for pid in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:  # it has ended, which the other line shows
        return False


def main() -> None:
    """Start the ranks, and say how each of them ended if it did not end well."""
    address, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    ranks = range(first, first + count)
    for number, code in supervise(parse_address(address), os.environ[AUTHKEY], ranks):
        if code:
            print(f"{DEATH}rank {number} {ending(code)}", flush=True)


if __name__ == "__main__":
    main()
