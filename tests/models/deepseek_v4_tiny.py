"""A tiny DeepSeek-V4 checkpoint with the released names and random values."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kllm.models import deepseek_v4
from kllm.models.base import CheckpointTensor, Groups
from kllm.models.weights import SafetensorsFolder, fill

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
