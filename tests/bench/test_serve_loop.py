"""The load loop on an engine whose schedule is known, with every time checked by hand."""

import math

import pytest
import torch

from kllm.bench.serve_loop import Progress, run_workload, warm_up
from kllm.bench.workloads import Lengths, TraceRow, Workload
from tests.bench.fakes import Clock, FakeEngine


def closed(concurrency: int, num_requests: int, osl: int = 3, isl: int = 5) -> Workload:
    return Workload(
        isl=Lengths(isl), osl=Lengths(osl), num_requests=num_requests, concurrency=concurrency
    )


def run(engine: FakeEngine, workload: Workload, **options: object):
    return run_workload(engine, workload, clock=engine.clock, sleep=engine.clock.sleep, **options)


def test_one_request_at_a_time_has_hand_computed_times() -> None:
    found = run(FakeEngine(Clock()), closed(1, 2))
    assert [row.arrival_s for row in found.rows] == pytest.approx([0.0, 0.3])
    for row in found.rows:
        assert (row.isl, row.osl, row.finish) == (5, 3, "length")
        assert row.ttft_s == pytest.approx(0.1)
        assert row.tpot_s == pytest.approx(0.1)
        assert row.e2e_s == pytest.approx(0.3)
    assert found.duration_s == pytest.approx(0.6)
    assert found.output_tokens_per_s == pytest.approx(10)
    assert found.total_tokens_per_s == pytest.approx(16 / 0.6)
    assert found.requests_per_s == pytest.approx(2 / 0.6)
    assert found.complete


def test_two_in_flight_wait_for_each_other() -> None:
    """The second is prefilled one step after the first and ends one step later."""
    found = run(FakeEngine(Clock()), closed(2, 2))
    first, second = found.rows
    assert (first.ttft_s, second.ttft_s) == pytest.approx((0.1, 0.2))
    assert (first.e2e_s, second.e2e_s) == pytest.approx((0.3, 0.4))
    assert [(s.num_decodes, s.num_tokens) for s in found.steps] == [(0, 5), (1, 6), (2, 2), (1, 1)]
    assert [(s.running, s.waiting) for s in found.steps] == [(1, 1), (2, 0), (1, 0), (0, 0)]
    assert [s.finished for s in found.steps] == [0, 0, 1, 2]


def test_closed_loop_never_has_more_in_flight_than_asked() -> None:
    engine = FakeEngine(Clock())
    found = run(engine, closed(3, 10))
    assert len(found.rows) == 10
    assert max(s.running + s.waiting for s in found.steps) <= 3
    assert max(s.running + s.waiting for s in found.steps[:2]) == 3


def test_a_single_token_has_no_time_per_output_token() -> None:
    [row] = run(FakeEngine(Clock()), closed(1, 1, osl=1)).rows
    assert row.tpot_s is None
    assert row.e2e_s == row.ttft_s


def test_open_loop_counts_from_the_due_time_even_if_a_step_was_in_the_way() -> None:
    rows = (TraceRow(0.0, 5, 3), TraceRow(0.05, 5, 1), TraceRow(2.0, 5, 1))
    workload = Workload(isl=Lengths(5), osl=Lengths(1, 3), num_requests=3, trace=rows)
    engine = FakeEngine(Clock())
    found = run(engine, workload)
    by_arrival = sorted(found.rows, key=lambda row: row.arrival_s)
    assert [row.arrival_s for row in by_arrival] == pytest.approx([0.0, 0.05, 2.0])
    assert [row.ttft_s for row in by_arrival] == pytest.approx([0.1, 0.15, 0.1])
    assert engine.added[1].arrival_s == pytest.approx(1000.05)
    assert found.duration_s == pytest.approx(2.1)  # it slept until the last one was due


def test_observer_sees_each_step_and_can_stop_the_run() -> None:
    seen: list[Progress] = []

    def observer(progress: Progress) -> str | None:
        seen.append(progress)
        return "queue grows" if len(seen) == 3 else None

    engine = FakeEngine(Clock())
    found = run(engine, closed(2, 10), observer=observer)
    assert found.stopped == "queue grows"
    assert not found.complete
    assert len(seen) == engine.steps == 3
    assert [list(p.first_tokens) for p in seen] == [pytest.approx([0.1]), pytest.approx([0.2]), []]
    assert len(seen[2].finished) == len(found.rows) == 1
    assert not engine.has_work  # what was left is aborted


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of device memory"),
        (MemoryError(), "out of host memory"),
    ],
)
def test_out_of_memory_keeps_what_was_measured(error: Exception, reason: str) -> None:
    engine = FakeEngine(Clock(), fail_at=5, failure=error)
    found = run(engine, closed(1, 4))
    assert found.failure == reason
    assert len(found.rows) == 1
    assert not found.complete
    assert not engine.has_work


def test_other_errors_are_raised_and_leave_no_request_behind() -> None:
    engine = FakeEngine(Clock(), fail_at=2, failure=RuntimeError("bad shape"))
    with pytest.raises(RuntimeError, match="bad shape"):
        run(engine, closed(2, 4))
    assert not engine.has_work


def test_percentiles_and_means_skip_what_does_not_exist() -> None:
    found = run(FakeEngine(Clock()), closed(1, 2, osl=1))
    assert math.isnan(found.percentile("tpot_s", 50))
    assert found.percentile("ttft_s", 50) == pytest.approx(found.mean("ttft_s"))


def test_warm_up_passes_through_every_batch_size() -> None:
    engine = FakeEngine(Clock())
    warm_up(engine, closed(3, 10, osl=100))
    assert [len(r.output_ids) for r in engine.added] == [2, 3, 4]
    assert not engine.has_work
