"""Facts about a model, computed from its manifest and config; nothing is allocated."""

from dataclasses import dataclass
from typing import Any

import torch

from kllm.config import CacheConfig, ParallelConfig
from kllm.models import presets
from kllm.models.base import Family
from kllm.models.devices import choose_device, choose_dtype, free_bytes, kv_share
from kllm.models.load import (
    WEIGHT_SHARE,
    largest_scale,
    rank_bytes,
    read_family_config,
    scale_config,
)

KV_DTYPES = ("float32", "bfloat16", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What `--scale auto` gives on this machine."""

    device: str
    dtype: str
    scale: str
    weight_bytes: int
    context_tokens: int  # what fits into KV memory beside the weights, over all requests


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes of one model at full scale."""

    name: str
    layers: int
    parameters: int  # without the MTP head
    mtp_parameters: int
    active_parameters: int  # multiplied with a token: lm head included, embedding not
    tensors: int  # of the checkpoint, MTP head and scales included
    checkpoint_bytes: int
    max_position: int
    kv_bytes_per_token: dict[str, float]  # by KV dtype
    bytes_per_request: dict[str, int]  # constant state, by KV dtype
    fit: Fit


def facts(model: str) -> ModelFacts:
    """The facts of a preset, folder or GGUF file.

    Raises:
        ConfigError: for an unknown model or a config that cannot be used.
    """
    name, family, config = read_family_config(model)
    tensors = list(family.manifest(config))
    total = sum(t.parameters for t in tensors)
    mtp = sum(t.parameters for t in tensors if t.mtp)
    work = family.work_shape(config)
    spec = family.cache_spec(config)
    experts = work.moe_layers * work.experts_per_token * work.expert_params
    return ModelFacts(
        name=name,
        layers=config.num_hidden_layers,
        parameters=total - mtp,
        mtp_parameters=mtp,
        active_parameters=work.token_params + work.head_params + experts,
        tensors=sum(t.tensors for t in tensors),
        checkpoint_bytes=sum(t.nbytes for t in tensors),
        max_position=config.max_position_embeddings,
        kv_bytes_per_token={dtype: spec.bytes_per_token(dtype) for dtype in KV_DTYPES},
        bytes_per_request={dtype: spec.bytes_per_request(dtype) for dtype in KV_DTYPES},
        fit=_fit(family, config),
    )


def all_presets() -> list[ModelFacts]:
    """The facts of every preset, by name."""
    return [facts(name) for name in presets.names()]


def _fit(family: Family, config: Any) -> Fit:
    device = choose_device("auto")
    dtype = choose_dtype("auto", device)
    free = free_bytes(device)
    alone = ParallelConfig()
    scale = largest_scale(family, config, alone, dtype, WEIGHT_SHARE * free)
    scaled = scale_config(family, config, scale)
    weights = rank_bytes(family.manifest(scaled), alone, dtype)
    left = kv_share(device, CacheConfig().memory_fraction, weights)
    per_token = family.cache_spec(scaled).bytes_per_token(dtype)
    return Fit(
        device=_device_name(device),
        dtype=dtype,
        scale=scale,
        weight_bytes=weights,
        context_tokens=int(left / per_token),
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
