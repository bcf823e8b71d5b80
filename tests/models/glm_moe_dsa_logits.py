"""GLM-5.2, DeepSeek-V3 and V3.2 against `transformers`: released names, loaded by both."""

import json
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kllm.attention import mla
from kllm.models import glm_moe_dsa
from kllm.models.base import CheckpointTensor, Groups
from kllm.models.weights import SafetensorsFolder, fill
from tests.models.harness import Harness
from tests.models.logit_cases import LogitCase, seeded_ids

GLM: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 11,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "first_k_dense_replace": 3,
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 8_000_000.0, "rope_type": "default"},
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# Groups of experts, and YaRN with a base length that the prompt exceeds.
V3: dict[str, Any] = {
    **GLM,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 4,
    "n_group": 4,
    "topk_group": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_theta": 10_000.0,
        "rope_type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
V32 = {**V3, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
TINY = {"glm_moe_dsa": GLM, "deepseek_v3": V3, "deepseek_v32": V32}
PROMPT = seeded_ids(41, GLM["vocab_size"])


def random_values(tensor: CheckpointTensor, generator: torch.Generator) -> Tensor:
    """Values that matter in every tensor: none of a default initialisation's zeros and ones."""
    values = torch.randn(tensor.shape, generator=generator)
    if len(tensor.shape) == 2:
        return values * tensor.shape[1] ** -0.5
    if tensor.name.endswith("norm.weight"):
        return 1 + 0.1 * values
    return 0.3 * values


def write_checkpoint(folder: Path, data: dict[str, Any], seed: int = 0) -> None:
    """A float32 checkpoint with the released names and random values."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        t.name: random_values(t, generator)
        for t in glm_moe_dsa.manifest(glm_moe_dsa.read_config(data))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(data))


def load_ours(folder: Path, mtp: bool = False) -> glm_moe_dsa.GlmMoeDsaForCausalLM:
    """Our float32 network with the folder's weights."""
    config = glm_moe_dsa.read_config(json.loads((folder / "config.json").read_text()))
    model = glm_moe_dsa.build(config, Groups.single(), mtp)
    fill(model, glm_moe_dsa.manifest(config), SafetensorsFolder(folder), Groups.single())
    return model.eval()


@cache
def models(model_type: str) -> tuple[glm_moe_dsa.GlmMoeDsaForCausalLM, Any]:
    """(our network, with the MTP head; the reference) from one checkpoint."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, TINY[model_type])
        ours = load_ours(folder, mtp=True)
        config = AutoConfig.from_pretrained(folder)
        reference = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    return ours, reference


@cache
def reference_logits(model_type: str, token_ids: tuple[int, ...]) -> Tensor:
    """[T, V] of the reference, in one pass."""
    with torch.no_grad():
        logits: Tensor = models(model_type)[1](torch.tensor([token_ids])).logits[0]
    return logits


def pair(model_type: str = "glm_moe_dsa") -> tuple[glm_moe_dsa.GlmMoeDsaForCausalLM, Tensor]:
    """(our network, with the MTP head; the reference's logits of PROMPT)."""
    return models(model_type)[0], reference_logits(model_type, tuple(PROMPT))


def harness(model_type: str = "glm_moe_dsa", **settings: Any) -> Harness:
    """With pages so small that a prompt has many."""
    return Harness(models(model_type)[0], **{"page_size": 4, **settings})


def chunked(model_type: str, chunks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """One request in chunks."""
    got = harness(model_type).run(PROMPT, chunks)
    return got, pair(model_type)[1][: sum(chunks)]


def forced(expanded: bool, model_type: str, chunks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """As `chunked`, with one form of attention for all chunks."""
    with patch.object(mla, "expanding_pays", lambda *_: expanded):
        return chunked(model_type, chunks)


def mixed(model_type: str) -> tuple[Tensor, Tensor]:
    """Three requests prefilled, chunked and decoded in the same steps."""
    shared = harness(model_type, num_requests=3)
    plans = [{0: 5}, {0: 13, 1: 7}, {0: 1, 1: 1, 2: 21}, {0: 1, 1: 19}, {0: 21, 2: 1}, {2: 13}]
    parts: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    done = [0, 0, 0]
    for plan in plans:
        tokens = {r: PROMPT[done[r] : done[r] + n] for r, n in plan.items()}
        for r, rows in shared.step(tokens).items():
            parts[r].append(rows)
            done[r] += len(rows)
    got = torch.cat([torch.cat(parts[r]) for r in range(3)])
    return got, torch.cat([pair(model_type)[1][:n] for n in done])


def long_context(model_type: str) -> tuple[Tensor, Tensor]:
    """Chunks many times the selection."""
    tokens = seeded_ids(600, GLM["vocab_size"], seed=1)
    got = harness(model_type, max_len=600).run(tokens, [300, 1, 233, 1, 1, 64])
    return got, reference_logits(model_type, tuple(tokens))


def cases(model_type: str) -> list[LogitCase]:
    """The comparisons of one member of the family."""
    runs = {
        "one shot": partial(chunked, model_type, [41]),
        "prefill 13, then one by one": partial(chunked, model_type, [13] + [1] * 28),
        "one by one from the start": partial(chunked, model_type, [1] * 41),
        "chunks of 7, 1, 13, 2, 18": partial(chunked, model_type, [7, 1, 13, 2, 18]),
        "chunks of 3": partial(chunked, model_type, [3] * 13),
        "expanded, chunks of 17, 3, 21": partial(forced, True, model_type, [17, 3, 21]),
        "absorbed, chunks of 17, 3, 21": partial(forced, False, model_type, [17, 3, 21]),
        "mixed batch": partial(mixed, model_type),
        "600 tokens in chunks of 300, 1, 233, 1, 1, 64": partial(long_context, model_type),
    }
    member = "" if model_type == "glm_moe_dsa" else f"{model_type}: "
    return [LogitCase("glm_moe_dsa", member + name, run) for name, run in runs.items()]


CASES = [case for model_type in TINY for case in cases(model_type)]
