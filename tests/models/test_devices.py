"""How much memory ranks have, and the scale that `auto` chooses by it."""

import pytest
import torch

from kllm.config import EngineConfig, ParallelConfig
from kllm.models.devices import free_on_ranks
from kllm.models.load import resolve

GIB = 1 << 30


@pytest.mark.parametrize(
    ("others", "ranks", "free"),
    [
        ((90, 60, 20), 1, 100),  # alone it needs no other GPU
        ((1, 60, 20), 2, 60),  # its own device it knows better than the driver
        ((90, 60, 20), 3, 20),
        ((90, 120, None), 3, 100),  # what cannot be read
        ((90, 60, 20), 16, 20),  # the others are on another machine
        ((), 2, 100),
    ],
)
def test_the_fullest_gpu_says_what_every_rank_can_take(
    others: tuple[int | None, ...], ranks: int, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kllm.models.devices.free_bytes", lambda device: 100)
    monkeypatch.setattr("kllm.hardware.free_gpu_bytes", lambda: others)
    assert free_on_ranks(torch.device("cuda", 0), ranks) == free


def test_ranks_on_a_cpu_share_its_memory_and_a_slice_has_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of two ranks holds all weights, 32 GB of float32 at full scale."""
    monkeypatch.setattr("kllm.models.devices.free_bytes", lambda device: 48 * GIB)
    scales = {
        fidelity: resolve(
            EngineConfig(
                model="llama-3-8b",
                device="cpu",
                parallel=ParallelConfig(dp=2),
                fidelity=fidelity,  # type: ignore[arg-type]
            )
        ).scale
        for fidelity in ("real", "rank-slice")
    }
    assert scales["rank-slice"] == "full"
    assert scales["real"].startswith("layers:")
