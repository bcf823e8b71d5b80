"""Benches on engines that fail as told: what is recorded, marked and concluded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kllm.bench import throughput
from kllm.bench.base import BENCHES, Bench, Context, doubling, warming_up
from kllm.bench.compare_power import ComparePowerBench, SlowedEngine
from kllm.bench.expert_balance_trace import Zipf
from kllm.bench.latency import LatencyBench
from kllm.bench.record import Record, Subject, new_run_id
from kllm.bench.run import run_bench
from kllm.bench.throughput import ThroughputBench
from kllm.bench.vs_transformers import agreement
from kllm.bench.workloads import Lengths, Workload, parse
from kllm.config import EngineConfig
from kllm.errors import CapacityError, ConfigError, WorkerError
from kllm.hardware import Ceilings
from kllm.results.store import list_results, load, recover
from tests.bench.fakes import Clock, FakeEngine
from tests.bench.rows import rows_of

CONFIG = EngineConfig(model="smollm2-135m", load="random", scale="tiny", device="cpu")
CEILINGS = Ceilings(
    device="cpu",
    copy_bytes_per_s=1e10,
    read_bytes_per_s=1e10,
    matmul_flops_per_s={"float32": 1e11},
    launch_s=1e-6,
)


@pytest.fixture(autouse=True)
def ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kllm.bench.latency.ceilings", lambda device: CEILINGS)


def context(make: Callable[[], FakeEngine], repeats: int = 3) -> Context:
    return Context(config=CONFIG, repeats=repeats, make_engine=lambda config: make())


def test_latency_records_every_repeat_and_compares_with_the_floor(tmp_path: Path) -> None:
    engine = FakeEngine(Clock())
    bench = LatencyBench(batches=(1, 2, 4), isl=4, osl=6)
    result, path = run_bench(bench, context(lambda: engine), tmp_path, ("kllm", "bench"))
    assert load(path) == result
    assert list_results(tmp_path) == [path]
    assert list(tmp_path.glob("*.partial*")) == []
    rows = rows_of(result, "sweep")
    assert [row["batch"] for row in rows] == [1, 2, 4]
    for row in rows:
        assert row["state"] == "ok"
        assert row["achieved_over_floor"] == pytest.approx(row["step_ms"] / row["floor_ms"])
        assert row["step_ms_lo"] <= row["step_ms"] <= row["step_ms_hi"]
    assert len(result.metrics["step_ms.batch4"].values) == 3
    assert result.fidelity == "real"
    assert engine.closed


@pytest.mark.parametrize(
    ("bench", "name"),
    [
        (LatencyBench(batches=(1, 2), isl=4, osl=6), "batch {}"),
        (ThroughputBench(loads=[parse(f"4:3:{n}", num_requests=2) for n in (1, 2)]), "4:3:{}"),
    ],
    ids=["latency", "throughput"],
)
def test_a_warm_up_is_told_apart_from_what_follows(bench: Bench, name: str, tmp_path: Path) -> None:
    """It may take a minute where kernels are compiled."""
    said: list[tuple[str, int, int]] = []
    ctx = context(lambda: FakeEngine(Clock()))
    run_bench(bench, replace(ctx, progress=lambda *state: said.append(state)), tmp_path)
    first, second = name.format(1), name.format(2)
    assert said == [
        *((warming_up(first), 0, 2), (first, 0, 2)),
        *((warming_up(second), 1, 2), (second, 1, 2)),
        ("done", 2, 2),
    ]


def test_latency_marks_batches_that_do_not_fit_and_goes_on(tmp_path: Path) -> None:
    bench = LatencyBench(batches=(1, 2, 4), isl=4, osl=6)
    result, _ = run_bench(bench, context(lambda: FakeEngine(Clock(), slots=2)), tmp_path)
    rows = rows_of(result, "sweep")
    assert [row["state"] for row in rows] == ["ok", "ok", "failed"]
    assert rows[2]["reason"] == ("at most 2 of 4 requests decoded together: KV memory is short")


def test_out_of_memory_in_the_first_point_does_not_end_the_sweep(tmp_path: Path) -> None:
    loads = [parse("4:3:1", num_requests=2), parse("4:3:2", num_requests=2)]
    engine = FakeEngine(Clock(), fail_at=5)
    result, _ = run_bench(ThroughputBench(loads=loads), context(lambda: engine), tmp_path)
    rows = rows_of(result, "sweep")
    assert [row["state"] for row in rows] == ["failed", "ok"]
    assert rows[0]["reason"] == "out of host memory"
    assert rows[1]["output_tokens_per_s"] > 0
    requests = result.find_series("requests")
    assert requests is not None
    assert len(requests.rows or ()) == 3 * 2


def test_load_above_the_cached_ceilings_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted(rate: float) -> tuple[str, ...]:
        rates = {"float32": rate}
        found = replace(CEILINGS, read_bytes_per_s=rate, matmul_flops_per_s=rates)
        monkeypatch.setattr(throughput, "cached_ceilings", lambda device: found)
        bench = ThroughputBench(loads=[parse("4:3:2", num_requests=2)])
        made = context(lambda: FakeEngine(Clock()))
        return run_bench(bench, made, tmp_path / str(rate))[0].notes

    assert any("kllm doctor --fresh" in note for note in noted(1.0))
    assert not any("kllm doctor --fresh" in note for note in noted(1e15))


def test_interrupt_stores_what_was_measured(tmp_path: Path) -> None:
    engine = FakeEngine(Clock(), fail_at=30, failure=KeyboardInterrupt())
    bench = LatencyBench(batches=(1, 2), isl=4, osl=6)
    result, path = run_bench(bench, context(lambda: engine), tmp_path)
    assert result.extra == {"interrupted": True}
    assert load(path).metrics["step_ms.batch1"].values
    assert engine.closed


def test_interrupt_before_the_first_value_leaves_no_file(tmp_path: Path) -> None:
    engine = FakeEngine(Clock(), fail_at=1, failure=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_bench(LatencyBench(batches=(1,), isl=4, osl=6), context(lambda: engine), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_error_says_where_the_measurements_are(tmp_path: Path) -> None:
    engine = FakeEngine(Clock(), fail_at=30, failure=WorkerError("rank 0 died"))
    bench = LatencyBench(batches=(1, 2), isl=4, osl=6)
    with pytest.raises(WorkerError) as stopped:
        run_bench(bench, context(lambda: engine), tmp_path)
    [journal] = tmp_path.iterdir()
    assert str(stopped.value) == (
        f"rank 0 died; what was measured is in {journal}, which `kllm report` reads"
    )
    assert recover(journal).metrics["step_ms.batch1"].values


def test_more_tokens_than_positions_are_refused_before_anything_runs(tmp_path: Path) -> None:
    bench = BENCHES["vs-transformers"].load()(osl=100_000)
    with pytest.raises(ConfigError, match="100256 tokens and the model"):
        run_bench(bench, context(lambda: FakeEngine(Clock())), tmp_path)


def test_a_killed_run_can_be_recovered_from_its_journal(tmp_path: Path) -> None:
    record = Record(Subject(name="n", model="m", scale="tiny", dtype="float32"), tmp_path)
    record.add("step_ms", 2.0, unit="ms", direction="lower")
    record.row("sweep", {"batch": 1})
    [journal] = tmp_path.glob("*.partial.jsonl")
    found = recover(journal)
    assert found.metrics["step_ms"].values == (2.0,)
    assert found.find_series("sweep") is not None


def test_result_file_name_can_be_chosen(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "mine.json"
    bench = LatencyBench(batches=(1,), isl=4, osl=3)
    _, path = run_bench(bench, context(lambda: FakeEngine(Clock()), repeats=1), target)
    assert path == target
    assert [p.name for p in target.parent.iterdir()] == ["mine.json"]


def test_throughput_finds_the_knee(tmp_path: Path) -> None:
    record = Record(Subject(name="n", model="m", scale="tiny", dtype="float32"), tmp_path)
    for load_name, rate in (("a", 10.0), ("b", 19.0), ("c", 19.5), ("d", 20.0)):
        row = {"load": load_name, "output_tokens_per_s": rate, "ttft_p50_ms": 1, "tpot_p50_ms": 1}
        row |= {"concurrency": 1, "isl": "4", "osl": "3"}
        record.row("sweep", {**row, "state": "ok"})
    ThroughputBench(loads=[parse("4:3:1")]).conclude(record)
    assert record.boundary == "Beyond b the next load brings less than 5% more output."
    assert record.verdict is not None
    assert record.verdict.startswith("Most output at d")


def test_different_loads_have_no_boundary_along_concurrency(tmp_path: Path) -> None:
    loads = [parse("4:3:1", num_requests=2), parse("5:3:2", num_requests=2)]
    bench = ThroughputBench(loads=loads)
    result, _ = run_bench(bench, context(lambda: FakeEngine(Clock())), tmp_path)
    assert result.boundary is not None
    assert "differ in more" in result.boundary


@pytest.mark.parametrize("slowdown", [0.5, 2.0])
def test_slowed_engine_takes_the_asked_share_longer(
    slowdown: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    engine = FakeEngine(clock, step_s=1.0)

    def ticking() -> float:
        clock.sleep(0.001)
        return clock()

    monkeypatch.setattr("time.perf_counter", ticking)
    slow = SlowedEngine(engine, slowdown)
    before = clock()
    slow.step()
    assert clock() - before == pytest.approx(1 + slowdown, abs=0.01)


def test_compare_power_counts_alarms_and_detections(tmp_path: Path) -> None:
    """A slowdown of nine times is found, however busy the machine."""

    class Busy(FakeEngine):
        def step(self):  # type: ignore[no-untyped-def]
            sum(range(20_000))
            return super().step()

    bench = ComparePowerBench(pairs=1, tries=2, slowdown=9.0, batch=2, isl=4, osl=6)
    result, _ = run_bench(bench, context(lambda: Busy(Clock()), repeats=6), tmp_path)
    assert result.metrics["detections"].values == (2,)
    assert result.metrics["false_alarms"].sample == "exact"
    pairs = result.find_series("pairs")
    assert pairs is not None
    assert len(pairs.rows or ()) == 3


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [([[1, 2, 3, 4]], [[1, 2, 3, 4]], 1.0), ([[1, 2, 9, 4]], [[1, 2, 3, 4]], 0.5)],
)
def test_agreement_ends_at_the_first_difference(
    one: list[list[int]], two: list[list[int]], expected: float
) -> None:
    assert agreement(one, two) == expected


@pytest.mark.parametrize(("most", "expected"), [(1, (1,)), (4, (1, 2, 4)), (6, (1, 2, 4, 6))])
def test_doubling_ends_at_its_limit(most: int, expected: tuple[int, ...]) -> None:
    assert doubling(most) == expected


NEEDED: dict[str, dict[str, object]] = {  # options without a default
    "throughput": {
        "loads": [Workload(isl=Lengths(1), osl=Lengths(1), num_requests=1, concurrency=1)]
    },
    "expert-balance": {"ep": 2, "redundant": [0], "trace": Zipf(exponent=1.0)},
    "ring-vs-allgather": {
        "models": ["glm-5.2"],
        "isls": [256],
        "cps": [2],
        "links": ["nvlink4"],
        "chunks": [64],
    },
    "tp-vs-dp-attention": {
        "world": 2,
        "in_flight": [2],
        "isls": [16],
        "osl": 2,
        "skewed": 4,
        "step_tokens": 64,
    },
}


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_every_listed_bench_loads(name: str) -> None:
    entry = BENCHES[name]
    bench = entry.load()(**NEEDED.get(name, {}))
    assert bench.name == name
    assert bench.workload()


@pytest.mark.parametrize(
    "make",
    [
        lambda: LatencyBench(batches=()),
        lambda: LatencyBench(batches=(0,)),
        lambda: LatencyBench(osl=1),
        lambda: ThroughputBench(loads=[]),
        lambda: ComparePowerBench(pairs=0),
        lambda: ComparePowerBench(slowdown=-1),
        lambda: BENCHES["latancy"],
    ],
)
def test_bad_options_are_a_sentence(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_capacity_errors_of_the_engine_itself_are_raised(tmp_path: Path) -> None:
    def broken() -> FakeEngine:
        raise CapacityError("weights need 9 GiB and 1 GiB is free")

    with pytest.raises(CapacityError):
        run_bench(LatencyBench(batches=(1,)), context(broken), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_run_ids_differ_and_sort_by_time() -> None:
    one, two = new_run_id(), new_run_id()
    assert one != two
    assert one.partition("-")[0] <= two.partition("-")[0]
