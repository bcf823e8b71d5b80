"""What a rank of a layout holds, and how many tokens a deployment can: computed, not allocated.

Per-parameter state is cut by tensor, expert and pipeline parallelism; per-request state belongs to
the ranks that serve the request. A state without heads to cut (a latent, an index key) lies on
every tensor-parallel rank, so that these ranks together hold no more tokens than one of them. A
request decodes on one of its context-parallel ranks, so these add up as request-DP ranks do. While
its prompt is computed the others hold entries of it too: their stripes, or all of them where
prompts are replicated.
"""

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, prod

from kllm.config import ParallelConfig
from kllm.parallel.layout import Dimensions, stage_bounds
from kllm.parallel.overlap import REPLICATED, AttentionShape

STORED = "stored"  # the dtype of weights kept as the checkpoint has them, scales included
BITS = {"float32": 32, "bfloat16": 16, "float16": 16}
EMBEDDING, BEHIND = -1, 1 << 30  # layers of what stands before the first and after the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Tensors of one layer that are alike."""

    layer: int  # in the model, or EMBEDDING, or BEHIND: lm head and draft head
    part: str  # "attention", "ffn", "vocab" or "experts"
    shape: tuple[int, ...]
    bits: int  # of a stored element
    split: str | None = None  # dimension cut by TP: "column" 0, "row" 1; None: whole
    run_bits: int | None = None  # of a loaded element; None: as the run dtype
    scale_bits: int = 0
    scale_block: tuple[int, int] = (1, 1)  # rows and columns that share a scale
    count: int = 1
    both_ends: bool = False  # a first-stage table that the last stage needs as well

    def nbytes(self, dtype: str, ways: int) -> int:
        """Bytes of one tensor's part on a rank when it is cut `ways` ways."""
        shape = list(self.shape)
        if self.split:
            axis = 0 if self.split == "column" else 1
            shape[axis] //= ways
        if dtype != STORED:
            return prod(shape) * (self.run_bits or BITS[dtype]) // 8
        total = prod(shape) * self.bits // 8
        if self.scale_bits:
            blocks = [-(-n // b) for n, b in zip(shape, self.scale_block, strict=True)]
            total += prod(blocks) * self.scale_bits // 8
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenState:
    """What some layers keep for every context token."""

    name: str
    layers: tuple[int, ...]
    bytes_per_token: Mapping[str, float]  # of one layer, all heads, by KV dtype
    split: bool = False  # whether TP cuts it by heads


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState:
    """The newest rows that some layers keep of every running request, however long it is."""

    name: str
    layers: tuple[int, ...]
    row_bytes: Mapping[str, int]  # of one layer, by KV dtype
    window: int  # rows
    reach: int  # rows before a token that its layer reads


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model as the layout algebra sees it."""

    dims: Dimensions
    weights: tuple[Weights, ...]
    token_states: tuple[TokenState, ...]
    request_states: tuple[RequestState, ...]
    attention: tuple[AttentionShape, ...]
    hidden: int
    streams: int  # copies of the hidden state that travel between layers
    page_granule: int  # tokens; pages are whole multiples
    vocabulary: int
    experts_per_token: int
    expert_layers: tuple[int, ...]
    ffn_layers: tuple[int, ...]  # with a dense FFN or a shared expert
    selected: int = 0  # entries that an indexer selects for a token; 0: no indexer
    borrowing_layers: tuple[int, ...] = ()  # that reuse the selection of a layer before them


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFootprint:
    """Bytes on one rank of a pipeline stage."""

    weight_bytes: int
    kv_bytes_per_token: float
    state_bytes_per_request: int


def weight_bytes(
    weights: tuple[Weights, ...],
    layout: ParallelConfig,
    dtype: str,
    *,
    layers: int,
    experts: int = 0,
    stage_wide: frozenset[str] = frozenset(),
) -> tuple[int, ...]:
    """Bytes of one rank's weights, of each pipeline stage.

    Args:
        dtype: of the loaded weights, or STORED.
        layers: of the model.
        experts: routed ones of a layer; needed where the layout has redundant ones.
        stage_wide: parts of "ffn" and "vocab" cut over all ranks of a stage and not over tp only,
            as engines do that leave tensor parallelism on for them under request-DP.
    """
    stage_ranks = layout.world // layout.pp
    bounds = stage_bounds(layers, layout.pp)
    totals = [0.0] * layout.pp
    for w in weights:
        ways = stage_ranks if w.part in stage_wide else layout.tp
        if w.part == "experts" and layout.ep > 1:
            slots = 1 + (layout.redundant_experts / experts if layout.redundant_experts else 0)
            held = w.count * slots / layout.ep * w.nbytes(dtype, 1)
        else:
            held = w.count * w.nbytes(dtype, ways)
        layer = min(max(w.layer, 0), layers - 1)
        stage = bisect(bounds, layer) - 1
        totals[stage] += held
        if w.both_ends and stage != layout.pp - 1:
            totals[-1] += held
    return tuple(round(total) for total in totals)


def footprint(
    model: ModelShape,
    layout: ParallelConfig,
    *,
    dtype: str,
    kv_dtype: str,
    stage_wide: frozenset[str] = frozenset(),
) -> tuple[StageFootprint, ...]:
    """What a rank holds, for each pipeline stage. Arguments as `weight_bytes`."""
    layers = model.dims.layers
    weights = weight_bytes(
        model.weights,
        layout,
        dtype,
        layers=layers,
        experts=model.dims.experts,
        stage_wide=stage_wide,
    )
    bounds = stage_bounds(layers, layout.pp)
    stages = []
    for i in range(layout.pp):
        end = bounds[i + 1] if i + 1 < layout.pp else inf  # a draft layer is the last stage's
        stages.append(
            StageFootprint(
                weight_bytes=weights[i],
                kv_bytes_per_token=sum(
                    _held(s.layers, bounds[i], end)
                    * s.bytes_per_token[kv_dtype]
                    / (layout.tp if s.split else 1)
                    for s in model.token_states
                ),
                state_bytes_per_request=sum(
                    _held(s.layers, bounds[i], end) * s.window * s.row_bytes[kv_dtype]
                    for s in model.request_states
                ),
            )
        )
    return tuple(stages)


def _held(layers: tuple[int, ...], first: int, end: float) -> int:
    return sum(first <= layer < end for layer in layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How many tokens of KV a deployment holds. Fidelity: modelled."""

    stages: tuple[StageFootprint, ...]
    budget_bytes: float  # for weights and KV on each rank
    rank_tokens: int  # 0: the weights alone do not fit
    owners: int  # sets of ranks that keep requests of their own: dp * cp
    copies: int  # tp ranks that keep the same entries, 1 where heads are cut
    kv_bytes_per_token: float  # over all ranks, copies counted
    prompt_share: float = 1.0  # times that a prompt is held by its cp ranks while it is computed

    @property
    def tokens(self) -> int:
        """Context tokens over the deployment; copies count once."""
        return self.rank_tokens * self.owners

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts that can be computed at the same time, over the deployment."""
        return int(self.tokens / self.prompt_share)

    @property
    def heaviest(self) -> StageFootprint:
        """The stage with the most weights."""
        return max(self.stages, key=lambda stage: stage.weight_bytes)


def capacity(
    model: ModelShape,
    layout: ParallelConfig,
    *,
    memory_bytes: float,
    fraction: float,
    dtype: str,
    kv_dtype: str,
    reserve_bytes: float = 0.0,
    requests: int = 0,
    stage_wide: frozenset[str] = frozenset(),
) -> Capacity:
    """KV capacity of a layout: dp cp (f M - r - w - n s) / b, by the stage that holds the least.

    Args:
        memory_bytes: M, of each device.
        fraction: f, share of it for weights and KV; the rest is for activations.
        dtype, stage_wide: as `weight_bytes`.
        reserve_bytes: r, kept free besides.
        requests: n, running on each rank, whose constant state is set aside.
    """
    stages = footprint(
        model,
        layout,
        dtype=dtype,
        kv_dtype=kv_dtype,
        stage_wide=stage_wide,
    )
    budget = fraction * memory_bytes - reserve_bytes
    tokens = inf
    for stage in stages:
        left = budget - stage.weight_bytes - requests * stage.state_bytes_per_request
        if stage.kv_bytes_per_token:
            tokens = min(tokens, left / stage.kv_bytes_per_token)
        elif left < 0:
            tokens = 0
    assert tokens < inf  # some layer keeps something for every token
    return Capacity(
        stages=stages,
        budget_bytes=budget,
        rank_tokens=max(0, int(tokens)),
        owners=layout.dp * layout.cp,
        copies=1 if all(s.split for s in model.token_states) else layout.tp,
        kv_bytes_per_token=layout.tp * sum(stage.kv_bytes_per_token for stage in stages),
        prompt_share=_prompt_share(layout),
    )


def _prompt_share(layout: ParallelConfig) -> float:
    """The owner of a prompt has room for all of it; each other rank for a share, or for all."""
    return layout.cp if layout.cp_kind == REPLICATED else 2 - 1 / layout.cp
