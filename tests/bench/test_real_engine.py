"""Benches on the real engine with tiny models: every command's path, end to end."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kllm.bench.base import Context
from kllm.bench.latency import LatencyBench
from kllm.bench.overhead import OverheadBench
from kllm.bench.run import run_bench
from kllm.bench.serve_loop import run_workload
from kllm.bench.throughput import ThroughputBench
from kllm.bench.vs_transformers import TransformersBench
from kllm.bench.workloads import Lengths, Workload, parse
from kllm.config import EngineConfig, SchedulerConfig
from kllm.engine.engine import Engine
from kllm.errors import ConfigError
from kllm.hardware import Ceilings
from tests.bench.rows import rows_of

TINY = EngineConfig(model="llama-3-8b", scale="tiny", device="cpu")
CEILINGS = Ceilings(
    device="cpu",
    copy_bytes_per_s=1e12,
    read_bytes_per_s=1e12,
    matmul_flops_per_s={"float32": 1e13},
    launch_s=1e-6,
)


@pytest.fixture(autouse=True)
def ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kllm.bench.latency.ceilings", lambda device: CEILINGS)


def test_closed_loop_serves_every_request_to_its_length() -> None:
    engine = Engine(
        EngineConfig(
            model="llama-3-8b",
            scale="tiny",
            device="cpu",
            max_model_len=64,
            scheduler=SchedulerConfig(max_batch=4, token_budget=16),
        )
    )
    workload = Workload(
        isl=Lengths(5, 40), osl=Lengths(1, 12), num_requests=12, concurrency=6, seed=3
    )
    run = run_workload(engine, workload)
    engine.close()
    assert run.complete
    assert sorted((r.isl, r.osl) for r in run.rows) == sorted(
        (r.isl, r.osl) for r in workload.shapes()
    )
    assert all(0 < r.ttft_s <= r.e2e_s for r in run.rows)
    assert max(s.running for s in run.steps) == 4
    assert max(s.num_tokens for s in run.steps) <= 16


def test_latency_is_above_its_floor_at_every_batch(tmp_path: Path) -> None:
    bench = LatencyBench(batches=(1, 3), isl=16, osl=8)
    result, _ = run_bench(bench, Context(config=TINY, repeats=2), tmp_path)
    rows = rows_of(result, "sweep")
    assert [row["state"] for row in rows] == ["ok", "ok"]
    assert all(row["achieved_over_floor"] > 1 for row in rows)
    assert result.scale == "tiny"
    assert result.settings["device"] == "cpu"


@pytest.mark.parametrize("text", ["8-16:2-5:3", "8:4:200/s"])
def test_throughput_counts_requests_of_both_kinds_of_load(tmp_path: Path, text: str) -> None:
    bench = ThroughputBench(loads=[parse(text, num_requests=6)])
    result, _ = run_bench(bench, Context(config=TINY, repeats=1), tmp_path)
    [row] = rows_of(result, "sweep")
    assert row["state"] == "ok"
    requests = result.find_series("requests")
    assert requests is not None
    assert len(requests.rows or ()) == 6


def test_a_load_beyond_the_kv_memory_is_marked(tmp_path: Path) -> None:
    bench = LatencyBench(batches=(1, 2, 8), isl=60, osl=4)
    small = EngineConfig(
        model="llama-3-8b",
        scale="tiny",
        device="cpu",
        cache=type(TINY.cache)(memory_bytes=640_000),
    )
    result, _ = run_bench(bench, Context(config=small, repeats=1), tmp_path)
    states = [row["state"] for row in rows_of(result, "sweep")]
    assert states[0] == "ok"
    assert states[-1] == "failed"


def test_overhead_is_reported_for_both_parts(tmp_path: Path) -> None:
    bench = OverheadBench(running=3, batch=2)
    result, _ = run_bench(bench, Context(config=TINY, repeats=1), tmp_path)
    assert [row["running"] for row in rows_of(result, "sweep")] == [1, 2, 3]
    assert 0 < result.metrics["overhead_share.batch2"].values[0] < 1
    assert result.verdict is not None
    assert "target of" in result.verdict


def test_both_sides_of_the_transformers_bench_make_the_same_tokens(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    ours = EngineConfig(model=str(tmp_path / "model"), device="cpu", dtype="float32")
    result, _ = run_bench(TransformersBench(osl=5), Context(config=ours, repeats=3), tmp_path)
    cases = result.find_series("cases")
    assert cases is not None
    same = [c.name for c in cases.columns].index("same_tokens")
    assert [row[same] for row in cases.rows or ()] == [1.0, 1.0]
    assert len(result.metrics["ratio.batch1"].values) == 3


def test_random_weights_cannot_be_compared_with_transformers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="random weights"):
        run_bench(TransformersBench(), Context(config=TINY), tmp_path)
    assert list(tmp_path.iterdir()) == []
