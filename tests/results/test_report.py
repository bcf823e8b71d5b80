"""Reports: complete, self-contained, robust to what a result lacks."""

import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kllm.results import charts, store
from kllm.results.chart_style import axis_label, short
from kllm.results.report import render_html, render_markdown
from kllm.results.schema import LEFT_OUT, RunResult, Series
from kllm.results.study_charts import pareto_front
from kllm.results.sweep_charts import crossing, sweep_chart
from tests.results import samples

STUDY_TITLES = [
    "Trade-off of latency and throughput",
    "Objective by trial",
    "Parameters that mattered",
]


def titles(result: RunResult) -> list[str]:
    return [title for title, _ in charts.charts_of(result)]


class References(HTMLParser):
    """Collects what a page would fetch, and its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe"):
            self.fetched.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.fetched.append(f"{tag} {value}")


def test_page_fetches_nothing() -> None:
    html = render_html([samples.tune(), samples.bench()])
    page = References()
    page.feed(html)
    assert page.fetched == []
    assert not re.search(r"url\((?!#)", html)


def test_page_has_verdict_first_then_charts_then_machine() -> None:
    html = render_html([samples.bench(boundary="Above batch 16 it loses.")])
    order = [
        html.index(text)
        for text in ("2.0 times its floor", "Above batch 16", "<svg", "tpot_ms</td>", "Test GPU")
    ]
    assert order == sorted(order)


def test_fidelity_is_printed_with_its_meaning() -> None:
    result = samples.bench(fidelity="modelled")
    for text in (render_html([result]), render_markdown([result])):
        assert "modelled" in text
        assert "nothing ran" in text


@pytest.mark.parametrize("render", [render_html, render_markdown])
def test_warning_of_a_tiny_model_stands_above_the_verdict(
    render: Callable[[Sequence[RunResult]], str],
) -> None:
    warning, verdict = "say nothing about a deployment", "2.0 times its floor"
    tiny = render([samples.bench()])
    assert tiny.index(warning) < tiny.index(verdict)
    assert warning not in render([samples.bench(scale="full")])


def test_text_of_a_result_cannot_inject_markup() -> None:
    result = samples.bench(verdict="<script>alert(1)</script>", model="a|b")
    assert "<script>" not in render_html([result])


def test_same_results_give_the_same_page(tmp_path: Path) -> None:
    result = samples.tune()
    again = store.load(store.save(result, tmp_path))
    assert render_html([result]) == render_html([again])


def test_study_and_sweep_have_their_charts() -> None:
    assert titles(samples.tune()) == STUDY_TITLES
    assert titles(samples.bench()) == ["Step time against its floor", "Sweep"]


@pytest.mark.parametrize(
    "series",
    [
        (),
        (Series.of("trials", []),),
        (Series.of("trials", [{"number": 0, "state": "failed", "objective": None}]),),
        (Series.of("importance", [{"parameter": "x"}]),),
        (Series.of("sweep", [{"batch": 1, "step_ms": None, "floor_ms": None}]),),
        (Series.of("sweep", [{"batch": "a", "x": "b"}, {"batch": "c", "x": "d"}]),),
        (Series.of("gain:x", [{"isl": 1}]),),
        (Series.of("unknown", [{"a": 1}]),),
    ],
    ids=lambda s: s[0].name if s else "none",
)
def test_missing_or_empty_series_leave_the_chart_out(series: tuple[Series, ...]) -> None:
    result = samples.bench(series=series)
    assert charts.charts_of(result) == []
    assert "Decode runs" in render_html([result])


@pytest.mark.parametrize("low", [95.0, 100.0], ids=["close together", "constant"])
def test_the_highest_marker_of_a_sweep_is_inside_its_chart(low: float) -> None:
    series = Series.of("sweep", [{"batch": 1, "ttft_ms": low}, {"batch": 4, "ttft_ms": 100.0}])
    figure = sweep_chart(series)
    assert figure is not None
    bottom, top = figure.axes[0].get_ylim()
    assert bottom == 0
    assert top > 104


def test_a_log_axis_has_labels_within_a_decade() -> None:
    series = Series.of("sweep", [{"batch": 1, "ttft_ms": 11.0}, {"batch": 4, "ttft_ms": 900.0}])
    figure = sweep_chart(series)
    assert figure is not None
    assert {20, 50, 100, 200, 500} <= set(figure.axes[0].get_yticks())


def test_facts_of_a_run_are_words_not_code() -> None:
    workload = {"name": "chat", "slo": {"ttft_s": 2.0, "tpot_s": None}, "trace": ""}
    html = render_html([samples.bench(workload=workload)])
    assert "name chat, slo (ttft_s 2.0)" in html


def test_charts_are_valid_xml_in_the_colours_of_the_page() -> None:
    for result in (samples.tune(), samples.bench()):
        for _, svg in charts.charts_of(result):
            root = ElementTree.fromstring(svg)
            texts = [e for e in root.iter() if e.tag.endswith("text")]
            assert texts
            assert all("currentColor" in e.get("style", "") for e in texts)


def test_references_inside_charts_resolve_and_do_not_clash() -> None:
    html = render_html([samples.tune(), samples.bench()])
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', html)) <= set(ids)


def test_failed_points_and_trials_are_marked() -> None:
    study = dict(charts.charts_of(samples.tune()))["Objective by trial"]
    assert "failed" in study
    assert "pruned" in study
    sweep = dict(charts.charts_of(samples.bench()))["Step time against its floor"]
    assert "could not run" in sweep


def test_points_that_were_left_out_have_a_mark_of_their_own() -> None:
    rows = [{"batch": 1, "ttft_ms": 4.0, "state": "ok"}, {"batch": 2, "state": LEFT_OUT}]
    figure = sweep_chart(Series.of("sweep", rows))
    assert figure is not None
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert LEFT_OUT in labels
    assert "could not run" not in labels


def test_gain_marks_its_boundary() -> None:
    rows = [{"isl": 2**k, "change_pct": k - 12.5} for k in range(10, 16)]
    ((title, svg),) = charts.charts_of(
        samples.bench(series=(Series.of("gain:ring", rows, {"isl": "tokens"}),))
    )
    assert title == "Gain and boundary: ring"
    assert "boundary near 5,800" in svg


def test_crossing_is_none_when_the_sign_never_changes() -> None:
    assert crossing([1.0, 2.0], [3.0, 4.0]) is None
    assert crossing([0.0, 2.0], [-1.0, 1.0]) == pytest.approx(1.0)


def test_pareto_front_keeps_only_unbeaten_points() -> None:
    x, y = [1.0, 2.0, 3.0, 2.0, 4.0], [5.0, 7.0, 6.0, 4.0, 9.0]
    assert pareto_front(x, y) == [0, 1, 4]


@pytest.mark.parametrize(
    ("column", "unit", "words"),
    [
        ("metric.ttft_p95_ms", "", "time to first token, P95 (ms)"),
        ("output_tokens_per_s", "tok/s", "output tokens (tok/s)"),
        ("throughput_change_pct", "", "throughput change (%)"),
        ("batch", "", "batch"),
    ],
)
def test_axis_labels_are_words_with_units(column: str, unit: str, words: str) -> None:
    assert axis_label(column, unit) == words


def test_sizes_are_written_as_prompts_are() -> None:
    assert [short(v) for v in (512, 8192, 2**20, 1000, 0.5)] == ["512", "8K", "1M", "1000", "0.5"]


def test_markdown_tables_survive_pipes_and_list_failed_repeats() -> None:
    metric = samples.times([1.0, float("nan"), 2.0])
    text = render_markdown([samples.bench(metrics={"a|b": metric})])
    assert "| a\\|b | 1.5 | ms | – | 2 (repeat), 1 failed | lower |" in text


def test_long_series_are_cut_and_say_so() -> None:
    rows = [{"i": n} for n in range(200)]
    html = render_html([samples.bench(series=(Series.of("requests", rows),))])
    assert "requests: 200 rows" in html
    assert "140 more rows are in the result file" in html


def test_markdown_has_the_tables_too() -> None:
    rows = [{"layout": f"tp{n}", "error": float(n)} for n in range(50)]
    result = samples.bench(series=(Series.of("errors", rows, {"error": "%"}),))
    text = render_markdown([result])
    assert "### errors" in text
    assert "| layout | error (%) |" in text
    assert "| tp39 | 39 |" in text
    assert "tp40" not in text
    assert "10 more rows are in the result file." in text
