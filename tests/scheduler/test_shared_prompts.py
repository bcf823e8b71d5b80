"""Scheduling for ranks that share prompts: what each rank must hold is in pages of its own."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.config import SchedulerConfig
from kllm.core import Plan, Request, SamplingParams, Status
from kllm.parallel.stripes import Stripes
from kllm.scheduler.placement import least_loaded
from kllm.scheduler.scheduler import Scheduler
from tests.scheduler.driver import next_token

PAGE, PAGES = 4, 24


def make(ranks: int, sharded: bool, budget: int = 12, batch: int = 4) -> Scheduler:
    return Scheduler(
        SchedulerConfig(max_batch=batch, token_budget=budget),
        num_pages=PAGES,
        page_size=PAGE,
        max_model_len=PAGES * PAGE,
        stripes=Stripes(ranks, PAGE),
        sharded=sharded,
    )


class Cells:
    """What every rank's pages hold: token by token, as a network would write and read them."""

    def __init__(self, scheduler: Scheduler, ranks: int, sharded: bool) -> None:
        self.stripes, self.sharded = Stripes(ranks, PAGE), sharded
        self.cells = np.full((ranks, PAGES * PAGE), -1, np.int64)
        self.scheduler = scheduler

    def run(self, plan: Plan) -> list[int]:
        """Write the plan's tokens on the ranks that keep them; read contexts back to answer."""
        assert plan.owners is not None
        assert plan.shard_tables is not None
        tokens, at = [], 0
        for b, length in enumerate(plan.query_lens.tolist()):
            new, end = plan.token_ids[at : at + length], int(plan.context_lens[b])
            at += length
            owner = int(plan.owners[b])
            decodes = b < plan.num_decodes
            for position, token in zip(range(end - length, end), new.tolist(), strict=True):
                for rank in range(len(self.cells)):
                    place = position
                    if rank != owner:
                        if decodes:
                            continue
                        if self.sharded:
                            if self.stripes.rank_of(np.array([position]))[0] != rank:
                                continue
                            place = int(self.stripes.local(np.array([position]))[0])
                    self.cells[rank, self._slot(plan, rank, b, place)] = token
            if plan.samples[b]:
                known = [self.cells[owner, self._slot(plan, owner, b, p)] for p in range(end)]
                tokens.append(next_token([int(token) for token in known]))
        return tokens

    def _slot(self, plan: Plan, rank: int, b: int, place: int) -> int:
        assert plan.shard_tables is not None
        return int(plan.shard_tables[rank, b, place // PAGE]) * PAGE + place % PAGE


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(2, 4),
    sharded=st.booleans(),
    sizes=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(0, 1)),
        min_size=1,
        max_size=8,
    ),
    data=st.data(),
)
def test_owners_read_what_was_written(
    ranks: int, sharded: bool, sizes: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """Whatever is preempted or aborted in the middle of a prompt that ranks share."""
    scheduler = make(ranks, sharded)
    cells = Cells(scheduler, ranks, sharded)
    waiting = [
        Request(
            f"r{i}",
            list(range(i, i + n)),
            SamplingParams(max_tokens=m, ignore_eos=True),
            priority=priority,
        )
        for i, (n, m, priority) in enumerate(sizes)
    ]
    everyone = list(waiting)
    for _ in range(2000):
        while waiting and data.draw(st.booleans()):
            scheduler.add(waiting.pop())
        plan = scheduler.schedule()
        if plan is None:
            if not waiting:
                break
            scheduler.add(waiting.pop())
            continue
        scheduler.check()
        scheduler.update(plan, np.array(cells.run(plan), np.int64))
        scheduler.check()
        alive = [r for r in plan.requests if r.status is Status.RUNNING]
        if alive and data.draw(st.integers(0, 9)) == 0:
            scheduler.abort(data.draw(st.sampled_from(alive)))
            scheduler.check()
    assert scheduler.free_pages == ranks * PAGES
    assert scheduler.rows.free == scheduler.config.max_batch
    for request in everyone:
        assert request.status is Status.FINISHED
        known = list(request.prompt_ids)
        for token in request.output_ids:
            assert token == next_token(known)
            known.append(token)


def test_sharded_prompts_fit_where_replicated_ones_do_not() -> None:
    """Two prompts of two thirds of a rank's pages: each has an owner, the rest is stripes."""

    def admitted(sharded: bool) -> int:
        scheduler = make(2, sharded, budget=200, batch=4)
        for i in range(2):
            prompt = [1] * (PAGES * PAGE * 5 // 8)
            scheduler.add(Request(f"r{i}", prompt, SamplingParams(max_tokens=2)))
        scheduler.schedule()
        return scheduler.num_running

    assert admitted(sharded=True) == 2
    assert admitted(sharded=False) == 1


def test_requests_are_placed_by_tokens_and_not_by_number() -> None:
    groups = [make(2, True, batch=8) for _ in range(2)]
    homes = []
    for i, length in enumerate((80, 10, 10, 10, 10, 10)):
        home = least_loaded(groups)
        homes.append(home)
        groups[home].add(Request(f"r{i}", [1] * length, SamplingParams(max_tokens=2)))
    assert homes == [0, 1, 1, 1, 1, 1]
