"""What each model family must offer.

A family is a module with three things: a frozen config read from a Hugging Face
`config.json`, a manifest of the released checkpoint's tensors, and the network. Parameter
and byte counts, loading, random weights and the cost model all derive from the manifest
and the config; nothing is allocated to count.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kllm.attention.context import ForwardContext
from kllm.cache.spec import CacheSpec
from kllm.errors import ConfigError
from kllm.parallel.communicator import Communicator
from kllm.parallel.single import SingleComm

STORED_BITS = {
    "F32": 32,
    "BF16": 16,
    "F16": 16,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F4_E2M1": 4,
    "I64": 64,
}


@dataclass(frozen=True, slots=True)
class BlockScale:
    """The scale tensor that accompanies a block-quantised weight."""

    suffix: str  # replaces "weight" at the end of the tensor's name, or is appended to it
    dtype: str  # "F32" or "F8_E8M0"
    block: tuple[int, int]  # rows and columns that share a scale

    def shape(self, weight: tuple[int, ...]) -> tuple[int, int]:
        """Shape of the scale tensor of a [rows, columns] weight; edges round up."""
        return -(-weight[0] // self.block[0]), -(-weight[1] // self.block[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTensor:
    """One tensor of a released checkpoint and where it goes in the network.

    `target` is the parameter's name in the network. A target may take several tensors: rows
    stacked along its first dimension from `row` on, or one per expert at index `expert`.
    """

    name: str
    shape: tuple[int, ...]  # logical shape, before packing and before any split
    dtype: str  # a key of STORED_BITS
    target: str
    scale: BlockScale | None = None
    row: int = 0  # first row in the target (of an unsplit target)
    expert: int | None = None  # index in the target's leading expert dimension
    split: str | None = None  # "column": dim 0 by TP; "row": dim 1 by TP; None: whole
    mtp: bool = False  # belongs to the multi-token-prediction head

    @property
    def parameters(self) -> int:
        """Logical parameters, scales not counted."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the checkpoint, scales included."""
        total = self.parameters * STORED_BITS[self.dtype] // 8
        if self.scale:
            total += prod(self.scale.shape(self.shape)) * STORED_BITS[self.scale.dtype] // 8
        return total

    @property
    def tensors(self) -> int:
        """Tensors in the checkpoint: the weight, and its scale if it has one."""
        return 2 if self.scale else 1


@dataclass(frozen=True, slots=True)
class Groups:
    """The communicators a network needs, by what they split."""

    attn: Communicator  # heads
    ffn: Communicator  # dense and shared FFN columns; of every expert too where `ep` is one rank
    vocab: Communicator  # embedding and head rows
    ep: Communicator  # whole experts
    cp: Communicator  # tokens of a prompt
    pp: Communicator  # layers

    @classmethod
    def single(cls) -> "Groups":
        """One rank: nothing is split."""
        one = SingleComm()
        return cls(one, one, one, one, one, one)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkShape:
    """What a step costs, for floors and the cost model. Counts are of one rank.

    `attention_flops(context)` is per query token, `attention_entries(context)` the
    (state name, entries) that one decode token reads, both summed over all layers.
    """

    token_params: int  # weights multiplied with every token, lm head excluded
    head_params: int  # lm head, multiplied with sampled tokens only
    expert_params: int  # one routed expert
    num_experts: int  # routed experts a layer on this rank; 0: a dense model
    experts_per_token: int
    moe_layers: int
    attention_flops: Callable[[int], float]
    attention_entries: Callable[[int], Mapping[str, float]]


class CausalLM(nn.Module):
    """A network of one family on one rank.

    Subclasses set `config` and `cache_spec` and implement `forward` and `logits`. `forward` returns
    the state after the last layer, as `logits` and the MTP head read it: [T, ...].
    """

    config: Any
    cache_spec: CacheSpec
    capturable: bool = True  # whether a CUDA graph can hold a step of single tokens

    def prepare(self, ctx: ForwardContext) -> None:
        """Plan the step's kernels on the host, before `forward` and outside captured graphs."""

    def forward(self, ctx: ForwardContext) -> Tensor:
        """Run the step's tokens through all layers, reading and writing KV."""
        raise NotImplementedError

    def logits(self, state: Tensor) -> Tensor:
        """Logits [S, V] float32 of rows [S, ...] taken from what `forward` returned."""
        raise NotImplementedError

    def freeze(self) -> None:
        """Called once when all weights are in place: rearrange them for this device."""

    def use_attention(self, name: str, kv_dtype: str) -> None:
        """Attend through this entry of `kllm.attention.base.ATTENTION`, or the best for "auto".

        Called once, before the first step.

        Raises:
            ConfigError: for a name other than "auto", by families whose attention is their own.
        """
        if name != "auto":
            raise ConfigError(
                f"attention backend '{name}' cannot be chosen: this model family has attention "
                "of its own; leave attention at auto"
            )


class Family(Protocol):
    """What `kllm.models.MODELS` holds for each architecture: plain functions of a module."""

    def read_config(self, data: Mapping[str, Any]) -> Any:
        """The family's config from the JSON of a `config.json`.

        Raises:
            ConfigError: for a missing key or a value the family cannot run.
        """

    def tiny_config(self) -> Any:
        """A small config with every feature of the family on."""

    def scaled_config(self, config: Any, layers: int) -> Any:
        """The config cut to `layers` layers that keep the layer-type mix."""

    def manifest(self, config: Any) -> Iterator[CheckpointTensor]:
        """All tensors of the released checkpoint."""

    def cache_spec(self, config: Any, mtp: bool = False) -> CacheSpec:
        """What the family stores per token and per request, unsplit."""

    def work_shape(self, config: Any) -> WorkShape:
        """Counts for the cost model, unsplit."""

    def build(self, config: Any, groups: Groups, mtp: bool = False) -> CausalLM:
        """The network with uninitialised weights, on torch's default device and dtype."""


def default_device_and_dtype(device: torch.device, dtype: torch.dtype) -> Any:
    """Context in which modules create their parameters on `device` in `dtype`."""
    return _Defaults(device, dtype)


class _Defaults:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        self.device.__enter__()

    def __exit__(self, *exc: object) -> None:
        self.device.__exit__(*exc)
        torch.set_default_dtype(self.before)
