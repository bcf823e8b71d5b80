"""Proof of a computed KV capacity: one rank of a layout is built and its whole pool is written."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kllm.cache.pool import KVPool
from kllm.config import EngineConfig
from kllm.engine.memory import SCRATCH
from kllm.engine.rank import Rank
from kllm.engine.rank_groups import sliced_groups
from kllm.errors import CapacityError
from kllm.models.base import CausalLM
from kllm.models.devices import free_bytes
from kllm.models.load import ResolvedModel, resolve
from kllm.models.shape import model_shape
from kllm.parallel.footprint import Capacity, capacity
from kllm.parallel.layout import short_name

REQUESTS = 64  # whose constant state is set aside on each rank, at least
LONGEST = 1 << 18  # tokens a request, at most
WRITTEN_AT_ONCE = 1 << 16  # entries

UNITS = {
    "weights_gb": "GB",
    "computed_weights_gb": "GB",
    "kv_gb": "GB",
    "tokens": "tokens",
    "computed_tokens": "tokens",
    "difference_pct": "%",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A rank's memory with its pool full, beside what was computed for it."""

    layout: str
    scale: str
    kv_dtype: str
    weight_bytes: int
    kv_bytes: int
    rank_tokens: int  # in pages that were written and read back
    owners: int  # sets of ranks with requests of their own
    requests: int  # whose constant state is set aside
    computed: Capacity

    @property
    def tokens(self) -> int:
        """Over the deployment."""
        return self.rank_tokens * self.owners

    @property
    def difference(self) -> float:
        """Measured over computed tokens, less 1."""
        return self.tokens / self.computed.tokens - 1

    def row(self) -> dict[str, Any]:
        """For a series."""
        return {
            "layout": self.layout,
            "scale": self.scale,
            "kv_dtype": self.kv_dtype,
            "weights_gb": self.weight_bytes / 1e9,
            "computed_weights_gb": self.computed.heaviest.weight_bytes / 1e9,
            "kv_gb": self.kv_bytes / 1e9,
            "requests": self.requests,
            "tokens": self.tokens,
            "computed_tokens": self.computed.tokens,
            "difference_pct": 100 * self.difference,
            "fidelity": "rank-slice",
        }


def fill(config: EngineConfig) -> tuple[Filled, CausalLM]:
    """Build a rank of the layout, write and read every page and state row; free the pool.

    Returns:
        What was found, and the network, for an engine of the same layout.

    Raises:
        CapacityError: when the weights and a pool do not fit, or memory does not keep its values.
    """
    resolved = resolve(config)
    device = torch.device(resolved.device)
    before = free_bytes(device)
    longest = min(LONGEST, resolved.config.max_position_embeddings)
    requests = _requests(config, resolved, before, longest)
    config = replace(
        config,
        scale=resolved.scale,
        fidelity="rank-slice",
        max_model_len=0 if config.cache.memory_bytes else longest,
        scheduler=replace(
            config.scheduler,
            max_batch=requests,
            token_budget=max(requests, config.scheduler.token_budget),
        ),
    )
    rank = Rank(
        config, resolved, sliced_groups(config, device), number=config.slice_rank, device=device
    )
    budget = rank.budget
    rank.allocate(budget, None, config.parallel.cp_kind)
    try:
        pages = write_all(rank.pool) - SCRATCH
        kv_bytes = rank.pool.nbytes()
    finally:
        rank.close()
    found = Filled(
        layout=short_name(config.parallel),
        scale=resolved.scale,
        kv_dtype=budget.kv_dtype,
        weight_bytes=sum(p.numel() * p.element_size() for p in rank.model.parameters()),
        kv_bytes=kv_bytes,
        rank_tokens=pages * budget.page_size,
        owners=config.parallel.dp,
        requests=requests,
        computed=_computed(config, resolved, before, rank.activation_bytes),
    )
    return found, rank.model


def _requests(config: EngineConfig, resolved: ResolvedModel, free: int, longest: int) -> int:
    """How many requests of the longest length it takes to fill the memory.

    An engine makes no more pages than all its requests can use.
    """
    spec, kv_dtype = resolved.family.cache_spec(resolved.config), resolved.kv_dtype
    each = longest * spec.bytes_per_token(kv_dtype) + spec.bytes_per_request(kv_dtype)
    return max(REQUESTS, math.ceil((config.cache.memory_bytes or free) / each))


def _computed(
    config: EngineConfig, resolved: ResolvedModel, free: int, activations: int
) -> Capacity:
    """The capacity of the layout with the memory that the rank had."""
    shape = model_shape(resolved.family, resolved.config)
    options: dict[str, Any] = {
        "dtype": resolved.dtype,
        "kv_dtype": resolved.kv_dtype,
        "requests": config.scheduler.max_batch,
    }
    bare = capacity(shape, config.parallel, memory_bytes=free, fraction=1.0, **options)
    weights = bare.heaviest.weight_bytes
    if config.cache.memory_bytes:
        memory, reserve = float(weights + config.cache.memory_bytes), 0.0
    else:
        # What the engine leaves: activations, and a share of the memory beside weights and them.
        memory = float(free)
        spare = 1 - config.cache.memory_fraction
        reserve = activations + spare * (free - weights - activations)
    return capacity(
        shape,
        config.parallel,
        memory_bytes=memory,
        fraction=1.0,
        reserve_bytes=reserve,
        **options,
    )


@torch.inference_mode()
def write_all(pool: KVPool) -> int:
    """Write every entry of every state with its own values, then read all of them back.

    Returns:
        Pages that hold what was written.

    Raises:
        CapacityError: when an entry holds something else.
    """
    for name, layer, slots, values in _entries(pool):
        pool.write(name, layer, slots, values)
    for name, layer, slots, values in _entries(pool):
        if not torch.equal(
            pool.read(name, layer, slots), pool.unpack(name, pool.pack(name, values))
        ):
            raise CapacityError(
                f"KV memory of state '{name}' in layer {layer} does not keep what is written to "
                "it; the device or its driver is faulty"
            )
    return pool.num_pages


def _entries(pool: KVPool) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """(state, layer, slots [n], values [n, heads, channels] or [n, channels]) of the whole pool."""
    for paged in pool.spec.paged:
        for layer in paged.layers:
            store = pool.pages(paged.name, layer)
            yield from _parts(paged.name, layer, store, (paged.heads, paged.entry.width), pool)
    for ring in pool.spec.rings:
        for layer in ring.layers:
            store = pool.rings(ring.name, layer)
            width = ring.entry.width if ring.entry else ring.width
            yield from _parts(ring.name, layer, store, (width,), pool)


def _parts(
    name: str, layer: int, store: Tensor, shape: tuple[int, ...], pool: KVPool
) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    generator = torch.Generator(store.device).manual_seed(layer)
    total = store.shape[0] * store.shape[1]
    for first in range(0, total, WRITTEN_AT_ONCE):
        last = min(first + WRITTEN_AT_ONCE, total)
        slots = torch.arange(first, last, device=store.device)
        values = torch.empty(len(slots), *shape, dtype=pool.compute_dtype, device=store.device)
        yield name, layer, slots, values.normal_(generator=generator)
