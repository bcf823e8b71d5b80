"""What a step costs besides the model, with ranks in processes of their own."""

from dataclasses import replace
from pathlib import Path

import pytest

from kllm.bench import overhead
from kllm.bench.base import Context
from kllm.bench.overhead import OverheadBench
from kllm.bench.record import Record, Subject
from kllm.bench.run import run_bench
from kllm.config import EngineConfig
from kllm.parallel.layout import parse
from tests.bench.rows import rows_of

TINY = EngineConfig(model="deepseek-v4", scale="tiny", device="cpu", load="random")


@pytest.mark.parametrize("layout", ["dp=2,ep=2", "cp=2"])
def test_what_ranks_are_told_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(overhead, "STEPS", 8)
    monkeypatch.setattr(overhead, "MODEL_STEPS", 4)
    monkeypatch.setattr(overhead, "WARMUP_STEPS", 2)
    config = replace(TINY, parallel=parse(layout))
    bench = OverheadBench(running=2, batch=2)
    result, _ = run_bench(bench, Context(config=config, repeats=1), tmp_path)
    for name, count in (("sweep", 2), ("model", 1)):
        rows = rows_of(result, name)
        assert len(rows) == count
        for row in rows:
            assert "reason" not in row
            assert row["overhead_us"] > 10, "two hops of a socket, for certain"
    assert 0 < result.metrics["overhead_share.batch2"].values[0] < 1


@pytest.mark.parametrize(
    ("overhead_us", "share", "words"),
    [
        (77, 0.026, ("77 us", "within the target of 300 us", "within the target of 10%")),
        (512, 0.026, ("512 us", "above the target of 300 us", "within the target of 10%")),
        (77, 0.31, ("31.0%", "within the target of 300 us", "above the target of 10%")),
    ],
)
def test_the_verdict_says_whether_the_targets_are_met(
    tmp_path: Path, overhead_us: float, share: float, words: tuple[str, ...]
) -> None:
    record = Record(Subject(name="n", model="m", scale="tiny", dtype="float32"), tmp_path)
    with record:
        record.row("sweep", {"running": 256, "overhead_us": overhead_us})
        record.row("model", {"batch": 64, "overhead_share": share})
        OverheadBench().conclude(record)
    assert record.verdict is not None
    for part in words:
        assert part in record.verdict
