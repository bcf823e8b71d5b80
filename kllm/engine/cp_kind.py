"""Ring or all-gather, where a layout leaves it to the engine: the one with less predicted time."""

from dataclasses import replace

import torch

from kllm.config import EngineConfig
from kllm.hardware.measured import cached_ceilings
from kllm.models.load import ResolvedModel
from kllm.models.shape import model_shape
from kllm.parallel.gpus import GPUS
from kllm.parallel.link import Link, measured_link, parse_link
from kllm.parallel.overlap import ACHIEVED, BLOCK_CALL_S, Setting, choose_cp_kind

UNMEASURED_CPU = 50e9  # FLOP/s
UNMEASURED_CPU_MEMORY = 10e9  # bytes/s
LOOPBACK = Link(latency_s=200e-6, bytes_per_s=1e9)  # gloo between processes of one machine
TYPICAL_PREFIX = 4  # chunks that are there already when a typical one runs


def with_cp_kind(config: EngineConfig, resolved: ResolvedModel) -> EngineConfig:
    """The config with `cp_kind` decided for full chunks in the middle of a long prompt.

    Rates are measured ones where `kllm doctor` has been run, else presets.
    """
    layout = config.parallel
    if layout.cp == 1 or layout.cp_kind != "auto":
        return config
    chunk = config.scheduler.token_budget
    kind = choose_cp_kind(
        model_shape(resolved.family, resolved.config).attention,
        cp_setting(config, resolved),
        tokens=chunk,
        cached=TYPICAL_PREFIX * chunk,
    )
    return replace(config, parallel=replace(layout, cp_kind=kind))


def cp_setting(config: EngineConfig, resolved: ResolvedModel) -> Setting:
    """What the times of both kinds are predicted with."""
    device, layout = torch.device(resolved.device).type, config.parallel
    return Setting(
        ranks=layout.cp,
        flops=ACHIEVED * _matmul_rate(device, resolved.dtype),
        link=_link(config, device),
        tp=layout.tp,
        kv_dtype=resolved.kv_dtype,
        call_s=BLOCK_CALL_S,
        memory_bytes_per_s=_memory_rate(device),
    )


def _matmul_rate(device: str, dtype: str) -> float:
    found = cached_ceilings(device)
    if found is not None:
        return found.matmul(dtype)
    return GPUS["h200"].matmul_flops if device == "cuda" else UNMEASURED_CPU


def _memory_rate(device: str) -> float:
    found = cached_ceilings(device)
    if found is not None:
        return found.copy_bytes_per_s
    return GPUS["h200"].memory_bytes_per_s if device == "cuda" else UNMEASURED_CPU_MEMORY


def _link(config: EngineConfig, device: str) -> Link:
    if config.fidelity == "rank-slice":
        return parse_link(config.link, device)
    found = cached_ceilings(device)
    if found is not None and found.links is not None:
        return measured_link(device)
    return LOOPBACK if device == "cpu" else parse_link(config.link)
