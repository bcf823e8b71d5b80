"""Routing traces: how many tokens chose each expert, step by step. Counted, or drawn by Zipf."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from kllm.bench.base import Context
from kllm.bench.serve_loop import ServingEngine
from kllm.bench.workloads import Workload
from kllm.core import SamplingParams
from kllm.engine.engine import Engine
from kllm.errors import ConfigError
from kllm.layers.experts import RoutingCounts
from kllm.layers.moe import MoE
from kllm.models.base import Groups
from kllm.models.load import load_model, resolve

SLOTS = 64  # requests that run at once, of a workload that does not say


@dataclass(frozen=True, slots=True)
class Trace:
    """The choices of some steps.

    Attributes:
        layers: of the model.
        counts: [steps, layers, E] tokens that chose each expert.
    """

    layers: tuple[int, ...]
    counts: NDArray[np.int64]

    @property
    def num_experts(self) -> int:
        """E: routed experts of a layer."""
        return int(self.counts.shape[2])

    def halves(self) -> "tuple[Trace, Trace]":
        """The steps up to half of all choices, and those after them.

        Raises:
            ConfigError: there are less than two steps.
        """
        if len(self.counts) < 2:
            raise ConfigError("a trace of one step has no second half; use a longer workload")
        made = self.counts.sum(axis=(1, 2)).cumsum()
        cut = int(np.abs(made[:-1] - made[-1] / 2).argmin()) + 1
        return Trace(self.layers, self.counts[:cut]), Trace(self.layers, self.counts[cut:])

    def totals(self) -> NDArray[np.int64]:
        """[layers, E] over all steps."""
        total: NDArray[np.int64] = self.counts.sum(axis=0)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Zipf:
    """Popularity of experts by rank r: in proportion to r ** -exponent."""

    exponent: float
    tokens: int = 1 << 15
    step_tokens: int = 512

    def __post_init__(self) -> None:
        if not 0 < self.exponent < 100:  # also NaN
            raise ConfigError(f"a Zipf exponent lies between 0 and 100, got {self.exponent}")

    def __str__(self) -> str:
        return f"zipf:{self.exponent:g}"

    @classmethod
    def parse(cls, text: str) -> "Zipf":
        """Read "zipf:1.0".

        Raises:
            ConfigError: anything else.
        """
        kind, _, exponent = text.partition(":")
        try:
            if kind == "zipf":
                return cls(exponent=float(exponent))
        except ValueError:
            pass
        raise ConfigError(f"unknown trace '{text}'; write real, or zipf:EXPONENT as in zipf:1.0")

    def draw(self, experts: int, top_k: int, seed: int) -> Trace:
        """A trace of one layer: `top_k` distinct experts a token, which experts are popular random.

        Source: Gumbel top-k, which draws one after the other without replacement (Vieira 2014).
        """
        rng = np.random.default_rng(seed)
        logits = -self.exponent * np.log1p(rng.permutation(experts))
        steps = []
        for _ in range(self.tokens // self.step_tokens):
            keys = logits + rng.gumbel(size=(self.step_tokens, experts))
            chosen = np.argpartition(keys, -top_k, axis=1)[:, -top_k:]
            steps.append(np.bincount(chosen.ravel(), minlength=experts))
        return Trace((0,), np.array(steps)[:, None])


@dataclass(frozen=True, slots=True)
class Counted:
    """An engine on one rank that counts its model's choices."""

    engine: ServingEngine
    counters: Mapping[int, RoutingCounts]

    def run(self, load: Workload) -> Trace:
        """Run every request of a workload as soon as there is room: times play no part."""
        for item in load.items(self.engine.vocab_size):
            params = SamplingParams(max_tokens=item.max_tokens, temperature=0.0, ignore_eos=True)
            self.engine.add(item.prompt_ids, params)
        seen = [self._read()]
        while self.engine.has_work:
            self.engine.step()
            seen.append(self._read())
        return Trace(tuple(self.counters), np.diff(np.array(seen), axis=0))

    def _read(self) -> list[list[int]]:
        return [counter.read() for counter in self.counters.values()]


@contextmanager
def counted_engine(ctx: Context, load: Workload) -> Iterator[Counted]:
    """The context's model on one rank, with room for a workload.

    Raises:
        ConfigError, CapacityError: the model cannot be run.
    """
    resolved = resolve(ctx.config)
    device, dtype = torch.device(resolved.device), getattr(torch, resolved.dtype)
    model = load_model(resolved, device=device, dtype=dtype, groups=Groups.single())
    counters = {
        int(name.split(".")[1]): module.count_routing()  # of "layers.N.ffn"
        for name, module in model.named_modules()
        if isinstance(module, MoE)
    }
    # A captured step is padded, and the padding would be counted. The scale is that of the model:
    # now that it lies in memory, `auto` would choose a smaller one.
    config = replace(ctx.config, graphs=False, scale=resolved.scale)
    inner = replace(ctx, config=config, make_engine=lambda config: Engine(config, model=model))
    with inner.engine(max_batch=load.concurrency or SLOTS, max_tokens=load.max_tokens) as engine:
        yield Counted(engine, counters)
