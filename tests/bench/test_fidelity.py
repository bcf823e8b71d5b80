"""Comparing fidelities: what is run, what is computed, and what is said about the difference."""

import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from kllm.bench import fidelity, fidelity_exchange, fidelity_transfer
from kllm.bench.base import Context, warming_up
from kllm.bench.fidelity import (
    FidelityBench,
    layouts_of,
    pairs_for,
    scale_for_both,
)
from kllm.bench.fidelity_findings import (
    MODEL_OF_SLICE,
    QUANTITIES,
    SLICE_OF_REAL,
    add_errors,
    series_of,
    summary_of,
)
from kllm.bench.fidelity_model import LayoutModel
from kllm.bench.fidelity_rounds import Limit, Rounds
from kllm.bench.fidelity_sides import UNITS, FidelityLoad, Ranks
from kllm.bench.fidelity_transfer import Moved
from kllm.bench.record import Record, Subject
from kllm.bench.run import run_bench
from kllm.cli.bench_output import series_table
from kllm.config import EngineConfig, ParallelConfig, SchedulerConfig
from kllm.errors import ConfigError, WorkerError, one_line
from kllm.hardware import Ceilings
from kllm.hardware.links import COLLECTIVES, LinkCeilings
from kllm.models.load import resolve
from kllm.parallel.layout import parse
from kllm.parallel.link import Link
from kllm.results.schema import LEFT_OUT
from tests.bench.rows import rows_of

POINTS = ((4096.0, 1e-4), (1e6, 1e-3))
CEILINGS = Ceilings(
    device="cpu",
    copy_bytes_per_s=1e10,
    read_bytes_per_s=1e10,
    matmul_flops_per_s={"float32": 1e11},
    launch_s=1e-6,
    links=LinkCeilings(ranks=2, backend="gloo", curves=dict.fromkeys(COLLECTIVES, POINTS)),
)
TINY = EngineConfig(
    model="deepseek-v4", scale="tiny", device="cpu", scheduler=SchedulerConfig(token_budget=32)
)
SERIES = series_of(SLICE_OF_REAL)
LOAD = FidelityLoad(isl=24, osl=8, requests=2)
NO_LINK = Link(latency_s=0.0, bytes_per_s=1e30)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "ceilings", lambda device, links=False: CEILINGS)
    monkeypatch.setattr("kllm.hardware.cached_ceilings", lambda device: CEILINGS)


