"""Filling a network from a checkpoint, one tensor at a time, each rank only its part.

A source says which tensors it has and reads rectangles of them; `fill` decides from the
family's manifest which rectangle of which tensor goes where. `SafetensorsFolder` is the source
for Hugging Face folders; `kllm.models.gguf` has the one for GGUF files.
"""

import json
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kllm.errors import DataError
from kllm.models.base import CausalLM, CheckpointTensor, Groups
from kllm.parallel.communicator import Communicator
from kllm.parallel.single import SingleComm
from kllm.quant import fp4, fp8

log = logging.getLogger(__name__)
PLAIN = ("F32", "BF16", "F16", "I64", "I32")
# How quantised weights, and scales, may be stored. Others have as many bits and another meaning.
QUANTISED = {"F8_E4M3": ("F8_E4M3",), "F4_E2M1": ("I8", "U8")}
SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
INDEX = "model.safetensors.index.json"
BROKEN_INDEX = (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError)


class TensorSource(Protocol):
    """Where named tensors come from."""

    def names(self) -> Collection[str]:
        """All tensors, in the order in which reading them is cheapest."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Stored shape (packed formats: as packed)."""

    def dtype(self, name: str) -> str:
        """Stored dtype as safetensors spells it."""

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A rectangle of the tensor, on the CPU, in its stored dtype."""


@dataclass(frozen=True, slots=True)
class _Placement:
    """A rectangle of a checkpoint tensor and the view of the network it belongs in."""

    into: Tensor
    rows: slice
    columns: slice | None  # None: the tensor has one dimension

    @property
    def part(self) -> tuple[slice, ...]:
        return (self.rows,) if self.columns is None else (self.rows, self.columns)


def fill(
    model: CausalLM, manifest: Iterable[CheckpointTensor], source: TensorSource, groups: Groups
) -> None:
    """Fill the tensors of `model` in place; MTP tensors only where the model has the head.

    Nothing is read of the layers of other pipeline stages.

    Raises:
        DataError: when tensors are missing, have other shapes than the config asks for, hold
            values that are not finite, or cannot be read; the message names them.
    """
    targets = model.state_dict(keep_vars=True)
    absent = groups.pp.size > 1  # whether other stages have what this one lacks
    wanted = {t.name: t for t in manifest if t.target in targets or not (t.mtp or absent)}
    stored = source.names()
    _require(wanted, set(stored))
    extra = set(stored) - {n for t in wanted.values() for n in (t.name, scale_name(t))}
    if extra:
        log.debug("%d tensors of the checkpoint are not used: %s", len(extra), sorted(extra))
    with torch.no_grad():
        for name in stored:
            tensor = wanted.get(name)
            if tensor is None:
                continue
            target = targets[tensor.target].data
            if tensor.expert is not None:
                held = _owner(model, tensor, "held")
                target = target[held.index(tensor.expert)] if tensor.expert in held else None
            if target is not None:
                comm = _owner(model, tensor, "comm") if tensor.split else SingleComm()
                place = _place(tensor, target, comm)
                _check_stored(tensor, source)
                place.into.copy_(_read(tensor, source, place))
                _check_finite(tensor.name, place.into)


def scale_name(tensor: CheckpointTensor) -> str:
    """Name of the tensor's block scales; its own name when it has none."""
    if tensor.scale is None:
        return tensor.name
    return tensor.name.removesuffix("weight") + tensor.scale.suffix


def _require(wanted: dict[str, CheckpointTensor], stored: set[str]) -> None:
    missing = [name for name in wanted if name not in stored]
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise DataError(
            f"the checkpoint lacks {len(missing)} of {len(wanted)} tensors: {shown}; "
            "is it complete, and of the model that its config describes?"
        )


def _owner(model: CausalLM, tensor: CheckpointTensor, attribute: str) -> Any:
    """An attribute of the innermost module around the target that has it.

    `comm`: the ranks that a tensor is split over; `held`: the experts that a rank has.
    """
    path = tensor.target
    while path:
        path = path.rpartition(".")[0]
        found = getattr(model.get_submodule(path), attribute, None)
        if found is not None:
            return found
    raise AssertionError(f"no module around {tensor.target} has {attribute}: how is it split?")


def _place(tensor: CheckpointTensor, target: Tensor, comm: Communicator) -> _Placement:
    """Where this rank's part of a tensor goes; `target` is that of one expert."""
    rows, first = tensor.shape[0], tensor.row
    row0 = 0
    if tensor.split == "column":
        rows, first = rows // comm.size, first // comm.size
        row0 = comm.rank * rows
    into = target[first : first + rows]
    if len(tensor.shape) == 1:
        return _Placement(into, slice(row0, row0 + rows), None)
    columns, column0 = tensor.shape[1], 0
    if tensor.split == "row":
        columns //= comm.size
        column0 = comm.rank * columns
    return _Placement(into, slice(row0, row0 + rows), slice(column0, column0 + columns))


