"""What each model family must offer.

A family is a module with three things: a frozen config read from a Hugging Face
`config.json`, a manifest of the released checkpoint's tensors, and the network. Parameter
and byte counts, loading, random weights and the cost model all derive from the manifest
and the config; nothing is allocated to count.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kllm.attention.context import ForwardContext
from kllm.cache.spec import CacheSpec
from kllm.errors import ConfigError
from kllm.parallel.communicator import Communicator
from kllm.parallel.expert_placement import ExpertOptions
from kllm.parallel.layout import stage_bounds
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
    experts: ExpertOptions = field(default_factory=ExpertOptions)

    @classmethod
    def single(cls) -> "Groups":
        """One rank: nothing is split."""
        one = SingleComm()
        return cls(one, one, one, one, one, one)


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of one pipeline rank, by their index in the model.

    The first stage has the embedding, the last one the final norm, the lm head and the MTP head.
    """

    start: int
    stop: int
    count: int  # layers of the model

    @classmethod
    def of(cls, count: int, pp: Communicator) -> "Stage":
        """This rank's stage of a model of `count` layers; see `stage_bounds`.

        Raises:
            ConfigError: when a stage would have no layer.
        """
        if pp.size > count:
            raise ConfigError(
                f"pp {pp.size} leaves pipeline stages empty: the model has {count} layers; use a "
                f"pp of at most {count}"
            )
        bounds = stage_bounds(count, pp.size)
        return cls(bounds[pp.rank], bounds[pp.rank + 1], count)

    @property
    def first(self) -> bool:
        """Whether the stage begins with token ids."""
        return self.start == 0

    @property
    def last(self) -> bool:
        """Whether the stage ends with what `CausalLM.logits` reads."""
        return self.stop == self.count

    @property
    def layers(self) -> range:
        """The stage's layers."""
        return range(self.start, self.stop)

    def cache(self, spec: CacheSpec) -> CacheSpec:
        """The part of a model's spec that the stage stores; an MTP layer is the last stage's.

        States of which the stage has no layer stay, so that all stages agree on page sizes.
        """

        def own(layers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(i for i in layers if i in self.layers or (self.last and i >= self.count))

        return replace(
            spec,
            paged=tuple(replace(state, layers=own(state.layers)) for state in spec.paged),
            rings=tuple(replace(ring, layers=own(ring.layers)) for ring in spec.rings),
        )


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
    """A network of one family on one rank: the layers of its pipeline stage.

    Subclasses set `config`, `stage` and `cache_spec` (the stage's) and implement `forward` and
    `logits`. Parameters have the same names whatever the stage: layers keep the model's index.
    """

    config: Any
    stage: Stage
    cache_spec: CacheSpec
    capturable: bool = True  # whether a CUDA graph can hold a step of single tokens

    def prepare(self, ctx: ForwardContext) -> None:
        """Plan the step's kernels on the host, before `forward` and outside captured graphs."""

    def forward(self, ctx: ForwardContext, received: Sequence[Tensor] = ()) -> Tensor:
        """Run the step's tokens through the stage's layers, reading and writing KV.

        Args:
            received: what the stage before sent, its `boundary`; the first stage takes nothing.

        Returns:
            [T, ...]: of the last stage, the state as `logits` and the MTP head read it; of
            another, the state as the next layer reads it.
        """
        raise NotImplementedError

    def logits(self, state: Tensor) -> Tensor:
        """Logits [S, V] float32 of rows [S, ...] of what `forward` returned on the last stage."""
        raise NotImplementedError

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a token's state between layers."""
        return (self.config.hidden_size,)

    def boundary(self, ctx: ForwardContext, state: Tensor) -> list[Tensor]:
        """What the next stage has to receive, given what `forward` returned for the step."""
        return [state.contiguous()]

    def boundary_shapes(self, ctx: ForwardContext) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor of the stage before's `boundary`, known on the host."""
        return [((ctx.num_tokens, *self.state_shape), ctx.pool.compute_dtype)]

    def receive_buffers(self, ctx: ForwardContext) -> list[Tensor]:
        """Uninitialised memory for the stage before's `boundary`."""
        device, shapes = ctx.token_ids.device, self.boundary_shapes(ctx)
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]

    def stand_in(self, ctx: ForwardContext) -> list[Tensor]:
        """Plausible values in place of the stage before's `boundary`, where it is not there."""
        ((shape, dtype),) = CausalLM.boundary_shapes(self, ctx)
        return [torch.randn(shape, dtype=dtype, device=ctx.token_ids.device)]

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
