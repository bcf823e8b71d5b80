"""Results of other load generators are read, named and compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from kllm.errors import DataError
from kllm.results import store
from kllm.results.compare import compare
from kllm.results.foreign import load_any
from tests.results import samples

VLLM = {
    "date": "20260102-030405",
    "endpoint_type": "openai",
    "backend": "openai",
    "label": None,
    "model_id": "org/model",
    "tokenizer_id": "org/model",
    "num_prompts": 100,
    "request_rate": "inf",
    "burstiness": 1.0,
    "max_concurrency": 8,
    "duration": 12.5,
    "completed": 100,
    "request_throughput": 8.0,
    "output_throughput": 1024.0,
    "total_token_throughput": 2048.0,
    "mean_ttft_ms": 50.0,
    "std_ttft_ms": 5.0,
    "p99_ttft_ms": 80.0,
    "mean_tpot_ms": 7.0,
    "mean_e2el_ms": 900.0,
}
SGLANG = (
    '{"backend": "sglang", "dataset_name": "random", "request_rate": Infinity, '
    '"max_concurrency": 8, "random_input_len": 512, "duration": 3.5, "output_throughput": %f, '
    '"mean_ttft_ms": 40.0, "mean_tpot_ms": 6.5, "mean_e2e_latency_ms": 800.0, '
    '"accept_length": null}\n'
)
AIPERF: dict[str, Any] = {
    "schema_version": "1.0",
    "aiperf_version": "0.13.0",
    "input_config": {"endpoint": {"model_names": ["org/model"]}, "loadgen": {"concurrency": 8}},
    "start_time": "2026-01-02T03:04:05",
    "time_to_first_token": {"unit": "ms", "avg": 61.0, "p99": 90.0},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 990.0},
}


def write(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_vllm_serve_result_keeps_values_and_workload(tmp_path: Path) -> None:
    (found,) = load_any(write(tmp_path / "v.json", VLLM))
    assert found.model == "org/model"
    assert found.workload["request_rate"] == "inf"
    assert found.metrics["ttft_mean_ms"].values == (50.0,)
    assert found.metrics["e2e_mean_ms"].median == 900.0
    assert found.metrics["ttft_std_ms"].direction == "none"
    assert found.metrics["output_tokens_per_s"].direction == "higher"


def test_sglang_lines_with_infinity_become_one_result_each(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text("".join(SGLANG % (1000 + i) for i in range(6)))
    found = load_any(path)
    assert [r.metrics["output_tokens_per_s"].median for r in found] == [1000 + i for i in range(6)]
    assert "accept_length" not in found[0].metrics
    assert found[0].workload["request_rate"] == "inf"


@pytest.mark.parametrize("newer", [False, True])
def test_aiperf_result_keeps_values_and_model(tmp_path: Path, newer: bool) -> None:
    config = {"models": {"items": [{"name": "org/model"}]}} if newer else AIPERF["input_config"]
    (found,) = load_any(write(tmp_path / "a.json", AIPERF | {"input_config": config}))
    assert found.model == "org/model"
    assert found.metrics["ttft_p99_ms"].median == 90.0
    assert found.metrics["output_tokens_per_s"].unit == "tokens/sec"


def test_repeated_foreign_runs_can_be_compared(tmp_path: Path) -> None:
    sides = []
    for factor in (1.0, 0.8):
        path = tmp_path / f"{factor}.jsonl"
        path.write_text("".join(SGLANG % (factor * (1000 + i)) for i in range(10)))
        sides.append(load_any(path))
    assert compare(*sides).regressed == ("output_tokens_per_s",)


def test_single_foreign_runs_cannot_tell(tmp_path: Path) -> None:
    base = load_any(write(tmp_path / "a.json", VLLM))
    new = load_any(write(tmp_path / "b.json", VLLM | {"mean_ttft_ms": 500.0}))
    assert {r.judgement.verdict for r in compare(base, new).rows} <= {"can't tell", "not judged"}


def test_folder_gives_its_results_and_skips_other_json(tmp_path: Path) -> None:
    store.save(samples.bench(), tmp_path)
    write(tmp_path / "config.json", {"architectures": ["X"]})
    write(tmp_path / "v.json", VLLM)
    assert sorted(r.name for r in load_any(tmp_path)) == ["latency", "vllm bench serve"]


def test_damaged_result_in_a_folder_is_reported(tmp_path: Path) -> None:
    path = store.save(samples.bench(), tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=path.name):
        load_any(tmp_path)


def test_unfinished_run_is_read_from_its_journal(tmp_path: Path) -> None:
    with store.RunJournal(tmp_path, samples.bench(metrics={}, series=())) as journal:
        journal.record("tpot_ms", 2.5, unit="ms", direction="lower")
    (found,) = load_any(journal.path)
    assert found.metrics["tpot_ms"].values == (2.5,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no JSON object"),
        ("[1, 2]", "no JSON object"),
        ("{]", "not JSON"),
        ("\xff", "not JSON"),
        ('{"a": 1}', "neither a kLLM result nor"),
        (json.dumps(VLLM | {"mean_ttft_ms": "fast"}), "unusable field of a vllm result"),
        (json.dumps(AIPERF | {"time_to_first_token": 3}), "unusable field of a aiperf result"),
    ],
)
def test_unknown_file_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=words) as caught:
        load_any(path)
    assert "x.json" in str(caught.value)


def test_missing_path_and_empty_folder_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no results"):
        load_any(tmp_path)
    with pytest.raises(DataError, match="cannot read"):
        load_any(tmp_path / "none.json")
