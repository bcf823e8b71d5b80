"""Layouts, tiny checkpoints that all of them can cut, and what an engine answers with them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
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
from tests.models import deepseek_v4_tiny, glm_moe_dsa_tiny

LAYOUTS = {
    "tp2": ParallelConfig(tp=2),
    "tp4": ParallelConfig(tp=4),
    "tp2+ep2": ParallelConfig(tp=2, ep=2),
    "dp2+ep2": ParallelConfig(dp=2, ep=2),
    "dp4+ep4": ParallelConfig(dp=4, ep=4),
    "dp2·tp2+ep4": ParallelConfig(dp=2, tp=2, ep=4),
    "pp2": ParallelConfig(pp=2),
    "pp2·tp2": ParallelConfig(pp=2, tp=2),
    "cp2 ring": ParallelConfig(cp=2, cp_kind="ring"),
    "cp4 ring": ParallelConfig(cp=4, cp_kind="ring"),
    "cp2 all-gather": ParallelConfig(cp=2, cp_kind="all_gather"),
    "cp4 all-gather": ParallelConfig(cp=4, cp_kind="all_gather"),
    "cp2 replicated": ParallelConfig(cp=2, cp_kind="replicated"),
    "cp2 ring·tp2": ParallelConfig(cp=2, tp=2, cp_kind="ring"),
    "cp4 ring, decode dp4+ep4": ParallelConfig(cp=4, ep=4, cp_kind="ring"),
    "dp2·cp2 ring·tp2+ep8": ParallelConfig(dp=2, cp=2, tp=2, ep=8, cp_kind="ring"),
    "pp2·dp2·cp2 all-gather+ep4": ParallelConfig(pp=2, dp=2, cp=2, ep=4, cp_kind="all_gather"),
}
FAMILIES = ("llama", "glm_moe_dsa", "deepseek_v4")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,  # the narrowest that Triton's products take
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


def checkpoint(family: str, folder: Path, **changes: Any) -> Path:
    """A folder with random float32 weights of a tiny model of `family`, its config changed."""
    writers: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
        "llama": (_write_llama, LLAMA),
        "glm_moe_dsa": (glm_moe_dsa_tiny.write_checkpoint, glm_moe_dsa_tiny.GLM),
        "deepseek_v4": (
            deepseek_v4_tiny.write_checkpoint,
            deepseek_v4_tiny.TINY,
        ),
    }
    write, data = writers[family]
    folder.mkdir()
    write(folder, data | {"vocab_size": VOCAB} | changes, seed=3)
    return folder


def _write_llama(folder: Path, data: dict[str, Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        t.name: glm_moe_dsa_tiny.random_values(t, generator)
        for t in llama.manifest(llama.read_config(data))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(data))


def prompts(seed: int = 0) -> list[list[int]]:
    """Token ids of the requests."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, n).tolist() for n in LENGTHS]


def suited(layout: ParallelConfig, family: str) -> ParallelConfig:
    """The layout without what a family lacks: a dense model has no experts."""
    return replace(layout, ep=1) if family == "llama" else layout


def print_differences(found: Mapping[tuple[str, str], float], layouts: Iterable[str]) -> None:
    """A table of differences to one rank, by family and layout."""
    print(
        f"\nlargest difference of a log probability to one rank, {NEW_TOKENS} greedy tokens equal"
    )
    print(f"{'layout':28}" + "".join(f"{family:>14}" for family in FAMILIES))
    for name in layouts:
        values = [found.get((family, name)) for family in FAMILIES]
        cells = ("-" if value is None else f"{value:.1e}" for value in values)
        print(f"{name:28}" + "".join(f"{cell:>14}" for cell in cells))


def answers(
    model: Path,
    layout: ParallelConfig,
    pool: RankPool | None = None,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    new_tokens: int = NEW_TOKENS,
    expert_placement: str = "",
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Answers:
    """Run the prompts through an engine of a layout; the steps `around` something."""
    config = EngineConfig(
        model=str(model),
        device=device,
        dtype=dtype,
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
