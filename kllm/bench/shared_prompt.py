"""One prompt on context-parallel ranks, a step at a time, wherever in the prompt one likes.

The ranks are built once. `arrange` gives them KV memory for one kind of context parallelism and
one length of prompt, full of random entries; a step there is a step of the engine, as the last of
a prompt's steps would be after all those before it had run.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kllm.bench.prompt_time import Cost, Place
from kllm.bench.timing import timed
from kllm.cache.spec import CacheSpec
from kllm.config import EngineConfig
from kllm.core import Plan, Request, SamplingParams
from kllm.engine.executor import DeviceExecutor
from kllm.engine.multi_rank import MultiRankExecutor
from kllm.engine.rank import DeviceMemory
from kllm.engine.rank_pool import RankPool
from kllm.engine.sliced import SlicedExecutor
from kllm.models.load import ResolvedModel
from kllm.models.shape import model_shape
from kllm.parallel import layout
from kllm.parallel.emulated import EmulatedComm
from kllm.parallel.link import Link
from kllm.parallel.overlap import ALL_GATHER, REPLICATED, RING
from kllm.parallel.stripes import Stripes

KINDS = (RING, ALL_GATHER, REPLICATED)
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


@dataclass(frozen=True, slots=True)
class Need:
    """KV bytes that one prompt takes while it is computed."""

    typical: float  # on each rank but the owner
    owner: float  # on the rank that decodes the request afterwards


class SharedPrompt:
    """A prompt's steps on the ranks of `config.parallel`.

    Args:
        config: of a layout with context parallelism; its token budget is the length of a step.
        pool: processes for ranks that really run.

    Raises:
        ConfigError, CapacityError: the layout does not suit the model, or weights do not fit.
    """

    def __init__(
        self, config: EngineConfig, resolved: ResolvedModel, pool: RankPool | None
    ) -> None:
        layout.check(model_shape(resolved.family, resolved.config).dims, config.parallel)
        self.chunk = config.scheduler.token_budget
        self.spec: CacheSpec = resolved.family.cache_spec(resolved.config)
        self.kv_dtype, self.device = resolved.kv_dtype, resolved.device
        self._vocab_size: int = resolved.config.vocab_size
        self._links: list[EmulatedComm] = []
        self._cp: EmulatedComm | None = None
        self._slice: SlicedExecutor | None = None
        self.ranks: DeviceExecutor
        self.rank = 0  # the context-parallel rank that is here, where ranks are sliced
        if config.fidelity == "rank-slice":
            self.ranks = self._slice = SlicedExecutor(config, resolved)
            self.rank = layout.place(config.parallel, config.slice_rank).cp
            found = self._slice.groups
            every = (found.attn, found.ffn, found.vocab, found.ep, found.cp, found.pp)
            self._links = [comm for comm in every if isinstance(comm, EmulatedComm)]
            assert isinstance(found.cp, EmulatedComm)
            self._cp = found.cp
            self._cp.watched = True
        else:
            self.ranks = MultiRankExecutor(config, resolved, pool)
        stripes = self.ranks.sharing.stripes
        assert stripes is not None, "the layout has no context parallelism"
        self.stripes: Stripes = stripes
        self._tokens, self._kind = 0, ""
        self._steps = 0

    @property
    def owner(self) -> int:
        """The rank that decodes the prompt: not the one that is here, as most ranks are not."""
        return (self.rank - 1) % self.stripes.ranks

    def stand_for(self, rank: int) -> None:
        """Run the steps of another context-parallel rank of a slice; `arrange` has to follow."""
        assert self._slice is not None, "ranks that all run are themselves"
        self._slice.stand_for(rank)
        self.rank = rank

    def pages(self, kind: str, tokens: int) -> list[int]:
        """Pages that a prompt takes on each context-parallel rank."""
        page = self.ranks.sharing.budget.page_size
        held = [tokens] * self.stripes.ranks
        if kind != REPLICATED:
            held = [self.stripes.count(rank, tokens) for rank in range(self.stripes.ranks)]
            held[self.owner] = tokens
        return [max(1, -(-count // page)) for count in held]

    def need(self, kind: str, tokens: int) -> Need:
        """KV bytes that a prompt takes."""
        page = self.ranks.sharing.budget.page_size * self.spec.bytes_per_token(self.kv_dtype)
        state = self.spec.bytes_per_request(self.kv_dtype)
        counts = self.pages(kind, tokens)
        owned = counts.pop(self.owner)
        return Need(max(counts) * page + state, owned * page + state)

    def arrange(self, kind: str, tokens: int) -> None:
        """Give the ranks memory for prompts of up to `tokens` tokens."""
        self._kind, self._tokens = kind, tokens
        self.ranks.arrange(self.pages(kind, tokens), kind=kind, tokens=tokens)

    def run(self, place: Place, link: Link | None = None) -> Cost:
        """Run one step and measure it.

        Args:
            link: that the transfers of a slice take; None: real ones.
        """
        for comm in self._links:
            comm.link = link or comm.link
        plans = [self._plan(place)]
        self.ranks.settle()
        before = self._cp.busy_s if self._cp else 0.0
        memory: list[DeviceMemory] = []

        def step() -> None:
            self.ranks.execute(plans)
            memory.extend(self.ranks.settle())

        seconds = timed(step, "cpu")  # the host's clock: `settle` ends with the last device
        passing: float = max(found.passing for found in memory)
        if not self.device.startswith("cuda"):
            passing = buffer_bytes(self.spec, self.stripes, self._kind, place, self.kv_dtype)
        return Cost(
            seconds=seconds,
            exposed_s=self._cp.take_exposed_s() if self._cp else 0.0,
            transfer_s=self._cp.busy_s - before if self._cp else 0.0,
            passing_bytes=passing,
        )

    def free_bytes(self) -> int:
        """Memory that new tensors can take on the rank that has least, pools not counted."""
        return min(found.free for found in self.ranks.settle())

    def close(self) -> None:
        """Give memory and processes back."""
        self.ranks.close()

    def _plan(self, place: Place) -> Plan:
        self._steps += 1
        length = place.end - place.start
        counts = self.pages(self._kind, self._tokens)
        tables = np.zeros((self.stripes.ranks, 1, max(counts)), np.int32)
        for rank, count in enumerate(counts):
            tables[rank, 0, :count] = np.arange(count)
        rng = np.random.default_rng(self._steps)
        request = Request(id=f"prompt-{self._steps}", prompt_ids=(), params=GREEDY)
        return Plan(
            step=self._steps,
            num_decodes=0,
            rows=np.zeros(1, np.int32),
            query_lens=np.array([length], np.int32),
            context_lens=np.array([place.end], np.int32),
            token_ids=rng.integers(0, self._vocab_size, length),
            positions=np.arange(place.start, place.end),
            block_tables=tables[self.owner],
            samples=np.array([place.last]),
            requests=(request,),
            owners=np.array([self.owner], np.int32),
            shard_tables=tables,
        )


def buffer_bytes(
    spec: CacheSpec, stripes: Stripes, kind: str, place: Place, kv_dtype: str
) -> float:
    """Bytes of what is sent and received in a step, of the state that has most; computed.

    A ring has two blocks, each as long as the longest shard. Gathering has what a rank sends, what
    it receives, and that in order: all of the prompt, or the new entries where it is replicated.
    """
    sizes: Mapping[str, float] = {
        state.name: state.heads * state.entry.nbytes(kv_dtype) / state.tokens_per_entry
        for state in spec.paged
    }
    ranks = range(stripes.ranks)
    if kind == RING:
        tokens = 2 * max(stripes.count(rank, place.end) for rank in ranks)
    else:
        start = place.start if kind == REPLICATED else 0
        own = [stripes.count(rank, place.end) - stripes.count(rank, start) for rank in ranks]
        tokens = (1 + stripes.ranks) * max(own) + sum(own)
    return tokens * max(sizes.values())
