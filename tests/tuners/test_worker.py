"""The real worker measures the real engine, and says why when it cannot."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from kllm.bench.workloads import Lengths, Workload
from kllm.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from kllm.tuners.objective import Slo
from kllm.tuners.outcome import measure
from kllm.tuners.trial import WorkerRunner
from kllm.tuners.worker import Models

WORKLOAD = Workload(isl=Lengths(8, 40), osl=Lengths(3, 6), num_requests=6, concurrency=3)
CONFIG = EngineConfig(model="deepseek-v4", scale="tiny", device="cpu")


@pytest.fixture(scope="module")
def runner() -> Iterator[WorkerRunner]:
    made = WorkerRunner()
    yield made
    made.close()


def test_trial_is_a_real_run_with_every_request_and_progress(runner: WorkerRunner) -> None:
    outcome = runner.run(CONFIG, WORKLOAD)
    assert outcome.state == "complete", outcome.reason
    assert len(outcome.requests) == outcome.num_requests == 6
    assert sum(row.osl for row in outcome.requests) == outcome.num_output_tokens
    assert outcome.ticks[-1].output_tokens == outcome.num_output_tokens
    assert outcome.run_s > 0
    assert outcome.peak_memory_bytes is not None
    metrics = measure(outcome, Slo())
    assert metrics["output_tokens_per_s"] > 0
    assert metrics["e2e_p50_ms"] >= metrics["ttft_p50_ms"] > 0


def test_weights_are_kept_while_settings_change(runner: WorkerRunner) -> None:
    runner.run(CONFIG, WORKLOAD)
    other = replace(CONFIG, scheduler=SchedulerConfig(max_batch=2, token_budget=16))
    outcome = runner.run(other, WORKLOAD)
    assert outcome.state == "complete", outcome.reason
    assert max(tick.running for tick in outcome.ticks) <= 2


def test_network_is_loaded_again_only_when_it_is_another_one() -> None:
    models = Models()
    loaded = models.get(CONFIG)
    scheduler, cache = SchedulerConfig(max_batch=2, token_budget=16), CacheConfig(dtype="bfloat16")
    other = replace(CONFIG, scheduler=scheduler, cache=cache, graphs=False)
    assert models.get(other) is loaded
    assert models.get(replace(CONFIG, seed=1)) is not loaded


def test_network_is_kept_between_both_kinds_of_context_parallelism() -> None:
    models = Models()
    ring = replace(CONFIG, parallel=ParallelConfig(cp=2, cp_kind="ring"), fidelity="rank-slice")
    gather = replace(ring, parallel=ParallelConfig(cp=2, cp_kind="all_gather"))
    loaded = models.get(ring)
    assert models.get(gather) is loaded
    assert models.get(replace(ring, parallel=ParallelConfig(dp=2))) is not loaded
    assert models.get(replace(ring, link="pcie5")) is not loaded


def test_attention_is_chosen_again_for_other_kv() -> None:
    config = EngineConfig(model="llama-3-8b", scale="tiny", device="cpu")
    models = Models()
    model = models.get(config)
    before = model.attention
    assert models.get(replace(config, scheduler=SchedulerConfig(max_batch=2))).attention is before
    again = models.get(replace(config, cache=CacheConfig(dtype="fp8")))
    assert again is model
    assert again.attention is not before


@pytest.mark.parametrize("fidelity", ["rank-slice", "real"])
def test_trial_of_a_layout_says_what_it_is(runner: WorkerRunner, fidelity: str) -> None:
    layout = ParallelConfig(dp=2, ep=2)
    config = replace(CONFIG, parallel=layout, fidelity=fidelity)
    outcome = runner.run(config, WORKLOAD)
    assert outcome.state == "complete", outcome.reason
    assert (outcome.fidelity, outcome.ranks) == (fidelity, 2)
    assert len(outcome.requests) == outcome.num_requests == 6
    own = sum(row.osl for row in outcome.requests)
    assert outcome.ticks[-1].output_tokens == outcome.num_output_tokens == own
    other = replace(config, scheduler=SchedulerConfig(max_batch=2))
    assert runner.run(other, WORKLOAD).state == "complete"


def test_config_that_the_engine_refuses_is_a_failed_trial_with_its_sentence(
    runner: WorkerRunner,
) -> None:
    tight = replace(CONFIG, cache=CacheConfig(memory_bytes=1000))
    outcome = runner.run(tight, WORKLOAD)
    assert outcome.state == "failed"
    assert "KV memory" in outcome.reason
    assert runner.run(CONFIG, WORKLOAD).state == "complete"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits data memory by rlimit")
def test_allocation_beyond_the_memory_limit_is_a_failed_trial(runner: WorkerRunner) -> None:
    assert runner.run(CONFIG, WORKLOAD).state == "complete"
    runner.memory_limit_bytes = 4 << 30
    huge = CacheConfig(memory_bytes=64 << 30)
    wide = SchedulerConfig(max_batch=32768, token_budget=32768)
    outcome = runner.run(replace(CONFIG, cache=huge, scheduler=wide), WORKLOAD)
    assert outcome.state == "failed"
    assert "out of host memory" in outcome.reason
    assert runner.run(CONFIG, WORKLOAD).state == "complete"


PARENT = """
from kllm.tuners.trial import WORKER, _Worker
worker = _Worker(WORKER)
print(worker.process.pid, flush=True)
worker.process.wait()
"""


def test_worker_ends_with_a_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    assert psutil.wait_procs([worker], timeout=30)[1] == []
