"""Workloads: reproducible, cut to fit, and read from options and traces."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from kllm.bench.workloads import (
    PRESETS,
    Lengths,
    TraceRow,
    Workload,
    fit,
    from_trace,
    parse,
    preset,
    read_trace,
)
from kllm.errors import ConfigError, DataError


def make(**changes: object) -> Workload:
    values = {"isl": Lengths(4, 20), "osl": Lengths(2, 9), "num_requests": 50, "concurrency": 4}
    return Workload(**{**values, **changes})  # type: ignore[arg-type]


def test_same_seed_gives_same_requests_and_another_seed_gives_others() -> None:
    first, again = list(make().items(97)), list(make().items(97))
    other = list(make(seed=1).items(97))
    assert first == again
    assert [i.prompt_ids for i in first] != [i.prompt_ids for i in other]


def test_lengths_and_tokens_stay_in_their_ranges_and_reach_both_ends() -> None:
    items = list(make(num_requests=500).items(7))
    isl = {len(item.prompt_ids) for item in items}
    osl = {item.max_tokens for item in items}
    assert (min(isl), max(isl), min(osl), max(osl)) == (4, 20, 2, 9)
    assert {t for item in items for t in item.prompt_ids} == set(range(7))


def test_open_loop_arrivals_have_the_asked_rate() -> None:
    shapes = make(concurrency=None, rate=5.0, num_requests=4000).shapes()
    gaps = np.diff([row.arrival_s for row in shapes])
    # The standard error of an exponential's mean from n draws is mean / sqrt(n).
    assert abs(gaps.mean() - 0.2) < 5 * 0.2 / np.sqrt(len(gaps))
    assert (gaps >= 0).all()


def test_closed_loop_requests_have_no_arrival_time() -> None:
    assert {row.arrival_s for row in make().shapes()} == {0.0}


@pytest.mark.parametrize(
    ("text", "isl", "osl", "concurrency", "rate"),
    [
        ("512:128:16", "512", "128", 16, None),
        ("256-768:64:4", "256-768", "64", 4, None),
        ("512:128:2.5/s", "512", "128", None, 2.5),
        ("512:128:.5/s", "512", "128", None, 0.5),
    ],
)
def test_parse_reads_lengths_and_load(
    text: str, isl: str, osl: str, concurrency: int | None, rate: float | None
) -> None:
    workload = parse(text)
    assert (str(workload.isl), str(workload.osl)) == (isl, osl)
    assert (workload.concurrency, workload.rate) == (concurrency, rate)


@pytest.mark.parametrize(
    "text",
    ["", "512", "512:128", "a:b:c", "512:128:-1", "768-256:8:1", "0:1:1", "1:1:0", "1:1:0/s"],
)
def test_parse_refuses_nonsense_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("max_model_len", [128, 2048, 1 << 20])
@pytest.mark.parametrize("small", [True, False])
def test_presets_fit_the_model(name: str, max_model_len: int, small: bool) -> None:
    workload = preset(name, max_model_len=max_model_len, small=small)
    assert workload.max_tokens <= max_model_len
    assert max(r.isl + r.osl for r in workload.shapes()) <= max_model_len


def test_small_presets_keep_the_ratio_of_input_to_output() -> None:
    big = preset("agent", max_model_len=1 << 20, small=False)
    small = preset("agent", max_model_len=1 << 20, small=True)
    assert small.isl.mean / small.osl.mean == pytest.approx(big.isl.mean / big.osl.mean, rel=0.02)
    assert small.isl.mean < big.isl.mean / 10


def test_fit_leaves_a_workload_that_fits_alone() -> None:
    assert fit(make(), 29) is not None
    assert fit(make(), 29) == make()
    assert fit(make(), 28) != make()


def test_contradicting_loads_are_refused() -> None:
    with pytest.raises(ConfigError, match="not both"):
        make(rate=1.0)
    with pytest.raises(ConfigError, match="needs a concurrency"):
        make(concurrency=None)


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:47.6805900,396,0\n"
    "2023-11-16 18:15:48.6805900,879,55\n"
)


def test_csv_trace_gives_lengths_and_arrivals_and_drops_empty_requests(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode()))
    assert read_trace(path) == [TraceRow(0.0, 374, 44), TraceRow(pytest.approx(2.0), 879, 55)]


def test_jsonl_trace_is_sorted_by_arrival(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    rows = [(3000, 50, 5), (0, 60, 6)]
    lines = [
        json.dumps({"timestamp": t, "input_length": i, "output_length": o, "hash_ids": []})
        for t, i, o in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    assert read_trace(path) == [TraceRow(0.0, 60, 6), TraceRow(3.0, 50, 5)]


def test_trace_workload_uses_the_trace_in_order(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    workload = from_trace(path)
    assert [(r.isl, r.osl) for r in workload.shapes()] == [(374, 44), (879, 55)]
    assert workload.shapes()[1].arrival_s == pytest.approx(2.0)
    assert workload.max_tokens == 879 + 55
    assert {r.arrival_s for r in from_trace(path, concurrency=2).shapes()} == {0.0}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2\n", "line 2"),
        ("a.csv", "when,in,out\n2023-11-16 18:15:46,1,2\n", "TIMESTAMP"),
        ("a.jsonl", '{"timestamp": 1}\n', "line 1"),
        ("a.jsonl", "", "no request"),
        ("a.txt", "", "neither"),
    ],
)
def test_broken_trace_names_the_place(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=words):
        read_trace(tmp_path / name)


def test_missing_trace_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
