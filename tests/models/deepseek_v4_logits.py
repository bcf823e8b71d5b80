"""DeepSeek-V4 against `transformers`: checkpoints with released names, loaded by both."""

import json
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from kllm.models import deepseek_v4
from kllm.models.base import CheckpointTensor, Groups
from kllm.models.weights import SafetensorsFolder, fill
from tests.models.harness import Harness
from tests.models.logit_cases import LogitCase, seeded_ids

TINY: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 96,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "compress_ratios": [0, 128, 4, 128, 4, 0],
    "compress_rate_csa": 4,
    "compress_rate_hca": 16,
    "num_hash_layers": 2,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "swiglu_limit": 0.5,
    "sliding_window": 8,
    "o_groups": 4,
    "o_lora_rank": 12,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 3,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
PROMPT = seeded_ids(90, TINY["vocab_size"])


def random_values(tensor: CheckpointTensor, generator: torch.Generator) -> Tensor:
    """Values that matter in every tensor: none of a default initialisation's zeros and ones."""
    if tensor.dtype == "I64":  # distinct experts for each token
        chosen = torch.rand(tensor.shape[0], TINY["n_routed_experts"], generator=generator)
        return chosen.argsort(1)[:, : tensor.shape[1]].contiguous()
    values = torch.randn(tensor.shape, generator=generator)
    if len(tensor.shape) == 2:
        std = 1.0 if tensor.name.endswith("ape") else tensor.shape[1] ** -0.5
        return values * std
    if tensor.name.endswith("norm.weight"):
        return 1 + 0.1 * values
    return 0.5 * values


def write_checkpoint(folder: Path, data: dict[str, Any], seed: int) -> None:
    """A float32 checkpoint with the released names and random values."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        t.name: random_values(t, generator)
        for t in deepseek_v4.manifest(deepseek_v4.read_config(data))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(data))


def load_ours(folder: Path, mtp: bool = False) -> deepseek_v4.DeepseekV4ForCausalLM:
    """Our float32 network with the folder's weights."""
    config = deepseek_v4.read_config(json.loads((folder / "config.json").read_text()))
    model = deepseek_v4.build(config, Groups.single(), mtp)
    fill(model, deepseek_v4.manifest(config), SafetensorsFolder(folder), Groups.single())
    return model.eval()


@cache
def models() -> tuple[deepseek_v4.DeepseekV4ForCausalLM, DeepseekV4ForCausalLM]:
    """(our network, with the MTP head; the reference) from one checkpoint."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, TINY, seed=0)
        ours = load_ours(folder, mtp=True)
        config = DeepseekV4Config(**TINY)
        reference = DeepseekV4ForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    return ours, reference


def reference_logits(token_ids: Sequence[int]) -> Tensor:
    """[T, V] of the reference, in one pass."""
    with torch.no_grad():
        logits: Tensor = models()[1](torch.tensor([list(token_ids)])).logits[0]
    return logits


@cache
def pair() -> tuple[deepseek_v4.DeepseekV4ForCausalLM, Tensor]:
    """(our network, with the MTP head; the reference's logits of PROMPT)."""
    return models()[0], reference_logits(PROMPT)


def long_context() -> tuple[Tensor, Tensor]:
    """Chunks many times the rings, positions far beyond YaRN's original 64."""
    tokens = seeded_ids(1100, TINY["vocab_size"], seed=1)
    got = Harness(models()[0], max_len=1200).run(tokens, [700, 1, 333, 1, 1, 64])
    return got, reference_logits(tokens)


def chunked(chunks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """One request in chunks."""
    ours, logits = pair()
    return Harness(ours).run(PROMPT, chunks), logits[: sum(chunks)]


def mixed() -> tuple[Tensor, Tensor]:
    """Three requests prefilled, chunked and decoded in the same steps."""
    ours, logits = pair()
    harness = Harness(ours, num_requests=3)
    plans = [{0: 30}, {0: 7, 1: 20}, {0: 1, 1: 1, 2: 21}, {0: 1, 1: 19}, {0: 36, 2: 1}, {2: 13}]
    parts: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    done = [0, 0, 0]
    for plan in plans:
        tokens = {r: PROMPT[done[r] : done[r] + n] for r, n in plan.items()}
        for r, rows in harness.step(tokens).items():
            parts[r].append(rows)
            done[r] += len(rows)
    got = torch.cat([torch.cat(parts[r]) for r in range(3)])
    return got, torch.cat([logits[:n] for n in done])


_RUNS = {
    "one shot": partial(chunked, [90]),
    "prefill 21, then one by one": partial(chunked, [21] + [1] * 69),
    "one by one from the start": partial(chunked, [1] * 50),
    "prefill ends inside a group of 4": partial(chunked, [34, 1, 1, 1, 1, 52]),
    "prefill ends inside a group of 16": partial(chunked, [40] + [1] * 10),
    "chunks of 7, 1, 13, 2, 37, 30": partial(chunked, [7, 1, 13, 2, 37, 30]),
    "chunks of 3": partial(chunked, [3] * 30),
    "1100 tokens in chunks of 700, 1, 333, 1, 1, 64": long_context,
    "mixed batch": mixed,
}
CASES = [LogitCase("deepseek_v4", name, run) for name, run in _RUNS.items()]
