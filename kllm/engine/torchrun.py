"""Ranks that torchrun started, on one machine or several.

torchrun starts the same command once a rank. The first of these processes carries the command
out; it also starts rank 0 as a process of its own, so that the one that schedules never waits
inside a collective. All others become ranks and do nothing else.
"""

import os
from functools import cache
from typing import Any

import torch.distributed as dist

from kllm.engine.rank_channel import listen, new_key, parse_address
from kllm.engine.rank_pool import RankPool
from kllm.engine.rank_start import accept, start_ranks
from kllm.engine.rank_supervisor import supervise
from kllm.errors import WorkerError

CALL = "kllm/call"  # store key: where the first process listens, and the word that lets ranks in
NOBODY = "nobody"  # its value when no ranks are needed


def launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def is_first() -> bool:
    """Whether this process carries the command out."""
    return os.environ["RANK"] == "0"


def become_rank() -> None:
    """Serve as this process's rank until the job ends; does not return.

    Raises:
        WorkerError: when the first process does not call.
    """
    try:
        call = _store().get(CALL).decode()
    except RuntimeError as error:
        raise WorkerError(f"the first process of this job did not call: {error}") from None
    if call == NOBODY:
        raise SystemExit(0)
    address, key = call.split(" ")
    number = int(os.environ["RANK"])
    _, code = next(supervise(parse_address(address), key, range(number, number + 1)))
    raise SystemExit(code if code >= 0 else 128 - code)  # as shells tell of signals


@cache
def pool() -> RankPool:
    """The ranks of this job, for the first process.

    Raises:
        WorkerError: when one of them does not come.
    """
    world, host = int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]
    key = new_key()
    with listen((host, 0), backlog=2 * world) as listener:
        address = f"{host}:{listener.getsockname()[1]}"
        supervisor = start_ranks(address, range(1), key, os.environ)
        _store().set(CALL, f"{address} {key}")
        try:
            links = accept(listener, world, key, supervisor)
        except BaseException:
            supervisor.kill()
            raise
    return RankPool(links, supervisor, host, int(os.environ["LOCAL_WORLD_SIZE"]))


def finish() -> None:
    """End the ranks of this job; the first process calls it last."""
    if pool.cache_info().currsize:
        pool().close()
    else:
        _store().set(CALL, NOBODY)


@cache
def _store() -> Any:
    """The store that torchrun's processes share."""
    store, _, _ = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    return store
