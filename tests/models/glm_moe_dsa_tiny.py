"""Tiny GLM-5.2, DeepSeek-V3 and V3.2 checkpoints with the released names and random values."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kllm.models import glm_moe_dsa
from kllm.models.base import CheckpointTensor, Groups
from kllm.models.weights import SafetensorsFolder, fill

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
