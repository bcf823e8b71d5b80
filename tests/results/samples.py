"""Small, complete results for the tests of storing, comparing and reporting."""

from collections.abc import Sequence
from typing import Any

from kllm.results.schema import Fingerprint, Gpu, Metric, RunResult, Series

MACHINE = Fingerprint(
    platform="Linux-x86_64",
    cpu="Test CPU",
    cores=2,
    memory_gib=16.0,
    gpus=(Gpu(name="Test GPU", memory_gib=80.0, driver="600.1", sm_clock_mhz=(1200.0, 1980.0)),),
    link="none",
    python="3.11.9",
    libraries={"torch": "2.13.0"},
)


def times(values: Sequence[float]) -> Metric:
    return Metric.of(values, unit="ms", direction="lower")


def rates(values: Sequence[float]) -> Metric:
    return Metric.of(values, unit="tok/s", direction="higher")


def bench(**changes: Any) -> RunResult:
    """A latency bench with a sweep."""
    rows = [
        {"batch": b, "ttft_ms": 4.0 + b, "tpot_ms": 2.0 + b / 8, "step_ms": 2.0 + b / 8,
         "floor_ms": 1.0 + b / 16, "ratio": 2.0, "state": "ok"}
        for b in (1, 2, 4, 8, 16)
    ]  # fmt: skip
    rows.append({"batch": 32, "state": "out of device memory"})
    fields: dict[str, Any] = {
        "run_id": "r1",
        "command": ("kllm", "bench", "latency"),
        "kind": "bench",
        "name": "latency",
        "started_at": "2026-01-02T03:04:05Z",
        "model": "tiny-model",
        "scale": "tiny",
        "dtype": "float32",
        "fidelity": "real",
        "kllm_version": "0.1.0",
        "commit": "abc1234",
        "fingerprint": MACHINE,
        "layout": {"tp": 1},
        "workload": {"isl": 128, "osl": 32},
        "settings": {"page_size": 16},
        "metrics": {
            "tpot_ms": times([2.0, 2.1, 2.05, 1.98, 2.02, 2.03]),
            "output_tokens_per_s": rates([500.0, 495.0, 503.0, 498.0, 501.0, 499.0]),
        },
        "series": (Series.of("sweep", rows, {"ttft_ms": "ms", "step_ms": "ms"}),),
        "verdict": "Decode runs at 2.0 times its floor.",
    }
    return RunResult(**(fields | changes))


def tune(**changes: Any) -> RunResult:
    """A study of twelve trials: one failed, one was pruned."""
    trials: list[dict[str, Any]] = []
    for n in range(12):
        state = {3: "failed", 7: "pruned"}.get(n, "complete")
        row: dict[str, Any] = {"number": n, "state": state, "param.chunk_size": 64 << (n % 4)}
        if state == "complete":
            row |= {
                "objective": 100.0 + 9 * ((n * 5) % 12),
                "metric.tpot_p95_ms": 20.0 + 3 * ((n * 7) % 12),
                "metric.output_tokens_per_s": 300.0 + 40 * ((n * 7) % 12) + 15 * (n % 3),
            }
        else:
            row["reason"] = "out of device memory" if state == "failed" else "queue kept growing"
        trials.append(row)
    units = {
        "objective": "req/s",
        "metric.tpot_p95_ms": "ms",
        "metric.output_tokens_per_s": "tok/s",
    }
    importance = [
        {"parameter": "chunk_size", "importance": 0.62},
        {"parameter": "max_batch", "importance": 0.3},
        {"parameter": "kv_dtype", "importance": 0.08},
    ]
    fields = {
        "kind": "tune",
        "name": "tune",
        "metrics": {
            "goodput_requests_per_s": Metric.of([4.0, 4.1], unit="req/s", direction="higher")
        },
        "series": (
            Series.of("trials", trials, units),
            Series.of("importance", importance),
        ),
    }
    return bench(**(fields | changes))
