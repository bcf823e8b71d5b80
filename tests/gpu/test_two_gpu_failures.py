"""Ranks on two GPUs that die or stop: the job ends in time, says why, and leaves nothing there.

With `-s` the time until the end is printed.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kllm.engine.rank_pool import launch
from kllm.engine.rank_start import HEARTBEAT_TIMEOUT_S
from tests.engine.layout_cases import checkpoint
from tests.engine.rank_cases import (
    check_a_killed_rank_ends_the_job,
    check_a_stopped_rank_ends_the_job,
    engine,
    start,
)

pytestmark = [pytest.mark.multi_gpu, pytest.mark.usefixtures("two_gpus")]

DEVICE = "cuda"
FREED_S = 10.0  # until the driver has given the memory of dead processes back
NOISE_BYTES = 64 << 20  # the processes of ranks alone hold some hundred MiB of a GPU each


@pytest.fixture(scope="module")
def model(two_gpus: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("deepseek_v4", tmp_path_factory.mktemp("failures") / "deepseek_v4")


def free_memory() -> list[int]:
    """Bytes of both GPUs, whoever holds the others."""
    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)]


@contextmanager
def memory_given_back() -> Iterator[None]:
    """At the end both GPUs have as much free memory as before."""
    before = free_memory()
    yield
    deadline = time.monotonic() + FREED_S
    while True:
        held = [old - now for old, now in zip(before, free_memory(), strict=True)]
        if max(held) <= NOISE_BYTES or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert max(held) <= NOISE_BYTES, f"bytes still held on the GPUs: {held}"


@pytest.mark.parametrize("after_s", [0.0, 0.2], ids=["at once", "in the midst of steps"])
def test_a_killed_rank_ends_the_job(model: Path, after_s: float) -> None:
    with memory_given_back(), launch(2) as pool:
        running = engine(model, pool, device=DEVICE)
        start(running)
        seconds = check_a_killed_rank_ends_the_job(running, pool, after_s)
    print(f"\nthe job ended {seconds:.1f} s after rank 1 was killed")


def test_a_stopped_rank_ends_the_job(model: Path) -> None:
    """After the time that ranks may be silent for, as users have it."""
    with memory_given_back(), launch(2) as pool:
        running = engine(model, pool, device=DEVICE)
        start(running)
        seconds = check_a_stopped_rank_ends_the_job(running, pool, HEARTBEAT_TIMEOUT_S)
    print(f"\nthe job ended {seconds:.1f} s after rank 0 was stopped")
