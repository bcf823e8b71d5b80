"""What `ring-vs-allgather` runs where: fidelity, scale, layout, and the dense twin of a model."""

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kllm.config import EngineConfig, ParallelConfig
from kllm.errors import ConfigError
from kllm.hardware import detect
from kllm.models import presets
from kllm.models.devices import choose_device
from kllm.models.load import FEWEST_LAYERS, local_path, resolve
from kllm.models.shape import model_shape
from kllm.parallel.layout import problem

DENSE = "dense"  # the same model without its indexer: every layer attends to all it sees
MODEL = "model"  # attention as the model has it
ATTENTIONS = (MODEL, DENSE)
# A few layers show what attention takes; all that fit would leave no room for long prompts.
FEW_LAYERS = f"layers:{FEWEST_LAYERS}"
LINKS = {"nvlink": "NVLink", "pcie": "PCIe"}
WITH_INDEXER = ("glm_moe_dsa", "deepseek_v32")


def choose(config: EngineConfig, fidelity: str, ranks: int) -> EngineConfig:
    """The config with what is left to this bench decided.

    Args:
        fidelity: "auto" runs all ranks where there are as many devices, or on a CPU.
        ranks: context-parallel, at most.

    Raises:
        ConfigError: for an unknown fidelity or model.
        CapacityError: the asked device is not there.
    """
    gpu = choose_device(config.device).type == "cuda"
    if fidelity == "auto":
        enough = not gpu or torch.cuda.device_count() >= ranks
        fidelity = "real" if enough else "rank-slice"
    found = replace(config, fidelity=fidelity)  # type: ignore[arg-type]  # checked there
    if config.scale == "auto" and not gpu:
        found = replace(found, scale="tiny")
    return cut(with_ranks(found, ranks))


def link_here(device: str) -> str:
    """What joins ranks that all run, in the words of rows and sentences."""
    if not device.startswith("cuda"):
        return "processes on this CPU"
    return f"this machine's {LINKS.get(detect().link, 'link')}"


def cut(config: EngineConfig) -> EngineConfig:
    """The config with few layers where `auto` does not find room for all."""
    if config.scale == "auto" and resolve(config).scale.startswith("layers:"):
        return replace(config, scale=FEW_LAYERS)
    return config


def with_ranks(config: EngineConfig, ranks: int) -> EngineConfig:
    """The config with so many context-parallel ranks, and experts spread over them if possible."""
    resolved = resolve(replace(config, scale="tiny" if config.scale == "tiny" else "full"))
    # What a layout cuts is the same in a cut model, whose shape is known sooner.
    layers = min(FEWEST_LAYERS, resolved.config.num_hidden_layers)
    cut_config = resolved.family.scaled_config(resolved.config, layers)
    dims = model_shape(resolved.family, cut_config).dims
    spread = ParallelConfig(cp=ranks, ep=ranks, cp_kind="ring")
    whole = ParallelConfig(cp=ranks, cp_kind="ring")
    return replace(config, parallel=whole if problem(dims, spread) else spread)


def attention_folder(model: str, attention: str, scale: str) -> AbstractContextManager[str]:
    """A context with the name of a model that has this attention.

    Raises:
        ConfigError: for an unknown attention, or a model that has no indexer to leave out.
    """
    if attention == MODEL:
        return nullcontext(model)
    if attention != DENSE:
        raise ConfigError(f"unknown attention '{attention}'; known: {', '.join(ATTENTIONS)}")
    if scale == "tiny":
        raise ConfigError(
            f"attention '{DENSE}' needs a model's own dimensions and scale tiny has none of them; "
            f"use --scale {FEW_LAYERS}, or another model for attention of another kind"
        )
    path = local_path(model) / "config.json"
    name = Path(model).name if path.exists() else presets.canonical(model)
    data = json.loads(path.read_text("utf-8")) if path.exists() else presets.load(model)
    if data.get("model_type") not in WITH_INDEXER:
        raise ConfigError(
            f"{name} selects no entries, so that attention '{DENSE}' is not a variant of it; "
            f"use attention '{MODEL}'"
        )
    return _Folder(f"{name}-{DENSE}", {**data, "model_type": "deepseek_v3"})


class _Folder(AbstractContextManager[str]):
    """A model folder that lasts as long as the context and has a `config.json` only."""

    def __init__(self, name: str, data: dict[str, Any]) -> None:
        self._name, self._data = name, data
        self._parent: TemporaryDirectory[str] | None = None

    def __enter__(self) -> str:
        self._parent = TemporaryDirectory(prefix="kllm-")
        folder = Path(self._parent.name) / self._name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self._data), "utf-8")
        return str(folder)

    def __exit__(self, *exc: object) -> None:
        if self._parent is not None:
            self._parent.cleanup()
