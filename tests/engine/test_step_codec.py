"""Steps come out of the codec as they went in, and few bytes say what a decode step needs."""

from dataclasses import fields, replace

import numpy as np
import pytest

from kllm.config import ParallelConfig
from kllm.core import Plan, Request, SamplingParams
from kllm.engine.step import MicroStep, steps_of
from kllm.engine.step_codec import StepCodec
from kllm.parallel.stripes import Stripes

PAGE = 4
ROWS, PAGES = 12, 40


class Load:
    """Requests that come, grow by chunks or single tokens, and go, on `ranks` CP ranks."""

    def __init__(self, seed: int, ranks: int = 1) -> None:
        self.rng = np.random.default_rng(seed)
        self.ranks = ranks
        self.lengths: dict[int, int] = {}  # tokens by state row
        self.tables = np.zeros((ranks, ROWS, PAGES), np.int32)
        self.owners = np.zeros(ROWS, np.int32)
        self.step = 0

    def plan(self, *, same: bool = False) -> Plan | None:
        """The next step; `same`: every request decodes."""
        rng = self.rng
        if not same:
            for row in [row for row in self.lengths if rng.random() < 0.2]:
                del self.lengths[row]
            for row in range(ROWS):
                if row not in self.lengths and rng.random() < 0.2:
                    self.lengths[row] = 0
                    self.tables[:, row], self.owners[row] = 0, rng.integers(self.ranks)
        if not self.lengths:
            return None
        decodes = [row for row, length in self.lengths.items() if length]
        chunks = [row for row, length in self.lengths.items() if not length]
        rows = np.array(decodes + chunks, np.int32)
        sizes = [1] * len(decodes) + sorted(int(rng.integers(1, 30)) for _ in chunks)
        starts = np.array([self.lengths[row] for row in rows.tolist()])
        ends = starts + sizes
        self.lengths |= dict(zip(rows.tolist(), ends.tolist(), strict=True))
        for row, end in self.lengths.items():
            count = -(-end // PAGE)
            fresh = self.tables[:, row, :count] == 0
            self.tables[:, row, :count][fresh] = rng.integers(1, 9999, int(fresh.sum()))
        width = -(-int(ends.max()) // PAGE)
        shards = self.tables[:, rows, :width]
        spans = list(zip(starts.tolist(), ends.tolist(), strict=True))
        self.step += 1
        return Plan(
            step=self.step,
            num_decodes=sizes.count(1) if self.ranks == 1 else len(decodes),
            rows=rows,
            query_lens=np.array(sizes, np.int32),
            context_lens=ends.astype(np.int32),
            token_ids=rng.integers(0, 99, sum(sizes)),
            positions=np.concatenate([np.arange(a, b) for a, b in spans]),
            block_tables=shards[self.owners[rows], np.arange(len(rows))],
            samples=np.array([True] * len(decodes) + [rng.random() < 0.5 for _ in chunks]),
            requests=tuple(Request(str(row), (), SamplingParams()) for row in rows.tolist()),
            owners=self.owners[rows] if self.ranks > 1 else None,
            shard_tables=shards if self.ranks > 1 else None,
        )


def assert_same(got: MicroStep, want: MicroStep) -> None:
    assert (got.peer_tokens, got.decode_only) == (want.peer_tokens, want.decode_only)
    assert got.width == want.width
    np.testing.assert_array_equal(got.sampled, want.sampled)
    if want.plan is None or got.plan is None:
        assert got.plan is want.plan
        return
    for part in fields(Plan):
        ours, theirs = getattr(got.plan, part.name), getattr(want.plan, part.name)
        if isinstance(theirs, np.ndarray):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.dtype == theirs.dtype
            assert ours.flags.writeable, "torch warns of memory that it must not write to"
        elif part.name != "requests":
            assert ours == theirs


@pytest.mark.parametrize("layout", [ParallelConfig(pp=3), ParallelConfig(cp=2)], ids=["pp", "cp"])
def test_a_rank_gets_the_steps_that_were_sent(layout: ParallelConfig) -> None:
    """Requests come and go, decode in between, and block tables grow."""
    load, ours, theirs = Load(0, layout.cp), StepCodec(), StepCodec()
    stripes = Stripes(layout.cp, PAGE) if layout.cp > 1 else None
    micro_batches = 0
    for count in range(200):
        plan = None if count % 17 == 0 else load.plan(same=count % 4 > 1)
        (micro,) = steps_of([plan], layout, stripes) if plan else (IDLE,)
        micro_batches = max(micro_batches, len(micro))
        found = theirs.unpack(ours.pack(micro))
        for got, want in zip(found, micro, strict=True):
            assert_same(got, want)
    assert micro_batches == layout.pp


IDLE = (MicroStep(None, np.zeros(0, np.int64), (1, 1), True, 1),)


def decodes(count: int, width: int, step: int) -> tuple[MicroStep, ...]:
    one = np.ones(count, np.int32)
    plan = Plan(
        step=step,
        num_decodes=count,
        rows=np.arange(count, dtype=np.int32),
        query_lens=one,
        context_lens=one * (width * PAGE - 10 + step),
        token_ids=np.arange(count),
        positions=np.full(count, width * PAGE - 11 + step),
        block_tables=np.arange(count * width, dtype=np.int32).reshape(count, width),
        samples=one.astype(np.bool_),
    )
    return steps_of([plan], ParallelConfig(), None)[0]


def test_long_contexts_do_not_make_a_decode_step_longer() -> None:
    for width in (8, 800):
        codec = StepCodec()
        first, *rest = (len(codec.pack(decodes(16, width, step))) for step in range(3))
        assert first > 16 * width * 4, "the block tables are sent once"
        assert max(rest) < 16 * (4 + 8 + 8) + 100, "lengths, tokens and positions"


def test_only_new_pages_are_sent_of_those_who_stay() -> None:
    """One request of sixteen leaves: nobody's pages are sent again."""
    ours, theirs = StepCodec(), StepCodec()
    theirs.unpack(ours.pack(decodes(16, 800, 0)))
    (step,) = decodes(16, 800, 1)
    assert step.plan is not None
    kept = {
        part.name: value[1:]
        for part in fields(Plan)
        if isinstance(value := getattr(step.plan, part.name), np.ndarray)
    }
    step = replace(step, plan=replace(step.plan, num_decodes=15, **kept), sampled=np.arange(15))
    data = ours.pack([step])
    assert len(data) < 1000
    assert_same(theirs.unpack(data)[0], step)
