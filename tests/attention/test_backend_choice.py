"""Which attention backend `auto` takes, and what a missing library says."""

import sys

import pytest
import torch

from kllm.attention import base
from kllm.attention.base import ATTENTION, resolve_attention
from kllm.errors import ConfigError, DependencyError

GPU = torch.device("cuda")


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_flashinfer_runs", lambda: True)


def test_a_named_backend_is_kept() -> None:
    assert resolve_attention("triton", torch.device("cpu"), 128, "float32") == "triton"


def test_a_cpu_takes_torch(flashinfer: None) -> None:
    assert resolve_attention("auto", torch.device("cpu"), 128, "bfloat16") == "torch"


def test_a_gpu_takes_flashinfer_for_what_it_reads(flashinfer: None) -> None:
    assert resolve_attention("auto", GPU, 128, "bfloat16") == "flashinfer"
    assert resolve_attention("auto", GPU, 96, "bfloat16") == "triton"
    assert resolve_attention("auto", GPU, 128, "fp8") == "triton"


def test_a_gpu_without_flashinfer_takes_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "find_spec", lambda name: None)
    assert resolve_attention("auto", GPU, 128, "bfloat16") == "triton"


def test_flashinfer_without_kernels_or_a_compiler_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {"flashinfer"}
    monkeypatch.setattr(base, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(base.shutil, "which", lambda name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert resolve_attention("auto", GPU, 128, "bfloat16") == "triton"
    installed.add("flashinfer_jit_cache")
    assert resolve_attention("auto", GPU, 128, "bfloat16") == "flashinfer"


def test_missing_flashinfer_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(DependencyError, match=r"pip install kllm\[gpu\]"):
        ATTENTION["flashinfer"](32)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="known: flashinfer, torch, triton"):
        ATTENTION["fa9"]
