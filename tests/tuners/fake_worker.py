"""A worker that speaks the protocol and serves `tests.tuners.fake` instead of the engine.

Usage: fake_worker.py '{"64": "die"}': with token_budget 64 it kills itself. Other deeds: "hang",
"exit" (traceback), "nonsense" (not a message), "grow" (memory), "deaf" (ignores a stop), "park"
(waits in the middle of the run until it is told to stop), "wait" (for ever, before the first
progress; first writes a line to the pipe that FAKE_PARKED names), "large" (does not fit), "full"
(does not fit in a worker that ran something before). "*": every other budget.
"""

import itertools
import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from kllm.tuners import protocol
from kllm.tuners.outcome import Served, Tick, thin
from tests.tuners import fake

DEEDS = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}


def misbehave(deed: str) -> None:
    if deed == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "hang":
        threading.Event().wait()
    if deed == "exit":
        raise RuntimeError("the kernel is broken")
    if deed == "nonsense":
        sys.stdout.buffer.write(b"hello\n")
        sys.stdout.flush()
        threading.Event().wait()
    if deed == "grow":
        hoard = []
        while True:
            hoard.append(bytearray(os.urandom(1 << 20)))


def send(message: protocol.Reply) -> None:
    sys.stdout.buffer.write(protocol.encode(message))
    sys.stdout.flush()


def serve(request: protocol.Run, stop: threading.Event, runs: int) -> None:
    scheduler, cache = request.config.scheduler, request.config.cache
    settings = asdict(scheduler) | {"kv_dtype": cache.dtype, "page_size": cache.page_size}
    deed = DEEDS.get(str(scheduler.token_budget), DEEDS.get("*", ""))
    misbehave(deed)
    if deed == "large" or (deed == "full" and runs):
        failed = protocol.Outcome(state="failed", reason="out of device memory", too_large=True)
        send(protocol.Done(failed))
        return
    outcome = fake.run(settings)
    send(protocol.Started(outcome.num_requests, outcome.num_output_tokens))
    if deed == "wait":
        Path(os.environ["FAKE_PARKED"]).write_text("parked\n")
        threading.Event().wait()
    at = 0
    rows = sorted(outcome.requests)
    ticks: list[Tick] = []
    for number, tick in enumerate(outcome.ticks):
        if number == len(outcome.ticks) // 2 and deed == "park":
            stop.wait()
        if stop.is_set() and deed != "deaf":
            break
        until = sum(row.finished_s <= tick.elapsed_s for row in rows)
        fresh: tuple[Served, ...] = tuple(rows[at:until])
        ticks.append(tick)
        send(protocol.Ticked(tick, fresh))
        at = until
    if deed == "deaf":
        threading.Event().wait()
    done = len(ticks) == len(outcome.ticks)
    send(
        protocol.Done(
            protocol.Outcome(
                state="complete" if done else "stopped",
                reason="" if done else "told to stop",
                run_s=ticks[-1].elapsed_s if ticks else 0.0,
                num_requests=outcome.num_requests,
                num_output_tokens=outcome.num_output_tokens,
                requests=tuple(rows[:at]),
                ticks=thin(ticks),
            )
        )
    )


def main() -> None:
    stop = threading.Event()
    pending: list[protocol.Run] = []
    ready = threading.Semaphore(0)

    def listen() -> None:
        for line in open(0, "rb", buffering=0, closefd=False):  # noqa: SIM115
            message = protocol.decode_request(line)
            if isinstance(message, protocol.Stop):
                stop.set()
            else:
                stop.clear()
                pending.append(message)
                ready.release()
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    for runs in itertools.count():
        ready.acquire()
        serve(pending.pop(), stop, runs)


if __name__ == "__main__":
    main()
