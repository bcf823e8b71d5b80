"""FP8 entries cost as much accuracy on many tensor-parallel ranks as on one."""

from pathlib import Path

import torch
from torch import Tensor

from kllm.config import ParallelConfig
from kllm.models import llama
from kllm.models.base import Groups
from kllm.models.weights import SafetensorsFolder, fill
from tests.engine.layout_cases import LLAMA, VOCAB, checkpoint
from tests.models.harness import Harness
from tests.parallel.thread_layouts import run_layout

PROMPT = [(7 * i + i * i) % VOCAB for i in range(60)]


def rounding(folder: Path, tp: int) -> Tensor:
    """[T, V] what FP8 entries change in the logits, the same on all ranks."""
    config = llama.read_config({**LLAMA, "vocab_size": VOCAB})

    def work(rank: int, groups: Groups) -> Tensor:
        model = llama.build(config, groups)
        fill(model, llama.manifest(config), SafetensorsFolder(folder), groups)
        exact, rounded = (
            Harness(model.eval(), kv_dtype=kind).run(PROMPT, [23, 30, *[1] * 7])
            for kind in ("float32", "fp8")
        )
        return rounded - exact

    first, *others = run_layout(ParallelConfig(tp=tp), work)
    assert all(torch.equal(first, other) for other in others)
    return first


def test_the_rounding_of_fp8_entries_does_not_depend_on_the_ranks(tmp_path: Path) -> None:
    """Entries have scales of their own by head: ranks that hold some heads round as one does."""
    folder = checkpoint("llama", tmp_path / "llama")
    alone = rounding(folder, 1)
    assert alone.norm() > 0
    for tp in (2, 4):
        assert (rounding(folder, tp) - alone).norm() < 0.1 * alone.norm()
