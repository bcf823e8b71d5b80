"""`kllm bench` and `kllm doctor`: what is printed where, and how wrong options are refused."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kllm import hardware
from kllm.bench.base import Context
from kllm.bench.overhead import OverheadBench
from kllm.bench.record import Record
from kllm.cli import options
from kllm.cli.bench import bench_app
from kllm.cli.bench_output import fit, print_result, series_table
from kllm.cli.bench_progress import progress
from kllm.cli.bench_run import settled
from kllm.cli.doctor import advice, doctor
from kllm.config import EngineConfig
from kllm.errors import KllmError
from kllm.hardware.links import LinkCeilings
from kllm.models.load import resolve
from kllm.results.schema import Series
from tests.results import samples

CEILINGS = hardware.Ceilings(
    device="cpu",
    copy_bytes_per_s=4e10,
    read_bytes_per_s=5e10,
    matmul_flops_per_s={"float32": 2e11},
    launch_s=2e-6,
    load=0.125,
    beaten=True,
)


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (lambda: options.integers("--batch", "4,1,4"), (4, 1)),
        (lambda: options.lengths("--isl", "1K,1024,2"), (1024, 2)),
        (lambda: options.names("ring,dense, ring"), ("ring", "dense")),
    ],
    ids=["integers", "lengths", "names"],
)
def test_a_value_that_is_repeated_is_measured_once(
    read: Callable[[], tuple[object, ...]], found: tuple[object, ...]
) -> None:
    assert read() == found


def run(*args: str) -> str:
    result = CliRunner().invoke(bench_app, args, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_a_run_keeps_the_scale_that_fitted_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1 << 40]
    monkeypatch.setattr("kllm.models.devices.free_bytes", lambda device: free[0])
    config = EngineConfig(model="llama-3-8b", device="cpu")
    kept = settled(config)
    free[0] = 1
    assert resolve(config).scale == "tiny"
    assert resolve(kept).scale == "full"


def overhead(monkeypatch: pytest.MonkeyPatch, output: Path, good: int) -> None:
    """Run a bench of two points, of which some are good and the others fail."""

    def measure(self: OverheadBench, ctx: Context, record: Record) -> None:
        for point in range(2):
            if point < good:
                record.add(f"overhead_us.{point}", 1.0, unit="us", direction="lower")
                record.row("sweep", {"running": point, "state": "ok"})
            else:
                reason = "out of host memory"
                record.row("sweep", {"running": point, "state": "failed", "reason": reason})

    monkeypatch.setattr(OverheadBench, "measure", measure)
    monkeypatch.setattr(OverheadBench, "conclude", lambda self, record: None)
    run("overhead", "--model", "llama-3-8b", "--scale", "tiny", "--output", str(output))


def test_a_bench_is_done_when_some_of_its_points_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overhead(monkeypatch, tmp_path, good=1)


def test_a_bench_that_could_measure_nothing_failed_and_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KllmError, match="nothing was measured: out of host memory") as raised:
        overhead(monkeypatch, tmp_path, good=0)
    assert raised.value.exit_code == 1
    assert len(list(tmp_path.glob("*.json"))) == 1


def shown(rows: Sequence[Mapping[str, object]]) -> tuple[str, list[object]]:
    """The heading and the columns of a table of these rows."""
    heading, table, footnotes = series_table(Series.of("sweep", rows), 80)
    assert footnotes == []
    return heading, [column.header for column in table.columns] if table else []


def test_columns_that_are_alike_in_all_rows_move_to_the_heading() -> None:
    about = {"model": "m", "chunk": 8192, "state": "ok"}
    rows = [about | {"prompt_tokens": isl, "ring_tokens_per_s": isl / 2} for isl in (4, 8)]
    assert shown(rows) == ("sweep, model m, chunk 8192", ["ISL", "ring tok/s"])
    assert shown(rows[:1]) == ("sweep, model m, chunk 8192", ["ISL", "ring tok/s"])


def test_figures_that_are_alike_stand_in_the_heading_alone() -> None:
    rows = [
        {"cp": 2, "chunk": chunk, "prompt_tokens": isl, "imbalance": 1.0, "measured": None}
        for chunk in (4, 8)
        for isl in (16, 32)
    ]
    assert shown(rows) == ("sweep, cp 2, imbalance 1 at every chunk and ISL", [])
    assert shown(rows[:2]) == ("sweep, cp 2, chunk 4, imbalance 1 at every ISL", [])
    assert shown(rows[:1]) == ("sweep, cp 2, chunk 4", ["ISL", "imbalance"])
    rows[0]["imbalance"] = 1.5
    assert shown(rows) == ("sweep, cp 2", ["chunk", "ISL", "imbalance"])


def test_a_heading_does_not_say_its_name_twice() -> None:
    rows = [{"sweep": "of batches", "batch": n, "step_ms": n / 2} for n in (1, 2)]
    assert shown(rows) == ("sweep, of batches", ["batch", "step ms"])


def test_figures_that_are_alike_stay_beside_the_only_column_that_differs() -> None:
    rows = [{"cp": 2, "requests": n, "pages": 8} for n in (1, 2)]
    assert shown(rows) == ("sweep, cp 2", ["requests", "pages"])


def test_points_that_all_failed_are_a_heading_and_its_footnote() -> None:
    rows = [
        {"prompt_tokens": isl, "state": "failed", "reason": "too little memory"} for isl in (4, 8)
    ]
    heading, table, footnotes = series_table(Series.of("sweep", rows), 80)
    assert (heading, table) == ("sweep, state failed (1) at every ISL", None)
    assert footnotes == ["(1) too little memory"]
    assert series_table(Series.of("sweep", rows[:1]), 80)[0] == "sweep, ISL 4, state failed (1)"


def test_reasons_are_footnotes_that_states_refer_to() -> None:
    reasons = (None, "it is too large", "it took too long", "it is too large")
    rows = [
        {"batch": n, "state": "failed" if why else "ok", "reason": why}
        for n, why in enumerate(reasons)
    ]
    _, table, footnotes = series_table(Series.of("sweep", rows), 80)
    assert table is not None
    assert [column.header for column in table.columns] == ["batch", "state"]
    assert list(table.columns[1].cells) == ["ok", "failed (1)", "failed (2)", "failed (1)"]
    assert footnotes == ["(1) it is too large", "(2) it took too long"]


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (80, (2, {"model": 13, "rate": 12})),  # all on one line
        (24, (2, {"model": 13, "rate": 9})),  # the heading on two
        (21, (1, {"model": 13, "rate": 7})),  # closer together
        (18, (1, {"model": 10, "rate": 7})),  # the name is cut, the number is not
        (13, (1, {})),  # there is no way
    ],
)
def test_words_and_numbers_stay_whole_while_there_is_room(
    width: int, expected: tuple[int, dict[str, int]]
) -> None:
    cells = {"model": ["model", "glm-5.2-dense"], "rate": ["output tok/s", "109,277"]}
    assert fit(cells, ["model"], width) == expected


def test_list_names_every_bench_and_its_deciding_variable() -> None:
    from kllm.bench.base import BENCHES

    text = run("list")
    assert all(name in text for name in BENCHES)
    assert json.loads(run("list", "--json"))["latency"]["sweeps"] == "batch"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["latency", "--batch", "1,two"], "--batch takes whole numbers"),
        (["latency", "--model", "no-such-model"], "no-such-model"),
        (["latency", "--osl", "1", "--scale", "tiny"], "2 output tokens"),
        (["latency", "--scale", "huge"], "huge"),
        (["throughput", "--workload", "1:2", "--scale", "tiny"], "1:2"),
        (["throughput", "--workload", "chat", "--isl", "5", "--scale", "tiny"], "--workload"),
        (["throughput", "--workload", "900000:9:1", "--scale", "tiny"], "shorter"),
        (["compare-power", "--slowdown", "-1"], "slowdown"),
        (["latency", "--kv-dtype", "int3"], "int3"),
        (["ring-vs-allgather", "--isl", "32Q"], "--isl takes tokens"),
        (["ring-vs-allgather", "--cp", "1"], "cp must be 2"),
        (["ring-vs-allgather", "--attention", "dense"], "scale tiny has none"),
    ],
)
def test_wrong_options_are_one_sentence(args: list[str], words: str) -> None:
    with pytest.raises(KllmError, match=words) as caught:
        CliRunner().invoke(bench_app, [*args, "--device", "cpu"], catch_exceptions=False)
    assert "\n" not in str(caught.value)


def test_progress_in_a_pipe_is_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    spoken = threading.Event()

    def say(console: object, line: str) -> None:
        lines.append(line)
        if "loading" in line:
            spoken.set()

    monkeypatch.setattr("kllm.cli.bench_progress.LINE_S", 0.01)
    monkeypatch.setattr("kllm.cli.bench_progress.say", say)
    with progress("latency") as hook:
        hook("loading", 1, 3)
        assert spoken.wait(30)
    assert lines[-1].startswith("latency: loading, 1 of 3, ")
    assert not any(thread.name == "progress" for thread in threading.enumerate())


def test_doctor_prints_one_document_with_json(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, bool]] = []
    points = ((4096.0, 1e-5), (1048576.0, 1e-3))

    def measured(
        device: str = "auto", *, fresh: bool = False, links: bool = False
    ) -> hardware.Ceilings:
        asked.append((fresh, links))
        found = LinkCeilings(ranks=2, backend="gloo", curves={"ring_shift": points})
        return replace(CEILINGS, links=found if links else None)

    monkeypatch.setattr(hardware, "ceilings", measured)
    app = typer.Typer()
    app.command()(doctor)
    result = CliRunner().invoke(app, ["--json", "--fresh"], catch_exceptions=False)
    document = json.loads(result.stdout)
    assert document["ceilings"]["matmul_flops_per_s"] == {"float32": 2e11}
    assert document["fingerprint"]["cores"] == hardware.detect().cores
    assert asked == [(True, False)]
    text = CliRunner().invoke(app, [], catch_exceptions=False).stdout
    assert "40.0 GB/s" in text
    assert "0.12; a run was faster than these; measured again in a calm moment" in text
    assert "gloo" not in text
    text = CliRunner().invoke(app, ["--links"], catch_exceptions=False).stdout
    assert "link, gloo" in text
    assert "1,024 KiB" in text
    assert "1,000 us" in text
    assert "1.0 GB/s" in text
    assert "0.200 TFLOP/s" in text


def test_advice_names_what_is_missing_and_idle_cores() -> None:
    library = hardware.Library(
        name="gguf", version=None, purpose="p", install="pip install gguf", affects_speed=False
    )
    machine = hardware.Machine(
        platform="Linux",
        cpu="c",
        cores=4,
        threads=1,
        memory_bytes=1,
        gpus=(),
        link="none",
        python="3",
        libraries=(library,),
    )
    text = " ".join(advice(machine))
    assert "No NVIDIA GPU" in text
    assert "1 of 4 cores" in text
    assert "gguf" in text


def test_a_tiny_model_is_warned_of_above_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(samples.bench())
    printed = capsys.readouterr().out
    assert printed.index("say nothing about a deployment") < printed.index("Verdict")
    print_result(samples.bench(scale="full"))
    assert "say nothing about a deployment" not in capsys.readouterr().out
