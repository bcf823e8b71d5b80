"""Which loads of a sweep a limit of time leaves out, on engines whose loads take what they are
told."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kllm.bench import tp_vs_dp_serve
from kllm.bench.base import Context
from kllm.bench.record import Record
from kllm.bench.run import subject_of
from kllm.bench.tp_vs_dp import TpVsDpBench
from kllm.bench.tp_vs_dp_loads import mixed
from kllm.bench.tp_vs_dp_serve import Found, Point, Runner, Served, Side
from kllm.config import EngineConfig
from kllm.errors import CapacityError
from kllm.results.schema import LEFT_OUT

CONFIG = EngineConfig(model="deepseek-v4", scale="tiny", device="cpu", fidelity="rank-slice")
BENCH = TpVsDpBench(
    world=2, in_flight=(8, 32, 128, 512), isls=(16,), osl=2, skewed=4, step_tokens=64
)
LIMIT_S = 20.0
POINTS = [
    Point(f"isl16.c{count}", mixed("even", requests=count, isl=16, osl=2, ranks=2), isl=16,
          in_flight=count)
    for count in BENCH.in_flight
]  # fmt: skip
NO_MEMORY = -1.0
Seconds = Mapping[tuple[Side, int], float]  # of a load, by side and requests in flight


class Sweep:
    """A runner's sweep, and the loads that ran."""

    def __init__(self, record: Record, seconds: Seconds, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[tuple[Side, int]] = []
        self.found = Found()
        self._now = 1000.0

        @contextmanager
        def no_engine(runner: Runner, side: Side, model: object) -> Iterator[Any]:
            yield SimpleNamespace(side=side, budget=None)
            self._now += 100.0  # what lies between two layouts counts for neither

        def serve(engine: Any, point: Point, watch: object) -> Any:
            side = engine.side
            took = seconds[side, point.in_flight]
            if took == NO_MEMORY:
                raise CapacityError("no room")
            self.ran.append((side, point.in_flight))
            self._now += took
            return Served(1.0, 1.0, 1.0)

        monkeypatch.setattr(Runner, "_engine", no_engine)
        monkeypatch.setattr(Runner, "_warm_up", lambda *_: None)
        monkeypatch.setattr(tp_vs_dp_serve, "_serve", serve)
        monkeypatch.setattr(time, "monotonic", lambda: self._now)
        self.runner = Runner(
            ctx=Context(config=CONFIG, repeats=1),
            record=record,
            found=self.found,
            points=POINTS,
            world=2,
            step_tokens=64,
            limit_s=LIMIT_S,
        )

    def run(self, *sides: Side) -> None:
        self.runner.run(dict.fromkeys(sides))
        self.found.budgets.clear()

    def reason(self, count: int) -> str:
        point = next(point for point in POINTS if point.in_flight == count)
        row = BENCH._row(self.found, point)
        assert row["state"] == ("failed" if "room" in row["reason"] else LEFT_OUT)
        return str(row["reason"])


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    with Record(subject_of(BENCH, CONFIG, ()), tmp_path) as found:
        yield found


def test_nothing_heavier_than_what_was_left_out_is_run(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = Sweep(record, {("tp", 8): 2, ("tp", 32): 6, ("dp", 8): 1, ("dp", 32): 1}, monkeypatch)
    sweep.run("tp")
    sweep.run("dp")
    assert sweep.ran == [("tp", 8), ("tp", 32), ("dp", 8), ("dp", 32)]
    assert sweep.reason(128) == (
        "tp: about 24 s more after 8 s would pass the limit of 20 s; raise --limit for it"
    )
    assert sweep.reason(512) == "left out as 128 in flight is; raise --limit for both"


def test_a_layout_that_is_too_slow_for_a_load_says_so(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the other layout has run it."""
    seconds: Seconds = {("tp", 8): 0.1, ("tp", 32): 0.4, ("tp", 128): 1, ("tp", 512): 4}
    sweep = Sweep(record, {**seconds, ("dp", 8): 3, ("dp", 32): 7}, monkeypatch)
    sweep.run("tp")
    sweep.run("dp")
    assert sweep.ran[4:] == [("dp", 8), ("dp", 32)]
    assert sweep.reason(128).startswith("dp: about 28 s more after 10 s would pass the limit")
    assert "--limit" in sweep.reason(512)


@pytest.mark.parametrize(("lightest_s", "runs"), [(0.1, True), (2.0, False)])
def test_a_load_without_memory_judges_none(
    record: Record, monkeypatch: pytest.MonkeyPatch, lightest_s: float, runs: bool
) -> None:
    """128 requests take 16 times as long as the 8 that ran."""
    seconds: Seconds = {("tp", 8): lightest_s, ("tp", 32): NO_MEMORY, ("tp", 128): NO_MEMORY}
    sweep = Sweep(record, {**seconds, ("tp", 512): NO_MEMORY}, monkeypatch)
    sweep.run("tp")
    assert sweep.reason(32) == "tp: no room"
    assert (sweep.reason(128) == "tp: no room") == runs
    assert ("about 32 s more" in sweep.reason(128)) == (not runs)


def test_layouts_in_turns_share_their_limits(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 s for both: 8 are gone, and 128 requests would take four times the 8 s of 32."""
    seconds: Seconds = {("tp", 8): 0, ("dp", 8): 0, ("tp", 32): 3, ("dp", 32): 5}
    sweep = Sweep(record, {**seconds, ("tp", 128): 14, ("dp", 128): 14}, monkeypatch)
    sweep.run("tp", "dp")
    assert sweep.ran[-2:] == [("tp", 128), ("dp", 128)]
    assert sweep.reason(512).startswith("tp+dp: about 112 s more after 36 s")


def test_an_end_that_no_limit_brought_says_what_is_missing() -> None:
    found, (point, *_) = Found(), POINTS
    assert BENCH._row(found, point)["reason"] == "the run ended before it"
    found.served["tp", point.key] = [Served(1.0, 1.0, 1.0)]
    assert BENCH._row(found, point)["reason"] == "the run ended before dp had run it"
