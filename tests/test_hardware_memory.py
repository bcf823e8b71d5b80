"""What a process holds on devices: given back, and asked for, without holding more."""

from types import SimpleNamespace

import pytest
import torch

from kllm import hardware
from kllm.hardware import measured, memory


class Network:
    """Holds itself, as networks do."""

    def __init__(self, freed: list[str]) -> None:
        self.me, self.freed = self, freed

    def __del__(self) -> None:
        self.freed.append("network")


def test_cycles_are_freed_before_their_blocks_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("blocks"))
    Network(seen)
    memory.release_memory()
    assert seen == ["network", "blocks"]


def test_measured_ceilings_leave_nothing_to_the_processes_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(measured, "_bandwidth", lambda *_: seen.append("buffers") or (1.0, 1.0))
    monkeypatch.setattr(measured, "_matmul_rate", lambda *_: seen.append("matrices") or 1.0)
    monkeypatch.setattr(measured, "_seconds", lambda *_, **__: 1.0)
    monkeypatch.setattr(measured, "release_memory", lambda: seen.append("released"))
    measured.measure_ceilings("cpu")
    assert seen[-1] == "released"
    assert {"buffers", "matrices"} < set(seen)


def test_free_memory_of_gpus_is_in_the_order_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver lists all GPUs in its own order, and hides what it does not know."""
    lines = "GPU-c, 7\nGPU-hidden, 1\nGPU-b, [N/A]\nGPU-a, 140000\n"
    asked: list[list[str]] = []
    monkeypatch.setattr(
        "kllm.hardware.machine._output", lambda command: asked.append(command) or lines
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="abcd"[index])
    )
    assert hardware.free_gpu_bytes() == (140000 << 20, None, 7 << 20, None)
    assert "--query-gpu=uuid,memory.free" in asked[0]