def _check_stored(tensor: CheckpointTensor, source: TensorSource) -> None:
    """Refuse what would be read as something else."""
    stored, want = source.dtype(tensor.name), tensor.shape
    if tensor.dtype == "F4_E2M1" and stored not in PLAIN:
        want = (want[0], want[1] // 2)
    _check_shape(tensor.name, source, want)
    if stored in PLAIN:
        return
    if tensor.scale is None or stored not in QUANTISED[tensor.dtype]:
        raise DataError(
            f"tensor {tensor.name} is stored as {stored}, and the config asks for {tensor.dtype}"
        )
    scales = scale_name(tensor)
    if scales not in source.names():
        raise DataError(f"tensor {tensor.name} is quantised and its scales {scales} are missing")
    _check_shape(scales, source, tensor.scale.shape(tensor.shape))
    if source.dtype(scales) not in SCALES:
        raise DataError(
            f"scales {scales} are stored as {source.dtype(scales)}, and the config asks for "
            f"{tensor.scale.dtype}"
        )


def _check_shape(name: str, source: TensorSource, want: tuple[int, ...]) -> None:
    found = source.shape(name)
    if found != want:
        raise DataError(
            f"tensor {name} has shape {list(found)} and the config asks for {list(want)}"
        )


def _check_finite(name: str, values: Tensor) -> None:
    """Once running, one such value makes every answer noise, and nothing says why."""
    if values.is_floating_point() and not torch.stack(torch.aminmax(values)).isfinite().all():
        dtype = str(values.dtype).removeprefix("torch.")
        raise DataError(
            f"tensor {name} holds values that are not finite as {dtype}: the checkpoint is "
            "damaged, or needs a dtype of a wider range, as bfloat16 is"
        )


def _read(tensor: CheckpointTensor, source: TensorSource, place: _Placement) -> Tensor:
    """The placement's values, dequantised on the target's device."""
    if source.dtype(tensor.name) in PLAIN:
        return source.read(tensor.name, place.part)
    assert tensor.scale is not None
    assert place.columns is not None
    scales = scale_name(tensor)
    rows, columns = place.rows, place.columns
    if tensor.dtype == "F4_E2M1":
        return _read_fp4(tensor.name, scales, rows, columns, source, place.into.device)
    block_rows, block_columns = tensor.scale.block
    scale_part = (_blocks(rows, block_rows), _blocks(columns, block_columns))
    scale = source.read(scales, scale_part).to(place.into.device)
    offset = (rows.start % block_rows, columns.start % block_columns)
    values = source.read(tensor.name, place.part).to(place.into.device)
    return fp8.dequantize(values, scale, tensor.scale.block, offset)


def _read_fp4(
    name: str,
    scales: str,
    rows: slice,
    columns: slice,
    source: TensorSource,
    device: torch.device,
) -> Tensor:
    """A rectangle of an FP4 matrix. Whole groups are read, as a byte has two columns."""
    groups = _blocks(columns, fp4.GROUP)
    first = groups.start * fp4.GROUP
    part = (rows, slice(first // 2, groups.stop * fp4.GROUP // 2))
    packed = source.read(name, part).to(device)
    scale = source.read(scales, (rows, groups)).to(device)
    return fp4.dequantize(packed, scale)[:, columns.start - first : columns.stop - first]


def _blocks(span: slice, block: int) -> slice:
    return slice(span.start // block, -(-span.stop // block))


class SafetensorsFolder:
    """The `*.safetensors` shards of a Hugging Face folder.

    Raises:
        DataError: when a shard is missing, truncated, or not what the index says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: tuple[str, Any] = ("", None)  # the shard being read
        self._shards = self._read_index()
        if not self._shards:
            raise DataError(f"{folder} holds no tensors: no {INDEX} and no *.safetensors file")

    def _read_index(self) -> dict[str, str]:
        index = self.folder / INDEX
        if not index.exists():
            files = sorted(path.name for path in self.folder.glob("*.safetensors"))
            return {name: file for file in files for name in self._shard(file).keys()}  # noqa: SIM118
        try:
            weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
            by_file = sorted(weight_map.items(), key=lambda item: item[1])
            absent = sorted({f for _, f in by_file if not (self.folder / f).exists()})
        except BROKEN_INDEX as error:
            raise DataError(f"{index} cannot be read as a shard index: {error}") from None
        if absent:
            raise DataError(
                f"{self.folder} lacks {len(absent)} shard files that its index names: "
                f"{', '.join(absent[:5])}"
            )
        return dict(by_file)

    def _shard(self, file: str) -> Any:
        """The open shard. One is kept open: tensors are read shard by shard."""
        if self._open[0] != file:
            try:
                self._open = (file, safe_open(self.folder / file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise DataError(
                    f"{self.folder / file} cannot be read, it may be truncated: {error}"
                ) from None
        return self._open[1]

    def _slice(self, name: str) -> Any:
        file = self._shards[name]
        try:
            return self._shard(file).get_slice(name)
        except SafetensorError:
            raise DataError(f"{self.folder / file} lacks tensor {name} of the index") from None

    def names(self) -> Collection[str]:
        """All tensors, shard by shard."""
        return self._shards.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Stored shape."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Stored dtype."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A rectangle of the tensor; only its bytes are read."""
        tensor: Tensor = self._slice(name)[part]
        return tensor
