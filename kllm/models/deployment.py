"""What a layout of a model comes to on a kind of GPU, computed: memory, capacity, transfers."""

import math
from dataclasses import dataclass, replace

from kllm.config import ParallelConfig
from kllm.models.load import read_family_config
from kllm.models.shape import KV_DTYPES, model_shape
from kllm.parallel.footprint import BITS, STORED, Capacity, ModelShape, capacity
from kllm.parallel.layout import check, short_name
from kllm.parallel.link import Link
from kllm.parallel.overlap import (
    ACHIEVED,
    BLOCK_CALL_S,
    PromptChunk,
    Setting,
    Times,
    choose_cp_kind,
    crossings,
    hiding_bandwidth,
    hiding_rows,
    predict_prompt,
)
from kllm.parallel.traffic import Exchange, Step, busiest, traffic
from kllm.registry import Registry

TOKENS_SEARCHED = (256.0, float(1 << 20))  # where break-even prompts are looked for
BANDWIDTHS_SEARCHED = (1e9, 4e12)  # bytes a second

WEIGHT_DTYPES = Registry("weight dtype", dict.fromkeys((STORED, *BITS)))
ENTRY_DTYPES = Registry("KV dtype", dict.fromkeys(KV_DTYPES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What every rank has."""

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    matmul_flops: float
    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the transfers of a step are computed for, in each request-DP group."""

    tokens: int  # new tokens of a prefill step
    cached: int  # tokens of the prompt before them
    batch: int  # decoding requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One use of a collective in a step, by one rank of the busiest stage."""

    what: str
    collective: str
    ranks: int
    calls: int
    sent_bytes: float
    seconds: float  # on the link, nothing hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Hiding:
    """When one round of a ring hides its transfers."""

    attention: str
    entries: str
    layers: int
    rows: float | None  # new tokens a rank from which it does; None: never
    bytes_per_s: float | None  # bandwidth from which it does for the load; None: none


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Where the faster sharded kind of context parallelism changes."""

    variable: str  # "tokens" or "bytes_per_s"
    at: float
    below: str
    above: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """Ring, all-gather and replicated prompts: the attention of a prefill step, all layers."""

    kind: str  # sharded, with less predicted time
    ring_s: float
    all_gather_s: float
    replicated_s: float
    compute_s: float
    flops: float  # rate it was computed with
    hiding: tuple[Hiding, ...]
    break_even: tuple[BreakEven, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A layout on devices. Fidelity: modelled."""

    model: str
    layout: ParallelConfig
    short_name: str
    device: Device
    dtype: str
    kv_dtype: str
    activation_bytes: float  # left on each rank by the memory fraction
    dequantised: bool  # by kLLM itself, which then needs more for weights than is counted
    capacity: Capacity
    kv_tokens: int  # over the deployment
    load: Load
    prefill: tuple[Transfer, ...]
    decode: tuple[Transfer, ...]
    sequence: Sequence | None  # with context parallelism
    fidelity: str = "modelled"


def deployment(
    model: str,
    layout: ParallelConfig,
    device: Device,
    load: Load,
    *,
    memory_fraction: float,
    dtype: str,
    kv_dtype: str,
) -> Deployment:
    """Compute what a layout comes to; nothing is allocated.

    Args:
        memory_fraction: share of memory for weights and KV.
        dtype: of weights: "stored" (as the checkpoint has them) or a run dtype.

    Raises:
        ConfigError: for an unknown model or dtype, or a layout that the model does not allow.
    """
    for names, name in ((WEIGHT_DTYPES, dtype), (ENTRY_DTYPES, kv_dtype)):
        _ = names[name]
    name, family, config = read_family_config(model)
    shape = model_shape(family, config)
    check(shape.dims, layout)
    held = capacity(
        shape,
        layout,
        memory_bytes=device.memory_bytes,
        fraction=memory_fraction,
        dtype=dtype,
        kv_dtype=kv_dtype,
        requests=-(-load.batch // layout.cp),
    )
    sequence = None
    if layout.cp > 1:
        sequence = _sequence(shape, layout, device, load, kv_dtype)
        if layout.cp_kind == "auto":
            layout = replace(layout, cp_kind=sequence.kind)
    prefill, decode = (
        tuple(
            _transfer(exchange, device.link)
            for exchange in busiest(traffic(shape, layout, step, kv_dtype=kv_dtype), device.link)
        )
        for step in (Step.chunk(load.tokens, load.cached), Step.decode(load.batch))
    )
    return Deployment(
        model=name,
        layout=layout,
        short_name=short_name(layout),
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        activation_bytes=(1 - memory_fraction) * device.memory_bytes,
        dequantised=dtype == STORED and any(w.bits < BITS["bfloat16"] for w in shape.weights),
        capacity=held,
        kv_tokens=held.tokens,
        load=load,
        prefill=prefill,
        decode=decode,
        sequence=sequence,
    )


def _transfer(exchange: Exchange, link: Link) -> Transfer:
    return Transfer(
        what=exchange.what,
        collective=exchange.collective,
        ranks=exchange.ranks,
        calls=exchange.calls,
        sent_bytes=exchange.sent_bytes,
        seconds=exchange.seconds(link),
    )


def _sequence(
    shape: ModelShape, layout: ParallelConfig, device: Device, load: Load, kv_dtype: str
) -> Sequence:
    setting = Setting(
        ranks=layout.cp,
        flops=ACHIEVED * device.matmul_flops,
        link=device.link,
        tp=layout.tp,
        kv_dtype=kv_dtype,
        call_s=BLOCK_CALL_S,
        memory_bytes_per_s=device.memory_bytes_per_s,
    )

    def by_tokens(tokens: float) -> Times:
        return predict_prompt(shape.attention, setting, tokens=round(tokens), cached=load.cached)

    def by_bandwidth(bandwidth: float) -> Times:
        link = replace(device.link, bytes_per_s=bandwidth, curves={})
        faster = replace(setting, link=link)
        return predict_prompt(shape.attention, faster, tokens=load.tokens, cached=load.cached)

    chunk = PromptChunk(new=load.tokens, cached=load.cached)
    times = by_tokens(load.tokens)
    block = (load.tokens + load.cached) / layout.cp
    return Sequence(
        kind=choose_cp_kind(shape.attention, setting, tokens=load.tokens, cached=load.cached),
        ring_s=times.ring,
        all_gather_s=times.all_gather,
        replicated_s=times.replicated,
        compute_s=times.compute,
        flops=setting.flops,
        hiding=tuple(
            Hiding(
                attention=kind.name,
                entries=phase.name,
                layers=len(kind.layers),
                rows=_finite(
                    hiding_rows(phase, block_tokens=block, setting=setting, visible=chunk.visible)
                ),
                bytes_per_s=_finite(hiding_bandwidth(phase, chunk, setting)),
            )
            for kind in shape.attention
            for phase in kind.phases
        ),
        break_even=tuple(
            BreakEven(variable=variable, at=found.at, below=found.below, above=found.above)
            for variable, function, bounds in (
                ("tokens", by_tokens, TOKENS_SEARCHED),
                ("bytes_per_s", by_bandwidth, BANDWIDTHS_SEARCHED),
            )
            for found in crossings(function, *bounds)
        ),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
