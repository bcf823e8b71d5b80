"""When a context-parallel ring hides its transfers, and when gathering is the faster way.

N ranks share T new tokens of a prompt behind P cached ones. On a ring each rank keeps the queries
of its T/N rows and passes on blocks of (T+P)/N tokens: a step computes on one block while the next
arrives. Gathering moves all T+P at once, and nothing is computed meanwhile. Both keep a rank's
share of the entries only. Where prompts are replicated, the P cached ones are on every rank
already, and the entries of the T new tokens are all that is gathered.

With H query heads, G KV heads, head size D, e bytes an element, C operations and B bytes a second:

    compute of a step   4 (T/N) ((T+P)/N) H D / C      half of it under a causal mask without P
    pass-KV sends       2 ((T+P)/N) G D e              hidden when T/N >= C G e / (2 H B)
    pass-Q sends        (T/N) H D e                    hidden when (T+P)/N >= C e / (4 B);
                                                       fewer bytes when T / (T+P) < 2 G / H
    all-gather sends    (N-1)/N of 2 (T+P) G D e       in one call, never hidden
    replicated sends    (N-1)/N of 2 T G D e           likewise, for N times the memory

A ring sends as many bytes as all-gather: it hides them, and pays for it with N - 1 more calls and
with what every row carries from block to block: the softmax state, and its selection.

Sources: Liu et al. 2023 (Ring Attention); Yang et al. 2024 (arXiv 2411.01783), pass-KV and pass-Q.
For latent, sparse and compressed attention the same is worked out from what a pair of query and
entry costs (`Phase`). Times are floors at the stated rates: fidelity "modelled".
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kllm.parallel.link import Link, all_gather_bytes

RING, ALL_GATHER, REPLICATED = "ring", "all_gather", "replicated"
# Bytes of memory traffic for each entry a row has selected, and block: counted from what selecting
# over several blocks does beside scoring them (`kllm.attention.ring_selection`), not measured.
PICK_BYTES = 68.0
# What one more block costs at least, measured there: launches from Python.
BLOCK_CALL_S = 75e-6
# What block attention of whole layers reaches of the matmul rate; the kernel alone reaches more.
ACHIEVED = 0.6
GRID = 8  # points a doubling when a range is searched for crossings
BISECTIONS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One pass of attention over the entries of a prompt. Unsplit; operations are FLOPs.

    `pair_flops` is paid for each query row and visible entry, `pick_flops` for each row and entry
    that it has selected (at most `picks`), `entry_flops` once for each entry on each rank,
    `row_bytes` of memory traffic for each row and block: what a row carries from block to block.
    """

    name: str
    entry_bytes: Mapping[str, float]  # of one entry, as it is stored and travels, by KV dtype
    tokens_per_entry: int = 1
    pair_flops: float = 0.0
    pick_flops: float = 0.0
    picks: int = 0
    query_width: int  # elements of a row's queries of all heads, which pass-Q would send
    entry_flops: float = 0.0
    row_bytes: float = 0.0
    split_entries: bool = False  # whether TP cuts the entries by heads
    split_work: bool = True  # whether TP cuts the work by heads


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseHeads:
    """Heads of attention to every key of a block, as the block kernel sees them."""

    heads: int
    kv_heads: int
    dim: int  # channels of a query and of a key
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The attention of some layers: phases run one after the other, each a round of the ring.

    Where `other_form` is set it has equal results, and each chunk takes the cheaper of the two.
    """

    name: str
    layers: tuple[int, ...]
    phases: tuple[Phase, ...]
    other_form: Phase | None = None  # of the last phase
    dense: DenseHeads | None = None  # None: only selected or compressed keys are attended to


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a chunk runs on."""

    ranks: int  # N, context-parallel
    flops: float  # C: operations a second that the block kernel reaches
    link: Link
    tp: int = 1
    kv_dtype: str = "bfloat16"  # of the entries: they travel as they are stored
    call_s: float = 0.0  # what one more block costs: launches and merging
    memory_bytes_per_s: float = math.inf  # for what rows carry from block to block


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """Tokens of a prompt that run in one step."""

    new: int  # T
    cached: int = 0  # P

    @property
    def visible(self) -> float:
        """Share of all (row, token) pairs that the causal mask leaves: 1/2 without a prefix."""
        return (self.cached + self.new / 2) / (self.cached + self.new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Floors of one or more layers' attention over one or more chunks, in seconds."""

    ring: float = 0.0
    all_gather: float = 0.0
    replicated: float = 0.0
    compute: float = 0.0  # of any
    ring_transfer: float = 0.0  # what the ring has under way, hidden or not

    def __add__(self, other: "Times") -> "Times":
        return Times(
            ring=self.ring + other.ring,
            all_gather=self.all_gather + other.all_gather,
            replicated=self.replicated + other.replicated,
            compute=self.compute + other.compute,
            ring_transfer=self.ring_transfer + other.ring_transfer,
        )

    def times(self, count: int) -> "Times":
        """`count` times as long."""
        return Times(
            ring=self.ring * count,
            all_gather=self.all_gather * count,
            replicated=self.replicated * count,
            compute=self.compute * count,
            ring_transfer=self.ring_transfer * count,
        )

    @property
    def best(self) -> str:
        """The sharded kind that takes less time; the ring on a tie: its buffers are smaller."""
        return RING if self.ring <= self.all_gather else ALL_GATHER


def pass_q_share(phase: Phase, setting: Setting) -> float:
    """Share of new tokens, T / (T+P), below which pass-Q sends fewer bytes than pass-KV.

    What a token's entries take over what its queries take: 2 G / H for grouped heads. Not counted
    are partial outputs, which have to travel back to the ranks that own the rows. At 1, every step
    of a prompt would send less.
    """
    # Queries are never packed: they travel in the 16 bits that packed entries are computed in.
    element = 4 if setting.kv_dtype == "float32" else 2
    query = phase.query_width * element / (setting.tp if phase.split_work else 1)
    return min(1.0, _entry_bytes(phase, setting) / phase.tokens_per_entry / query)


def hiding_rows(
    phase: Phase, *, block_tokens: float, setting: Setting, visible: float = 1.0
) -> float:
    """New tokens a rank (T/N) from which a ring step of `phase` hides its transfer.

    Solves compute(T/N) >= latency + bytes / B for blocks of (T+P)/N = `block_tokens` tokens. For a
    phase without selection and expansion the block length cancels (latency aside).

    Returns:
        0 when expanding the entries alone takes as long; infinity when rows add no work.
    """
    split = setting.tp if phase.split_work else 1
    entries = block_tokens / phase.tokens_per_entry
    hop = setting.link.seconds(_entry_bytes(phase, setting) * entries, "ring_shift")
    wanted = hop * setting.flops
    wanted -= entries * phase.entry_flops / split
    row = _row_flops(phase, entries * setting.ranks, visible) / setting.ranks / split
    if wanted <= 0:
        return 0.0
    return wanted / row if row else math.inf


def hiding_bandwidth(phase: Phase, chunk: PromptChunk, setting: Setting) -> float:
    """Bytes a second from which a ring step of `phase` hides its transfer; latency as the link's.

    Returns:
        Infinity when latency alone takes as long as the step's computation.
    """
    compute, entries = _block(phase, chunk, setting)
    left = compute - setting.link.latency_s
    return _entry_bytes(phase, setting) * entries / left if left > 0 else math.inf


def predict(attention: AttentionShape, chunk: PromptChunk, setting: Setting) -> Times:
    """The kinds' times of one layer's attention on one chunk."""
    *first, last = attention.phases
    forms = [last] if attention.other_form is None else [last, attention.other_form]
    # The cheaper form of all ranks' blocks together, as a chunk's attention chooses it.
    cheaper = min(forms, key=lambda form: _block(form, chunk, setting)[0])
    return sum((_phase_times(phase, chunk, setting) for phase in (*first, cheaper)), Times())


def predict_prompt(
    attention: tuple[AttentionShape, ...],
    setting: Setting,
    *,
    tokens: int,
    chunk_tokens: int | None = None,
    cached: int = 0,
) -> Times:
    """The kinds' times of all layers' attention on a prompt.

    Args:
        tokens: new ones.
        chunk_tokens: of a step; None: all in one.
        cached: tokens of a prefix that is already there.
    """
    total = Times()
    for chunk in prompt_chunks(tokens, chunk_tokens or tokens, cached):
        for kind in attention:
            total += predict(kind, chunk, setting).times(len(kind.layers))
    return total


def prompt_chunks(tokens: int, chunk_tokens: int, cached: int = 0) -> Iterator[PromptChunk]:
    """The steps of a prompt."""
    for start in range(0, tokens, chunk_tokens):
        yield PromptChunk(new=min(chunk_tokens, tokens - start), cached=cached + start)


def choose_cp_kind(
    attention: tuple[AttentionShape, ...],
    setting: Setting,
    *,
    tokens: int,
    chunk_tokens: int | None = None,
    cached: int = 0,
) -> str:
    """The sharded kind with less predicted time. Arguments as `predict_prompt`."""
    times = predict_prompt(
        attention, setting, tokens=tokens, chunk_tokens=chunk_tokens, cached=cached
    )
    return times.best


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where the sharded kind that takes less time changes."""

    at: float
    below: str
    above: str


def crossings(times: Callable[[float], Times], low: float, high: float) -> tuple[Crossing, ...]:
    """Where in [low, high] the better kind changes as a variable grows.

    Args:
        times: of the variable: prompt tokens, bytes a second, ...

    Returns:
        All changes that a grid of GRID points a doubling can tell apart, each refined.
    """
    points = max(2, math.ceil(math.log2(high / low) * GRID) + 1)
    grid = [low * (high / low) ** (i / (points - 1)) for i in range(points)]
    bests = [times(x).best for x in grid]
    found = []
    for i in range(points - 1):
        if bests[i] == bests[i + 1]:
            continue
        a, b = grid[i], grid[i + 1]
        for _ in range(BISECTIONS):
            middle = (a + b) / 2
            a, b = (middle, b) if times(middle).best == bests[i] else (a, middle)
        found.append(Crossing(b, bests[i], bests[i + 1]))
    return tuple(found)


def _phase_times(phase: Phase, chunk: PromptChunk, setting: Setting) -> Times:
    """Floors of one round.

    Ring: N steps of computing and N - 1 transfers, each beside a step. Otherwise one transfer,
    of all entries or of the new ones, then the same computation in one call.
    """
    n = setting.ranks
    compute, entries = _block(phase, chunk, setting)
    size = _entry_bytes(phase, setting)
    hop = setting.link.seconds(size * entries, "ring_shift") if n > 1 else 0.0
    split = setting.tp if phase.split_work else 1
    carried = chunk.new / n * phase.row_bytes / split / setting.memory_bytes_per_s
    step = compute + setting.call_s + carried
    at_once = n * compute + setting.call_s + carried

    def gather(count: float) -> float:
        sent = all_gather_bytes(count * size, n)
        return setting.link.seconds(sent, ALL_GATHER) if n > 1 else 0.0

    return Times(
        ring=(n - 1) * max(step, hop) + step,
        all_gather=gather(n * entries) + at_once,
        replicated=gather(chunk.new / phase.tokens_per_entry) + at_once,
        compute=n * compute,
        ring_transfer=(n - 1) * hop,
    )


def _block(phase: Phase, chunk: PromptChunk, setting: Setting) -> tuple[float, float]:
    """(seconds of computing on one block, its entries)."""
    n = setting.ranks
    split = setting.tp if phase.split_work else 1
    entries = (chunk.new + chunk.cached) / phase.tokens_per_entry
    rows = chunk.new / n
    flops = rows * _row_flops(phase, entries, chunk.visible) + entries * phase.entry_flops
    return flops / n / split / setting.flops, entries / n


def _row_flops(phase: Phase, entries: float, visible: float) -> float:
    """Operations of one query row on all entries of the prompt so far."""
    picks = min(phase.picks, entries * visible)
    return entries * visible * phase.pair_flops + picks * phase.pick_flops


def _entry_bytes(phase: Phase, setting: Setting) -> float:
    return phase.entry_bytes[setting.kv_dtype] / (setting.tp if phase.split_entries else 1)
