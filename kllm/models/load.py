"""From an engine's settings to a network with weights.

`resolve` is cheap: it finds out what is meant, checks it, and chooses scale, device and dtype.
`load_model` builds the network and reads or makes its weights.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kllm.config import EngineConfig, ParallelConfig
from kllm.errors import CapacityError, ConfigError
from kllm.models import MODELS, presets
from kllm.models.base import (
    CausalLM,
    CheckpointTensor,
    Family,
    Groups,
    default_device_and_dtype,
)
from kllm.models.devices import (
    choose_device,
    choose_dtype,
    fit_threads,
    free_bytes,
    free_on_ranks,
)
from kllm.models.gguf import GGUFFile, packaged_smollm2
from kllm.models.random import fill_random
from kllm.models.shape import collect_weights
from kllm.models.weights import SafetensorsFolder, fill
from kllm.parallel.footprint import BEHIND, weight_bytes
from kllm.parallel.link import MEASURED, parse_link

# Share of free device memory that `auto` gives to weights; the rest is for KV and activations.
WEIGHT_SHARE = 0.8
# A cut below this many layers no longer has the families' mix of layer types: `auto` goes tiny.
FEWEST_LAYERS = 4


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """What an `EngineConfig` asks for."""

    name: str  # preset name, or file name
    model_type: str
    family: Family
    config: Any  # the family's config, already scaled
    scale: str  # "full", "layers:N" or "tiny"
    weights: Path | None  # folder or GGUF file; None: random
    tokenizer: Path | None  # folder or GGUF file that has one
    device: str
    dtype: str
    kv_dtype: str
    attention: str  # name of a backend, or "auto"
    parallel: ParallelConfig
    seed: int

    @property
    def display_name(self) -> str:
        """Name, scale and kind of weights, for results and notes."""
        kind = "random weights" if self.weights is None else "real weights"
        return f"{self.name} ({self.scale}, {kind})"


def resolve(config: EngineConfig) -> ResolvedModel:
    """Find the model, check the settings against it, choose what is left to `auto`.

    Raises:
        ConfigError: unknown model, scale or link, an unsupported or broken config.
        DataError: a GGUF file that cannot be read.
        DependencyError: the package with a preset's weights is not installed.
        CapacityError: the asked device is not there.
    """
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    if config.fidelity == "rank-slice" or config.link != MEASURED:
        parse_link(config.link, device.type)  # before anything is loaded or measured
    name, path, data = _locate(config)
    model_type, family, full = _family_config(name, data)
    if path is not None and config.scale not in ("auto", "full"):
        raise ConfigError(
            f"scale '{config.scale}' would cut real weights; use scale full, or load random"
        )
    scale = config.scale
    if scale == "auto":
        ranks_here = config.parallel.world if config.fidelity == "real" else 1
        budget = WEIGHT_SHARE * free_on_ranks(device, ranks_here)
        scale = "full" if path else largest_scale(family, full, config.parallel, dtype, budget)
    tokenizer = path
    if path is None and scale != "tiny" and (file := local_path(config.model)).exists():
        tokenizer = file  # random weights in place of a file's: its vocabulary still fits
    return ResolvedModel(
        name=name,
        model_type=model_type,
        family=family,
        config=scale_config(family, full, scale),
        scale=scale,
        weights=path,
        tokenizer=tokenizer,
        device=str(device),
        dtype=dtype,
        kv_dtype=dtype if config.cache.dtype == "auto" else config.cache.dtype,
        attention=config.attention,
        parallel=config.parallel,
        seed=config.seed,
    )


def read_family_config(model: str) -> tuple[str, Family, Any]:
    """(name, family, config) of a preset, folder or GGUF file, whatever weights there are.

    Raises:
        ConfigError, DataError: as `resolve`.
    """
    name, _, data = _locate(EngineConfig(model=model, load="random"))
    _, family, config = _family_config(name, data)
    return name, family, config


def _family_config(name: str, data: dict[str, Any]) -> tuple[str, Family, Any]:
    model_type = data.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise ConfigError(f"{name}: model type {model_type!r} is not supported; known: {known}")
    family = MODELS[model_type]()
    return model_type, family, family.read_config(data)


def load_model(
    resolved: ResolvedModel,
    *,
    device: torch.device,
    dtype: torch.dtype,
    groups: Groups,
    mtp: bool = False,
) -> CausalLM:
    """The network with its weights on one rank.

    Raises:
        CapacityError: when the rank's weights exceed the device's free memory.
        DataError: when the checkpoint is incomplete, damaged or of another model.
        ConfigError: when the layout or attention backend does not suit the family.
    """
    family, config = resolved.family, resolved.config
    need = rank_bytes(family.manifest(config), resolved.parallel, str(dtype).split(".")[-1], mtp)
    free = free_bytes(device)
    if need > free:
        raise CapacityError(
            f"the weights of {resolved.name} need {need / 2**30:.1f} GiB on each rank and "
            f"{free / 2**30:.1f} GiB are free on {device}; use a smaller scale, for instance "
            "--scale auto, or more ranks"
        )
    with default_device_and_dtype(device, dtype):
        model = family.build(config, groups, mtp)
    model.use_attention(resolved.attention, resolved.kv_dtype)
    if resolved.weights is None:
        fill_random(model, family, resolved.seed)
    else:
        source = open_weights(resolved.weights)
        fill(model, family.manifest(config), source, groups)
    if device.type == "cpu":  # packing needs to know them
        fit_threads(sum(p.numel() * p.element_size() for p in model.parameters()))
    model.freeze()
    return model.eval()


def open_weights(path: Path) -> GGUFFile | SafetensorsFolder:
    """The tensor source of a folder or a GGUF file."""
    return SafetensorsFolder(path) if path.is_dir() else GGUFFile(path)


def scale_config(family: Family, config: Any, scale: str) -> Any:
    """The family's config at a scale.

    Raises:
        ConfigError: when `scale` is not "full", "tiny" or "layers:N" with a possible N.
    """
    if scale == "full":
        return config
    if scale == "tiny":
        return family.tiny_config()
    kind, _, count = scale.partition(":")
    if kind != "layers" or not count.isdecimal():
        raise ConfigError(f"unknown scale '{scale}'; known: auto, full, layers:N, tiny")
    if not 1 <= int(count) <= config.num_hidden_layers:
        raise ConfigError(
            f"scale '{scale}' is not possible; the model has {config.num_hidden_layers} layers"
        )
    return family.scaled_config(config, int(count))


def largest_scale(
    family: Family, config: Any, parallel: ParallelConfig, dtype: str, budget: float
) -> str:
    """The largest scale whose weights on one rank fit `budget` bytes in the run dtype."""

    def fits(layers: int) -> bool:
        cut = family.scaled_config(config, layers)
        return rank_bytes(family.manifest(cut), parallel, dtype) <= budget

    low, high = FEWEST_LAYERS, config.num_hidden_layers
    if low < high and not fits(low):  # asked first: it is the short manifest
        return "tiny"
    if rank_bytes(family.manifest(config), parallel, dtype) <= budget:
        return "full"
    if low >= high:
        return "tiny"
    while high - low > 1:  # fits(low), not fits(high)
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return f"layers:{low}"


def rank_bytes(
    tensors: Iterable[CheckpointTensor], parallel: ParallelConfig, dtype: str, mtp: bool = False
) -> int:
    """Bytes of one rank's weights once loaded (quantised ones are dequantised).

    With a pipeline: of the stage that has the most.
    """
    tensors = list(tensors)
    experts = 1 + max((t.expert for t in tensors if t.expert is not None), default=-1)
    weights = collect_weights(tensors, mtp=mtp)
    layers = max(1, 1 + max((w.layer for w in weights if w.layer < BEHIND), default=0))
    return max(weight_bytes(weights, parallel, dtype, layers=layers, experts=experts))


def local_path(model: str) -> Path:
    """Where a model lies if it is no preset; `~` of a user who is not there stays as it is."""
    return Path(os.path.expanduser(model))  # pathlib's raises for such a user


def _locate(config: EngineConfig) -> tuple[str, Path | None, dict[str, Any]]:
    """(name, file or folder of real weights or None for random, config.json content)."""
    path = local_path(config.model)
    random = config.load == "random"
    if path.is_dir():
        return path.resolve().name, None if random else path, _read_folder_config(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{path} is neither a folder nor a .gguf file")
        return path.stem, None if random else path, GGUFFile(path).config
    if path.suffix == ".gguf" or "/" in config.model:
        raise ConfigError(f"no model folder or file {config.model}; models are local files")
    name = presets.canonical(config.model)
    wants_weights = config.load == "weights" or (
        config.load == "auto" and config.scale in ("auto", "full")
    )
    if name == "smollm2-135m" and wants_weights:
        file = packaged_smollm2()
        return name, file, GGUFFile(file).config
    if config.load == "weights":
        raise ConfigError(
            f"preset '{name}' has no weights on this machine; name a folder that has them as "
            "the model, or use load random"
        )
    return name, None, presets.load(name)


def _read_folder_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.exists():
        raise ConfigError(f"{folder} is no model folder: it has no config.json")
    try:
        data = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return data
