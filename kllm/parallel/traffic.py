"""What a rank sends in one step of a layout, by collective, and how long its links carry it.

Bytes are those of the algorithms in `kllm.parallel.link`; expert traffic is the expectation under
uniform routing. Fidelity: modelled.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import comb

from kllm.config import ParallelConfig
from kllm.parallel.footprint import ModelShape
from kllm.parallel.layout import stage_bounds
from kllm.parallel.link import Link, all_gather_bytes, all_reduce_bytes
from kllm.parallel.overlap import ALL_GATHER, REPLICATED, RING
from kllm.parallel.stripes import stripe_tokens

LOGIT_BYTES = 4  # logits are gathered in float32
SLOT_BYTES = {True: 4, False: 8}  # of an index in a selection that travels: prompts, decodes
ROUTE_BYTES = 8  # a slot int32 and its weight float32
COUNT_BYTES = 16  # two int64 numbers that announce what comes


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a request-DP group runs in one step: decodes, or a chunk of a prompt."""

    tokens: int
    cached: int = 0  # tokens of each request before these
    samples: int = 0  # rows of logits
    prefill: bool = False

    @classmethod
    def decode(cls, batch: int, context: int = 0) -> "Step":
        """One token of each of `batch` requests that have `context` tokens."""
        return cls(tokens=batch, cached=context, samples=batch)

    @classmethod
    def chunk(cls, tokens: int, cached: int = 0) -> "Step":
        """`tokens` of one prompt behind `cached` ones; its end is sampled."""
        return cls(tokens=tokens, cached=cached, samples=1, prefill=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One use of a collective, all its calls of a step together."""

    what: str
    collective: str  # a method of Communicator
    ranks: int
    calls: int
    sent_bytes: float  # by this rank, over all calls

    def seconds(self, link: Link) -> float:
        """Time on the link, nothing hidden."""
        return self.calls * link.seconds(self.sent_bytes / self.calls, self.collective)


def traffic(
    model: ModelShape,
    layout: ParallelConfig,
    step: Step,
    *,
    element_bytes: float = 2.0,
    kv_dtype: str = "bfloat16",
) -> tuple[tuple[Exchange, ...], ...]:
    """What one rank sends in a step, for each pipeline stage.

    Args:
        element_bytes: of activations.
        kv_dtype: of cached entries, which travel as they are stored.
    """
    bounds = stage_bounds(model.dims.layers, layout.pp)
    return tuple(
        tuple(
            exchange
            for exchange in _stage(model, layout, step, range(first, end), element_bytes, kv_dtype)
            if exchange.calls and exchange.ranks > 1
        )
        for first, end in pairwise(bounds)
    )


def busiest(stages: tuple[tuple[Exchange, ...], ...], link: Link) -> tuple[Exchange, ...]:
    """The stage whose exchanges take longest."""
    return max(stages, key=lambda stage: sum(exchange.seconds(link) for exchange in stage))


def expected_destinations(experts: int, experts_per_token: int, ranks: int) -> float:
    """Expected number of different ranks that a token's k experts lie on, routed uniformly.

    A rank is missed when all k of E are among the E - E/n that it does not have:
    n (1 - C(E - E/n, k) / C(E, k)).
    """
    foreign = experts - experts // ranks
    return ranks * (1 - comb(foreign, experts_per_token) / comb(experts, experts_per_token))


def _stage(
    model: ModelShape,
    layout: ParallelConfig,
    step: Step,
    layers: range,
    e: float,
    kv_dtype: str,
) -> Iterator[Exchange]:
    rows = step.tokens / layout.cp  # of one rank; its tp peers run the same
    state = rows * model.hidden * e
    first, last = layers.start == 0, layers.stop == model.dims.layers
    tp = layout.tp

    def reduce(what: str, calls: int) -> Exchange:
        return Exchange(
            what=what,
            collective="all_reduce",
            ranks=tp,
            calls=calls,
            sent_bytes=calls * all_reduce_bytes(1, tp) * state,
        )

    if first:
        yield reduce("embedding", 1)
    yield reduce("attention output", len(layers))
    # Shared and routed experts of a rank are added up before they are reduced.
    yield reduce("FFN and experts", _count((*model.ffn_layers, *model.expert_layers), layers))
    if layout.ep > 1:
        experts = _count(model.expert_layers, layers)
        yield from _dispatch(model, layout, step, rows, experts, e)
    if step.prefill:
        yield from _sequence(model, layout, step, layers, kv_dtype)
    if not last:
        sent = state * model.streams
        context = step.cached + (step.tokens if step.prefill else 1)
        if layers.stop in model.borrowing_layers and context > model.selected:
            sent += rows * model.selected * SLOT_BYTES[step.prefill]
        yield Exchange(what="stage", collective="send", ranks=layout.pp, calls=1, sent_bytes=sent)
    if last:
        logits = step.samples / (1 if step.prefill else layout.cp) * model.vocabulary * LOGIT_BYTES
        yield Exchange(
            what="logits",
            collective="all_gather",
            ranks=tp,
            calls=1,
            sent_bytes=all_gather_bytes(1, tp) * logits,
        )


def _dispatch(
    model: ModelShape, layout: ParallelConfig, step: Step, rows: float, calls: int, e: float
) -> Iterator[Exchange]:
    """Each of the tp ranks sends its share of the tokens and gets their sums back.

    Where all ranks of the group run the same tokens, the reduction over tp is all that is needed.
    """
    ep, k, backend = layout.ep, model.experts_per_token, layout.ep_backend
    if backend == "auto" and ep == layout.tp:
        return
    if backend == "auto" and not step.prefill:
        backend = "all_gather"  # fixed shapes, so that a CUDA graph can hold a decode step
    token, routing = model.hidden * e, float(k * ROUTE_BYTES)
    share = rows / layout.tp
    if backend == "all_gather":
        out, back, sent = ALL_GATHER, "reduce_scatter", share * (ep - 1)
    else:
        # A token goes once to each rank that has some of its experts, this rank left out.
        reached = expected_destinations(model.dims.experts, k, ep)
        out, back, sent = "all_to_all", "all_to_all", share * reached * (ep - 1) / ep
    messages = {"dispatch": sent * token, "routing": sent * routing, "combine": sent * token}
    if back == "all_to_all":
        messages["token counts"] = float(COUNT_BYTES * (ep - 1))
    for what, nbytes in messages.items():
        yield Exchange(
            what=what,
            collective=back if what == "combine" else out,
            ranks=ep,
            calls=calls,
            sent_bytes=calls * nbytes,
        )


def _sequence(
    model: ModelShape, layout: ParallelConfig, step: Step, layers: range, kv_dtype: str
) -> Iterator[Exchange]:
    """Foreign entries: passed on N - 1 times, or gathered once, each phase of attention apart.

    Where prompts are replicated only the new ones are foreign.
    Rows of constant state are gathered either way: the newest of the chunk, and those before each
    seam between stripes of two ranks.
    """
    cp, ring = layout.cp, layout.cp_kind == RING
    tokens = step.tokens + (0 if layout.cp_kind == REPLICATED else step.cached)
    for kind in model.attention:
        held = _count(kind.layers, layers)
        for phase in kind.phases:
            size = phase.entry_bytes[kv_dtype] / (layout.tp if phase.split_entries else 1)
            everything = tokens / phase.tokens_per_entry * size
            yield Exchange(
                what=f"{kind.name} {phase.name}",
                collective="ring_shift" if ring else ALL_GATHER,
                ranks=cp,
                calls=held * (cp - 1 if ring else 1),
                sent_bytes=held * all_gather_bytes(1, cp) * everything,
            )
    seams = step.tokens // (stripe_tokens(cp, step.tokens, model.page_granule) or step.tokens)
    for state in model.request_states:
        held = _count(state.layers, layers)
        rows = min(step.tokens, max(0, seams - 1) * state.reach + state.window)
        yield Exchange(
            what=f"{state.name} rows",
            collective=ALL_GATHER,
            ranks=cp,
            calls=held,
            sent_bytes=held * all_gather_bytes(1, cp) * rows * state.row_bytes[kv_dtype],
        )


def _count(layers: tuple[int, ...], among: range) -> int:
    return len(set(layers) & set(among))
