"""Tiny checkpoints that every layout can cut, and what an engine answers with them."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from kllm.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from kllm.core import Request, SamplingParams
from kllm.engine.engine import Engine
from kllm.engine.rank_pool import RankPool
from kllm.models import llama
from tests.models import deepseek_v4_logits, glm_moe_dsa_logits

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
VOCAB = 96  # all of it fits in the log probabilities that a request may ask for
NEW_TOKENS = 64
# Several prompts in flight, longer than a chunk and shorter than a stripe, none a round number.
LENGTHS = (141, 75, 9)


@dataclass(frozen=True)
class Answers:
    """What the requests got: tokens [n] and log probabilities [n, V] of each."""

    tokens: list[list[int]]
    logprobs: list[NDArray[np.float64]]

    def difference(self, other: "Answers") -> float:
        """Largest difference of any log probability."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max(float(np.abs(a - b).max()) for a, b in pairs)


def checkpoint(family: str, folder: Path) -> Path:
    """A folder with random float32 weights of a tiny model of `family`."""
    writers: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
        "llama": (_write_llama, LLAMA),
        "glm_moe_dsa": (glm_moe_dsa_logits.write_checkpoint, glm_moe_dsa_logits.GLM),
        "deepseek_v4": (
            deepseek_v4_logits.write_checkpoint,
            deepseek_v4_logits.TINY,
        ),
    }
    write, data = writers[family]
    folder.mkdir()
    write(folder, data | {"vocab_size": VOCAB}, seed=3)
    return folder


def _write_llama(folder: Path, data: dict[str, Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        t.name: glm_moe_dsa_logits.random_values(t, generator)
        for t in llama.manifest(llama.read_config(data))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(data))


def prompts(seed: int = 0) -> list[list[int]]:
    """Token ids of the requests."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, n).tolist() for n in LENGTHS]


def answers(
    model: Path,
    layout: ParallelConfig,
    pool: RankPool | None = None,
    *,
    new_tokens: int = NEW_TOKENS,
    expert_placement: str = "",
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Answers:
    """Run the prompts through an engine of a layout; the steps `around` something."""
    config = EngineConfig(
        model=str(model),
        device="cpu",
        dtype="float32",
        scheduler=SchedulerConfig(max_batch=4, token_budget=64),
        cache=CacheConfig(memory_bytes=8 << 20),
        max_model_len=320,
        parallel=layout,
        expert_placement=expert_placement,
    )
    engine = Engine(config, ranks=pool)
    try:
        with around():
            return collect(engine, prompts(), new_tokens)
    finally:
        engine.close()


def collect(engine: Engine, ids: Sequence[Sequence[int]], new_tokens: int) -> Answers:
    """Greedy answers of an engine to all prompts at once."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, logprobs=VOCAB)
    requests = [engine.add(prompt, params) for prompt in ids]
    while engine.has_work:
        engine.step()
    return Answers([r.output_ids for r in requests], [_table(r) for r in requests])


def _table(request: Request) -> NDArray[np.float64]:
    table = np.full((len(request.logprobs), VOCAB), np.nan)
    for row, entry in zip(table, request.logprobs, strict=True):
        for token, value in entry.top:
            row[token] = value
    assert not np.isnan(table).any()
    return table
