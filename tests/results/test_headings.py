"""Names of columns, and what is said of a result's fidelity."""

import pytest

from kllm.results.headings import fidelity, heading, tiny_warning
from kllm.results.schema import Series
from tests.results import samples


@pytest.mark.parametrize(
    ("name", "unit", "words"),
    [
        ("ring_peak_gib", "GiB", "ring peak GiB"),
        ("all_gather_tokens_per_s", "tokens/s", "all-gather tok/s"),
        ("rate_per_s", "", "rate/s"),
        ("tflops_per_s", "TFLOP/s", "TFLOP/s"),
        ("prompt_tokens", "", "ISL"),
        ("pass_q_below_pct", "%", "pass-Q below %"),
        ("ttft_p50_ms", "ms", "TTFT p50 ms"),
        ("goodput", "tokens/s", "goodput (tokens/s)"),
        ("computed_tokens", "tokens", "computed tokens"),
        ("layers", "", "layers"),
    ],
)
def test_a_heading_has_words_and_the_unit_once(name: str, unit: str, words: str) -> None:
    assert heading(name, unit) == words


@pytest.mark.parametrize(
    ("kind", "device", "words"),
    [
        ("real", "cpu", "real (4 processes on this CPU)"),
        ("real", "cuda:0", "real (4 GPUs)"),
        ("rank-slice", "cuda:0", "rank-slice (one of 4 ranks)"),
        ("modelled", "cuda:0", "modelled"),
    ],
)
def test_the_fidelity_says_what_ran(kind: str, device: str, words: str) -> None:
    about = {"fidelity": kind, "layout": {"cp": 2, "dp": 2}, "settings": {"device": device}}
    assert fidelity(samples.bench(**about)) == words


def test_a_bench_of_several_layouts_names_no_number_of_ranks() -> None:
    assert fidelity(samples.bench(fidelity="rank-slice", layout={"tp": 1})) == "rank-slice"


def test_tables_of_another_fidelity_are_announced() -> None:
    rows = Series.of("trace", [{"fidelity": "real"}, {"fidelity": "modelled"}])
    pair = Series.of("pair", [{"rank-slice": 1.0, "modelled": 2.0}])
    result = samples.bench(fidelity="modelled", series=(rows, pair))
    assert fidelity(result) == "modelled; real and rank-slice where a table says so"


@pytest.mark.parametrize(
    ("scale", "kind", "words"),
    [
        ("tiny", "bench", "shows that the bench runs"),
        ("tiny", "tune", "shows that the study runs"),
        ("layers:4", "bench", ""),
        ("full", "tune", ""),
    ],
)
def test_only_a_tiny_model_is_warned_of(scale: str, kind: str, words: str) -> None:
    warning = tiny_warning(samples.bench(scale=scale, kind=kind))
    assert words in warning
    assert bool(warning) is bool(words)