def test_real_ranks_slice_and_model_are_compared_in_one_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layout that runs, and one that the model does not allow: marked, and the rest goes on."""

    def moves(kind: str, sizes: dict[str, int]) -> list[Moved]:
        return [Moved(what, kind, size, size / 0.5e9) for what, size in sizes.items()]

    monkeypatch.setattr(fidelity_transfer, "measure_transfers", moves)
    monkeypatch.setattr(fidelity_transfer, "measure_libraries", lambda *_: ([], ["No library."]))
    bench = FidelityBench(
        layouts=(parse("tp=3"), parse("dp=2,ep=2")),
        pairs=(SLICE_OF_REAL, MODEL_OF_SLICE),
        load=LOAD,
    )
    said: list[tuple[str, int, int]] = []
    ctx = Context(config=TINY, repeats=2, progress=lambda *state: said.append(state))
    result, _ = run_bench(bench, ctx, tmp_path)
    assert (warming_up("dp2+ep2"), 1, 2) in said
    assert result.fidelity == "modelled", "the weakest of those inside"
    for pair in bench.pairs:
        estimate, truth = pair
        failed, compared = rows_of(result, summary_of(pair))
        assert (failed["layout"], failed["state"]) == ("tp3", "failed")
        assert "tp 3" in failed["reason"]
        assert (compared["layout"], compared["state"]) == ("dp2+ep2", "ok")
        rows = rows_of(result, f"{estimate} of {truth}")
        assert {row["layout"] for row in rows} == {"dp2+ep2"}
        assert len(rows) == len(UNITS) - 1, "memory is not counted on a CPU"
        for row in rows:
            if truth == "real":
                what = next(w for w in UNITS if row["quantity"].startswith(QUANTITIES[w]))
                one, other = (result.metrics[f"{what}.dp2+ep2.{side}"].values for side in pair)
                ratio = math.sqrt(one[0] / other[0] * one[1] / other[1])
            else:
                ratio = row[estimate] / row[truth]
            assert row["error_percent"] == pytest.approx((ratio - 1) * 100)
            assert row["within"] == (abs(row["error_percent"]) <= 10)
        worst = max((row["error_percent"] for row in rows), key=abs)
        assert compared["time_percent"] == worst
        assert compared["within"] == all(row["within"] for row in rows)
    for side in ("real", "rank-slice"):
        assert len(result.metrics[f"decode_step_ms.dp2+ep2.{side}"].values) == 2
    assert result.metrics["decode_step_ms.dp2+ep2.modelled"].sample == "exact"
    moved = rows_of(result, "transfers")
    assert [row["what"] for row in moved] == ["a request's KV", "a rank's weights"]
    assert [row["achieved_over_link"] for row in moved] == pytest.approx([0.5, 0.5]), "of 1 GB/s"
    assert "No library." in result.notes
    assert any("DeepEP was not measured: deep_ep is not installed" in n for n in result.notes)
    assert any("share the cores" in note for note in result.notes)
    assert result.boundary is not None
    assert result.boundary.endswith("failed: tp3.")


def test_what_is_not_begun_within_the_limit_is_left_out(tmp_path: Path) -> None:
    bench = FidelityBench(pairs=(SLICE_OF_REAL,), load=LOAD, limit_s=1e-9)
    result, _ = run_bench(bench, Context(config=TINY, repeats=1), tmp_path)
    found = rows_of(result, summary_of(SLICE_OF_REAL))
    assert [row["layout"] for row in found] == [
        *("tp2", "dp2+ep2", "cp2 ring", "cp2 all-gather", "pp2")
    ]
    for row in (*found, *rows_of(result, "transfers")):
        assert row["state"] == LEFT_OUT
        assert row["reason"] == "not begun within 1e-09 s; raise --limit for it"
    assert result.verdict == "rank-slice against real: no layout could be compared."
    assert result.boundary is not None
    assert result.boundary.endswith("left out: tp2, dp2+ep2, cp2 ring, cp2 all-gather, pp2.")
    assert result.fidelity == "rank-slice"


def test_exchanges_beyond_the_limit_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity_exchange, "_why_not", lambda config: None)
    record = Record(Subject(name="n", model="m", scale="tiny", dtype="float32"), tmp_path)
    with Ranks(2) as ranks:
        rounds = Rounds(ctx=Context(config=TINY), load=LOAD, ranks=ranks)
        fidelity_exchange.add_exchanges(record, rounds, 2, Limit(1e-9), (0, 1))
    found = [(row["backend"], row["state"]) for row in record.rows["expert exchange"]]
    assert found == [(backend, LEFT_OUT) for backend in fidelity_exchange.BACKENDS]


def test_no_limit_never_passes() -> None:
    assert not Limit(0.0, begin_s=-1e9).passed


def told(tmp_path: Path, runs: dict[str, dict[str, float]]) -> Record:
    """What is said of layouts whose estimates are these times as much as their measurements."""
    record = Record(Subject(name="n", model="m", scale="tiny", dtype="float32"), tmp_path)
    for layout, factors in runs.items():
        real = {what: [100.0 + i] for i, what in enumerate(factors)}
        estimate = {what: [factors[what] * value for value in real[what]] for what in factors}
        values = {"real": real, "rank-slice": estimate}
        add_errors(record, parse(layout), SLICE_OF_REAL, values)
    row = {"layout": "cp2 ring", "state": LEFT_OUT, "reason": "no time"}
    record.row(summary_of(SLICE_OF_REAL), row)
    FidelityBench(pairs=(SLICE_OF_REAL,)).conclude(record)
    return record


def test_what_changes_between_rounds_is_no_error(tmp_path: Path) -> None:
    """The rounds are 2, 1 and 3 times as long for both sides; in one of them the slice is off."""
    record = Record(Subject(name="n", model="m", scale="tiny", dtype="float32"), tmp_path)
    real, estimate = {"ttft_ms": [20.0, 10.0, 30.0]}, {"ttft_ms": [30.0, 10.5, 31.5]}
    values = {"real": real, "rank-slice": estimate, "modelled": {"ttft_ms": [24.0]}}
    for pair in (SLICE_OF_REAL, MODEL_OF_SLICE):
        add_errors(record, parse("tp=2"), pair, values)
    [row] = record.rows[SERIES]
    assert (row["rank-slice"], row["real"]) == (30.0, 20.0)
    assert row["error_percent"] == pytest.approx(5.0)
    [modelled] = record.rows[series_of(MODEL_OF_SLICE)]
    assert modelled["error_percent"] == pytest.approx(-20.0), "one value: of the median"


def test_the_verdict_counts_layouts_and_the_boundary_names_them(tmp_path: Path) -> None:
    record = told(
        tmp_path,
        {
            "tp=2": {"ttft_ms": 0.91, "tpot_ms": 1.05, "peak_gib": 1.02},
            "pp=2": {"ttft_ms": 0.89, "tpot_ms": 1.0, "peak_gib": 1.035},
        },
    )
    assert record.verdict == (
        "rank-slice against real, 3 layouts: 1 within 10 % in time and 3 % in memory, 1 beyond, "
        "1 left out; furthest off is pp2 (TTFT -11.0 %, peak memory +3.5 %)."
    )
    assert record.boundary == (
        "rank-slice of real is within the limits for tp2; beyond them for pp2 (TTFT -11.0 %, "
        "peak memory +3.5 %); left out: cp2 ring."
    )
    tp, pp, _ = record.rows[summary_of(SLICE_OF_REAL)]
    assert (tp["within"], tp["largest_in"], pp["within"]) == (True, "TTFT", False)
    assert tp["time_percent"] == pytest.approx(-9.0)
    assert tp["memory_percent"] == pytest.approx(2.0)
    within = {(row["layout"], row["quantity"]): row["within"] for row in record.rows[SERIES]}
    assert within["pp2", "TPOT (ms)"]
    assert not within["pp2", "peak memory (GiB)"]


def test_where_all_are_within_the_one_closest_to_its_limit_is_named(tmp_path: Path) -> None:
    record = told(tmp_path, {"tp=2": {"ttft_ms": 1.05, "peak_gib": 1.02}})
    assert record.verdict == (
        "rank-slice against real, 2 layouts: 1 within 10 % in time and 3 % in memory, "
        "1 left out; furthest off is tp2 (peak memory +2.0 %)."
    )


def test_a_terminal_of_80_columns_shows_both_values_and_what_is_within(tmp_path: Path) -> None:
    factors = {what: 1 + i / 54.321 for i, what in enumerate(UNITS)}
    result = told(tmp_path, {"tp=2": factors, "cp=2,cp_kind=all_gather": factors}).result()
    short, detailed = result.series
    heading, table, _ = series_table(short, 80)
    assert table is not None
    assert "limits 10 % in time and 3 % in memory" in heading
    assert [column.name for column in short.columns if column.name != "reason"] == [
        *("layout", "within", "time_percent", "largest_in", "memory_percent", "state")
    ]
    assert len(table.columns) == 6
    _, table, _ = series_table(detailed, 80)
    assert table is not None
    assert [column.name for column in detailed.columns] == [
        *("layout", "quantity", "rank-slice", "real", "error_percent", "within")
    ]
    assert len(table.columns) == 6
    assert set(table.columns[1].cells) == {f"{QUANTITIES[what]} ({UNITS[what]})" for what in UNITS}
    for shown in (series_table(series, 80)[1] for series in result.series):
        assert shown is not None
        assert all("…" not in line and len(line) <= 80 for line in rendered(shown))


def rendered(table: Table) -> list[str]:
    console = Console(width=80, record=True, file=StringIO())
    console.print(table)
    return console.export_text().splitlines()


def test_what_is_compared_depends_on_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pairs_for("cpu", 2) == (SLICE_OF_REAL, MODEL_OF_SLICE)
    for devices, expected in ((1, MODEL_OF_SLICE), (2, SLICE_OF_REAL)):
        monkeypatch.setattr("torch.cuda.device_count", lambda devices=devices: devices)
        assert pairs_for("cuda:0", 2) == (expected,)


def test_auto_is_tiny_on_a_cpu_and_what_is_asked_for_stays() -> None:
    assert scale_for_both(replace(TINY, scale="auto")) == "tiny"
    assert scale_for_both(replace(TINY, scale="layers:4")) == "layers:4"


def model(layout: ParallelConfig, link: Link = NO_LINK, name: str = "deepseek-v4") -> LayoutModel:
    config = replace(TINY, model=name, scale="full", load="random", parallel=layout)
    return LayoutModel(resolved=resolve(config), layout=layout, ceilings=CEILINGS, link=link)


@pytest.mark.parametrize("text", ["tp=2", "cp=2,cp_kind=all_gather"])
def test_without_transfers_two_ranks_halve_a_prefill(text: str) -> None:
    """Many tokens: operations decide, and these are divided."""
    one = model(ParallelConfig()).prefill_s(4096, 4096)
    assert model(parse(text)).prefill_s(4096, 4096) == pytest.approx(one / 2, rel=0.02)


def test_a_pipeline_of_two_fills_and_drains() -> None:
    one = model(ParallelConfig()).prefill_s(4096, 0)
    two = model(parse("pp=2")).prefill_s(4096, 0)
    # Two micro-batches take three rounds of a quarter of the work each.
    assert two == pytest.approx(one * 3 / 4, rel=0.05)
    decode = model(ParallelConfig()).decode_s(8, 512)
    assert model(parse("pp=2")).decode_s(8, 512) == pytest.approx(decode)


def test_spread_experts_are_read_once_by_their_ranks_together() -> None:
    """Two groups of eight tokens each: a rank reads half of what sixteen tokens touch."""
    alone = model(ParallelConfig()).decode_s(16, 512)
    spread = model(parse("dp=2,ep=2")).decode_s(8, 512)
    both = model(ParallelConfig(dp=2)).decode_s(8, 512)
    assert alone / 2 < spread < both


def test_transfers_come_on_top() -> None:
    slow = Link(latency_s=1e-3, bytes_per_s=1e30)
    layout = parse("tp=2")
    added = model(layout, slow).decode_s(4, 64) - model(layout).decode_s(4, 64)
    # The embedding, two sums a layer, the gathered logits.
    layers = model(layout).resolved.config.num_hidden_layers
    assert added == pytest.approx((2 * layers + 2) * 1e-3)


def test_a_modelled_run_adds_up() -> None:
    load = FidelityLoad(isl=64, osl=5, requests=4)
    found = model(parse("tp=2")).values(load, token_budget=32, pool_tokens=1024)
    total_s = load.requests * load.osl / found["output_tokens_per_s"]
    prefill_s = 8 * found["prefill_step_ms"] / 1e3
    assert total_s == pytest.approx(prefill_s + 4 * found["decode_step_ms"] / 1e3)
    # The mean request waits for 2.5 of 4 prompts, and ends with all the others.
    assert found["ttft_ms"] == pytest.approx(prefill_s * 1e3 * 2.5 / 4)
    assert found["ttft_ms"] + 4 * found["tpot_ms"] == pytest.approx(total_s * 1e3)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (WorkerError("rank 1 died\nsome trace"), "rank 1 died"),
        (RuntimeError("CUDA error: launch\nmore"), "RuntimeError: CUDA error: launch"),
        (AssertionError(), "AssertionError: AssertionError"),
    ],
)
def test_an_error_becomes_one_line(error: Exception, text: str) -> None:
    assert one_line(error) == text


def test_bad_options_are_a_sentence() -> None:
    with pytest.raises(ConfigError, match="2 ranks or more"):
        FidelityBench(world=1)
    with pytest.raises(ConfigError, match="pair"):
        FidelityBench(pairs=())
    with pytest.raises(ConfigError, match="at least 1 prompt and 2 output"):
        FidelityBench(load=FidelityLoad(isl=4, osl=1, requests=1))


def test_layouts_have_as_many_ranks_as_asked_for() -> None:
    assert {layout.world for layout in layouts_of(4)} == {4}
