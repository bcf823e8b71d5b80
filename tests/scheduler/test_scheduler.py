"""Every request gets the tokens it would get alone, whatever else runs, and nothing leaks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.config import SchedulerConfig
from kllm.core import FinishReason
from kllm.errors import ConfigError
from kllm.scheduler.scheduler import LONG_STEPS, Scheduler
from tests.scheduler.driver import Driver, expected, finished, next_token

PROMPT = st.lists(st.integers(0, 50), min_size=1, max_size=20)


@settings(max_examples=150, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(PROMPT, st.integers(1, 20), st.integers(0, 2), st.integers(0, 6)),
        min_size=1,
        max_size=12,
    ),
    num_pages=st.integers(8, 40),
    page_size=st.sampled_from([1, 3, 4, 16]),
    max_batch=st.integers(1, 6),
    extra_budget=st.integers(0, 20),
    aborts=st.sets(st.integers(0, 11), max_size=3),
)
def test_any_mixture_gives_each_request_its_own_tokens(
    arrivals: list[tuple[list[int], int, int, int]],
    num_pages: int,
    page_size: int,
    max_batch: int,
    extra_budget: int,
    aborts: set[int],
) -> None:
    """Random arrivals, priorities, aborts and pools; the books balance after every step."""
    driver = Driver(num_pages, page_size, max_batch, max_batch + extra_budget)
    room = num_pages * page_size
    requests = []
    for i, (prompt, max_tokens, priority, pause) in enumerate(arrivals):
        if len(prompt) >= room:
            with pytest.raises(ConfigError, match="tokens a request"):
                driver.add(prompt, max_tokens, priority)
            continue
        request = driver.add(prompt, max_tokens, priority)
        for _ in range(pause):
            driver.step()
        if i in aborts and not finished(request):
            driver.scheduler.abort(request)
        requests.append((request, prompt, max_tokens))
    driver.run()
    assert driver.scheduler.free_pages == num_pages
    assert driver.scheduler.rows.free == max_batch
    for request, prompt, max_tokens in requests:
        want = expected(prompt, max_tokens, room)
        if request.finish_reason is FinishReason.ABORT:
            want = want[: len(request.output_ids)]
        assert request.output_ids == want


def test_full_pool_preempts_the_youngest_and_recomputes_it() -> None:
    driver = Driver(num_pages=6, page_size=4, max_batch=3, token_budget=24)
    old, young = driver.add([1] * 7, 12), driver.add([2] * 7, 12)
    driver.run()
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert young.output_ids == expected([2] * 7, 12, 24)


def test_last_running_request_may_fill_the_whole_pool() -> None:
    driver = Driver(num_pages=4, page_size=4, max_batch=2, token_budget=8)
    request = driver.add([5] * 3, 100)
    driver.run()
    assert len(request.output_ids) == 13
    assert request.finish_reason is FinishReason.LENGTH


def test_prompts_are_prefilled_while_others_decode() -> None:
    """A long prompt does not stop decoding, and decoding does not stop it."""
    driver = Driver(num_pages=64, page_size=4, max_batch=4, token_budget=8)
    talker = driver.add([1], 40)
    driver.step()
    driver.add([2] * 30, 1)
    before = len(talker.output_ids)
    for _ in range(5):
        driver.step()
    assert len(talker.output_ids) == before + 5
    prefilled = [int(p.query_lens.max()) for p in driver.plans[1:6]]
    assert prefilled == [7, 7, 7, 7, 2]


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=3),
    priorities=st.lists(st.integers(0, 1), min_size=3, max_size=3),
    before=st.integers(0, 20),
)
@settings(max_examples=60, deadline=None)
def test_short_prompts_do_not_wait_for_the_whole_of_long_ones(
    lengths: list[int], priorities: list[int], before: int
) -> None:
    """The bound counts prompts ahead of no lower priority, whatever their lengths: the last one
    ends in `LONG_STEPS` steps of its own, of which each that shares may take half."""
    driver = Driver(num_pages=4000, page_size=4, max_batch=8, token_budget=32)
    for length, priority in zip(lengths, priorities, strict=False):
        driver.add([1] * length, 1, priority)
    for _ in range(before):
        driver.step()
    short = driver.add([2] * 4, 1, priority=0)
    steps = 0
    while not finished(short):
        driver.step()
        steps += 1
    assert steps <= 1 + LONG_STEPS * (2 ** priorities[: len(lengths)].count(0) - 1)


def test_a_long_prompt_keeps_half_of_each_step() -> None:
    """A stream of short prompts that would fill every step."""
    driver = Driver(num_pages=4000, page_size=4, max_batch=8, token_budget=32)
    long = driver.add([1] * 1600, 1)
    steps = 0
    while not finished(long):
        for _ in range(4):
            driver.add([2] * 8, 1)
        driver.step()
        steps += 1
    assert steps <= 2 * 1600 / 32 + 1


def test_a_prompt_shares_no_step_with_a_lower_priority() -> None:
    driver = Driver(num_pages=4000, page_size=4, max_batch=8, token_budget=32)
    low = driver.add([1] * 4, 1, priority=1)
    high = driver.add([2] * 640, 1, priority=0)
    while not finished(high):
        driver.step()
    assert len(driver.plans) == 640 / 32
    assert not finished(low)


def test_a_prompt_passes_one_of_lower_priority_that_is_being_computed() -> None:
    driver = Driver(num_pages=4000, page_size=4, max_batch=8, token_budget=32)
    low = driver.add([1] * 100, 1, priority=1)
    driver.step()
    high = driver.add([2] * 40, 1, priority=0)
    driver.step()
    driver.step()
    assert finished(high)
    assert low.preemptions == 0, "both have room"


def test_decode_only_steps_reuse_tables_across_page_boundaries() -> None:
    driver = Driver(num_pages=64, page_size=2, max_batch=3, token_budget=16)
    requests = [driver.add([i] * 3, 25) for i in range(3)]
    driver.run()
    for i, request in enumerate(requests):
        assert request.output_ids == expected([i] * 3, 25, 128)


def test_higher_priority_takes_a_seat_when_all_are_full() -> None:
    driver = Driver(num_pages=64, page_size=4, max_batch=1, token_budget=8)
    low = driver.add([1, 2], 30, priority=1)
    driver.step()
    high = driver.add([3, 4], 3, priority=0)
    for _ in range(4):
        driver.step()
    assert finished(high)
    assert not finished(low)
    driver.run()
    assert low.preemptions == 1
    assert low.output_ids == expected([1, 2], 30, 256)


def test_as_many_as_needed_make_room_for_a_higher_priority() -> None:
    driver = Driver(num_pages=16, page_size=4, max_batch=4, token_budget=64)
    low = [driver.add([i] * 12, 3, priority=1) for i in range(3)]
    driver.step()
    high = driver.add([9] * 28, 2, priority=0)
    driver.step()
    assert [r.preemptions for r in low] == [0, 1, 1], "the youngest, and no more than needed"
    assert len(high.output_ids) == 1
    driver.run()
    assert [r.output_ids for r in low] == [expected([i] * 12, 3, 64) for i in range(3)]


def test_nobody_is_preempted_for_a_request_that_still_could_not_enter() -> None:
    driver = Driver(num_pages=16, page_size=4, max_batch=4, token_budget=64)
    peer = driver.add([1] * 40, 8, priority=0)
    low = driver.add([2] * 4, 8, priority=1)
    driver.step()
    driver.add([3] * 30, 1, priority=0)
    while not finished(peer):
        driver.step()
    assert low.preemptions == 0


def test_every_step_runs_something_while_the_pool_is_far_too_small() -> None:
    """Six requests that would fill the pool three times over, one preemption after another."""
    driver = Driver(num_pages=16, page_size=4, max_batch=6, token_budget=32)
    requests = [driver.add([i] * 8, 24) for i in range(6)]
    while driver.scheduler.waiting or driver.scheduler.num_running:
        before = len(driver.plans)
        driver.step()
        assert len(driver.plans) == before + 1
    assert sum(r.preemptions for r in requests) > 0
    assert max(r.preemptions for r in requests) <= len(requests)
    for i, request in enumerate(requests):
        assert request.output_ids == expected([i] * 8, 24, 64)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=2, max_size=20),
    num_pages=st.integers(16, 40),
    max_batch=st.integers(2, 8),
)
def test_nobody_is_preempted_twice_before_another_request_has_ended(
    lengths: list[tuple[int, int]], num_pages: int, max_batch: int
) -> None:
    """So preemptions come to an end however long outputs grow: recomputing waits for room."""
    driver = Driver(num_pages, 4, max_batch, token_budget=16)
    requests = [driver.add([i] * prompt, output) for i, (prompt, output) in enumerate(lengths)]
    ended_at = dict.fromkeys(map(id, requests), -1)
    ended = 0
    while driver.scheduler.num_requests:
        before = [request.preemptions for request in requests]
        done = driver.step()
        for request, count in zip(requests, before, strict=True):
            if request.preemptions > count:
                assert request.preemptions == count + 1
                assert ended_at[id(request)] < ended
                ended_at[id(request)] = ended
        ended += len(done)


def test_a_preempted_request_keeps_its_turn() -> None:
    driver = Driver(num_pages=8, page_size=4, max_batch=2, token_budget=32)
    driver.add([1] * 8, 16)
    second = driver.add([2] * 8, 16)
    later = [driver.add([3 + i] * 8, 1) for i in range(4)]
    while not finished(second):
        driver.step()
        waits = second.row < 0 and not finished(second)
        assert not (waits and any(request.output_ids for request in later))
    assert second.preemptions == 1


def test_equal_priorities_do_not_take_seats_from_each_other() -> None:
    driver = Driver(num_pages=64, page_size=4, max_batch=1, token_budget=8)
    first, second = driver.add([1], 5), driver.add([2], 5)
    driver.run()
    assert (first.preemptions, second.preemptions) == (0, 0)


def test_waiting_requests_enter_in_order_of_arrival() -> None:
    driver = Driver(num_pages=64, page_size=4, max_batch=1, token_budget=8)
    requests = [driver.add([i], 2) for i in range(5)]
    done = []
    while len(done) < 5:
        done += driver.step()
    assert done == requests


def test_end_of_sequence_token_ends_a_request() -> None:
    first = next_token([1, 2, 3])
    driver = Driver(eos=(first,))
    request = driver.add([1, 2, 3], 10)
    driver.run()
    assert request.finish_reason is FinishReason.STOP
    assert request.output_ids == [first]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("budget", [1, 16, 128])
def test_any_chunk_size_works_also_below_a_page(budget: int, page_size: int) -> None:
    driver = Driver(
        num_pages=300 // page_size, page_size=page_size, max_batch=1, token_budget=budget
    )
    request = driver.add(list(range(100)), 5)
    driver.run()
    assert request.output_ids == expected(list(range(100)), 5, 300)


def test_budget_below_the_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="token_budget 3 is smaller than max_batch 4"):
        Scheduler(
            SchedulerConfig(max_batch=4, token_budget=3),
            num_pages=4,
            page_size=4,
            max_model_len=16,
        )


def test_no_request_starves_under_a_stream_of_later_arrivals() -> None:
    driver = Driver(num_pages=10, page_size=4, max_batch=3, token_budget=12)
    early = driver.add([1] * 24, 4)
    steps = 0
    while not finished(early):
        if steps % 2 == 0:
            driver.add([2] * 3, 3)
        driver.step()
        steps += 1
        assert steps < 100
