"""Results of other load generators, read as kLLM results.

vLLM `bench serve --save-result` JSON, SGLang `bench_serving` JSONL (one line a run, `Infinity`
included) and aiperf `profile_export_aiperf.json`. Each gives one value a metric and run, so a
comparison needs several files or lines a side. Metric names become kLLM's; what they mean is the
tool's: nothing is recomputed.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kllm.errors import DataError
from kllm.results import store
from kllm.results.schema import Direction, Metric, RunResult, plain

Document = Mapping[str, Any]

_LATENCIES = ("ttft", "tpot", "itl", "e2el", "e2e_latency")
_STATISTICS = ("mean", "median", "std", "p50", "p90", "p95", "p99")
_RATES = {  # key: (kLLM's name, unit)
    "request_throughput": ("requests_per_s", "requests/s"),
    "request_goodput": ("goodput_requests_per_s", "requests/s"),
    "output_throughput": ("output_tokens_per_s", "tokens/s"),
    "input_throughput": ("input_tokens_per_s", "tokens/s"),
    "total_token_throughput": ("total_tokens_per_s", "tokens/s"),
    "total_throughput": ("total_tokens_per_s", "tokens/s"),
    "accept_length": ("accept_length", "tokens"),
    "slo_attainment": ("slo_attainment", "share"),
}
_AIPERF: dict[
    str, tuple[str, tuple[str, ...], Direction]
] = {  # key: (kLLM's name, statistics kept, direction)
    "time_to_first_token": ("ttft", ("avg", "p50", "p90", "p95", "p99"), "lower"),
    "inter_token_latency": ("itl", ("avg", "p50", "p90", "p95", "p99"), "lower"),
    "request_latency": ("e2e", ("avg", "p50", "p90", "p95", "p99"), "lower"),
    "request_throughput": ("requests_per_s", ("avg",), "higher"),
    "output_token_throughput": ("output_tokens_per_s", ("avg",), "higher"),
    "output_token_throughput_per_user": ("output_tokens_per_s_per_user", ("avg",), "higher"),
    "request_error_rate": ("error_rate", ("avg",), "lower"),
}
_VLLM_WORKLOAD = ("num_prompts", "request_rate", "burstiness", "max_concurrency")
_SGLANG_WORKLOAD = (
    "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len",
    "random_input_len", "random_output_len", "random_range_ratio",
)  # fmt: skip


def load_any(path: Path) -> list[RunResult]:
    """Read every result that a path holds: a file of a known format, a journal, or a folder.

    Raises:
        DataError: unreadable, of no known format, or a folder without results.
    """
    if path.is_dir():
        files = store.list_results(path)
        found = [r for file in files if _is_result(file) for r in load_any(file)]
        if not found:
            raise DataError(f"{path} holds no results")
        return found
    if path.name.endswith(store.PARTIAL):
        return [store.recover(path)]
    raw = store.read_bytes(path)
    documents = _documents(path, raw)
    if len(documents) == 1 and "schema_version" in documents[0] and "run_id" in documents[0]:
        return [store.load(path)]
    return [_adapt(path, d, index) for index, d in enumerate(documents)]


def _is_result(path: Path) -> bool:
    """Whether a file of a folder is worth reading: others (configs, schemas) lie beside them."""
    try:
        documents = _documents(path, store.read_bytes(path))
    except DataError:
        return True  # a damaged result must be reported and not skipped
    return any("schema_version" in d or _kind(d) for d in documents) and not any(
        "$schema" in d for d in documents
    )


def _documents(path: Path, raw: bytes) -> list[Document]:
    try:
        text = raw.decode()
        try:
            documents = [json.loads(text)]
        except json.JSONDecodeError:
            documents = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not documents or not all(isinstance(d, dict) for d in documents):
        raise DataError(f"{path} is not a result: it holds no JSON object")
    return documents


def _kind(document: Document) -> str | None:
    if "aiperf_version" in document:
        return "aiperf"
    if "mean_ttft_ms" in document:
        return "vllm" if "model_id" in document else "sglang"
    return None


def _adapt(path: Path, document: Document, index: int) -> RunResult:
    kind = _kind(document)
    if kind is None:
        raise DataError(
            f"{path} is neither a kLLM result nor one of vLLM bench serve, SGLang bench_serving "
            f"or aiperf"
        )
    run_id = f"{path.stem}-{index}" if index else path.stem
    try:
        return {"vllm": _vllm, "sglang": _sglang, "aiperf": _aiperf}[kind](run_id, document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: unusable field of a {kind} result: {error}") from error


def _result(run_id: str, tool: str, **fields: Any) -> RunResult:
    common = {"command": (tool,), "kind": "load", "name": tool, "fidelity": "real"}
    unknown = {"scale": "unknown", "dtype": "unknown"}
    return RunResult(run_id=run_id, **(common | unknown | fields))


def _single(value: object, unit: str, direction: Direction) -> Metric:
    # One number for a whole run of the tool, so a second one comes from another process.
    return Metric.of([float(str(value))], unit=unit, direction=direction, sample="process")


def _seconds(value: object) -> float | None:
    return None if value is None else float(str(value))


def _latency_and_rate_metrics(document: Document) -> dict[str, Metric]:
    metrics = {}
    for latency in _LATENCIES:
        for statistic in _STATISTICS:
            value = document.get(f"{statistic}_{latency}_ms")
            if value is not None:
                name = "e2e" if latency.startswith("e2e") else latency
                direction: Direction = "none" if statistic == "std" else "lower"
                metrics[f"{name}_{statistic}_ms"] = _single(value, "ms", direction)
    for key, (name, unit) in _RATES.items():
        if document.get(key) is not None:
            metrics[name] = _single(document[key], unit, "higher")
    return metrics


def _pick(document: Document, keys: Sequence[str]) -> dict[str, Any]:
    return {k: plain(document[k]) for k in keys if document.get(k) is not None}


def _vllm(run_id: str, document: Document) -> RunResult:
    return _result(
        run_id,
        "vllm bench serve",
        started_at=str(document.get("date", "unknown")),
        duration_s=_seconds(document.get("duration")),
        model=str(document["model_id"]),
        workload=_pick(document, _VLLM_WORKLOAD),
        settings=_pick(document, ("backend", "endpoint_type", "label")),
        metrics=_latency_and_rate_metrics(document),
    )


def _sglang(run_id: str, document: Document) -> RunResult:
    server = document.get("server_info") or {}
    model = server.get("model_path") if isinstance(server, dict) else None
    return _result(
        run_id,
        "sglang bench_serving",
        started_at="unknown",
        duration_s=_seconds(document.get("duration")),
        model=str(model or "unknown"),
        workload=_pick(document, _SGLANG_WORKLOAD),
        settings=_pick(document, ("backend", "tag")),
        metrics=_latency_and_rate_metrics(document),
    )


def _aiperf(run_id: str, document: Document) -> RunResult:
    config = document.get("input_config") or {}
    # Up to 0.13 the names are a list of the endpoint; later versions have a list of models.
    listed = (config.get("models") or {}).get("items") or []
    models = (config.get("endpoint") or {}).get("model_names") or [m["name"] for m in listed]
    metrics = {}
    for key, (name, statistics, direction) in _AIPERF.items():
        values = document.get(key) or {}
        unit = str(values.get("unit", ""))
        for statistic in statistics:
            if values.get(statistic) is not None:
                suffix = "mean" if statistic == "avg" else statistic
                full = f"{name}_{suffix}_{unit}" if len(statistics) > 1 else name
                metrics[full] = _single(values[statistic], unit, direction)
    return _result(
        run_id,
        "aiperf",
        started_at=str(document.get("start_time", "unknown")),
        model=", ".join(map(str, models)) or "unknown",
        workload=plain(config.get("loadgen") or {}),
        metrics=metrics,
    )
