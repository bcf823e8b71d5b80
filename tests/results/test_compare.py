"""Comparisons: refusals, verdicts, merging of repeats, and the printed forms."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kllm.errors import ConfigError
from kllm.results.compare import FailOn, compare, merge, render_markdown, to_json
from kllm.results.report import render_comparison_html
from kllm.results.schema import Fingerprint, Gpu, Metric, RunResult
from tests.results import samples


def run(factor: float = 1.0, seed: int = 0, **changes: Any) -> RunResult:
    """A bench whose times are multiplied by a factor, with 1 % of noise and 12 repeats."""
    rng = np.random.default_rng(seed)
    values = factor * 10 * np.exp(rng.normal(0, 0.01, 12))
    metrics = {
        "tpot_ms": samples.times(values.tolist()),
        "output_tokens_per_s": samples.rates((1000 / values).tolist()),
        "kv_tokens": Metric.of([4096], unit="tokens", direction="higher", sample="exact"),
        "batch_mean": Metric.of([3, 4, 5], unit="requests", direction="none"),
    }
    return samples.bench(**({"metrics": metrics} | changes))


def verdicts(base: RunResult, new: RunResult, **options: Any) -> dict[str, str]:
    found = compare([base], [new], **options)
    return {row.metric: row.judgement.verdict for row in found.rows}


def test_slowdown_is_worse_in_time_and_in_rate() -> None:
    assert verdicts(run(seed=1), run(1.1, seed=2)) == {
        "tpot_ms": "worse",
        "output_tokens_per_s": "worse",
        "kv_tokens": "same",
        "batch_mean": "not judged",
    }


def test_equal_runs_are_the_same_and_do_not_regress() -> None:
    found = compare([run(seed=1)], [run(seed=2)])
    assert found.verdict == "The same within 5%."
    assert found.regressed == ()


def test_headline_counts_what_cannot_be_told() -> None:
    once = {f"once_{n}_ms": samples.times([1.0]) for n in range(10)}
    faster = run(0.8, seed=2)
    sides = [replace(side, metrics=side.metrics | once) for side in (run(seed=1), faster)]
    assert compare([sides[0]], [sides[1]]).verdict == (
        "Nothing is found worse by more than 5% "
        "(2 better: tpot_ms, output_tokens_per_s; 1 the same; 10 can't be told)."
    )
    alone = [replace(side, metrics=once) for side in sides]
    assert compare([alone[0]], [alone[1]]).verdict.startswith(
        "No regression found, but the repeats cannot tell for 10 of 10 metrics: once_0_ms, "
    )


def test_wider_margin_lets_a_known_slowdown_pass() -> None:
    assert compare([run(seed=1)], [run(1.1, seed=2)]).regressed
    wide = compare([run(seed=1)], [run(1.1, seed=2)], fail_on=FailOn.parse("worse:30%"))
    assert not wide.regressed


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "other"}, "model is tiny-model and other"),
        ({"workload": {"isl": 256, "osl": 32}}, "workload.isl is 128 and 256"),
        ({"layout": {"tp": 2}}, "layout.tp is 1 and 2"),
        ({"fidelity": "modelled"}, "fidelity is real and modelled"),
        ({"fingerprint": replace(samples.MACHINE, cores=64)}, "cores is 2 and 64"),
        (
            {"fingerprint": replace(samples.MACHINE, gpus=(Gpu(name="A"), Gpu(name="A")))},
            "GPUs are Test GPU and A, A",
        ),
    ],
)
def test_incomparable_results_are_refused_with_the_difference(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compare([run()], [run(**changes)])
    assert named in str(caught.value)
    assert "--allow-different" in str(caught.value)


@pytest.mark.parametrize("field", ["workload", "workload.isl"])
def test_allowed_difference_is_compared_and_listed(field: str) -> None:
    new = run(workload={"isl": 256, "osl": 32})
    found = compare([run()], [new], allow_different=[field])
    assert found.allowed == ("workload.isl is 128 and 256",)


def test_allowing_one_field_does_not_allow_another() -> None:
    new = run(workload={"isl": 256, "osl": 64})
    with pytest.raises(ConfigError, match=r"workload\.osl"):
        compare([run()], [new], allow_different=["workload.isl", "work"])


def test_software_and_settings_may_differ_and_are_noted() -> None:
    machine = replace(samples.MACHINE, libraries={"torch": "2.14.0"})
    found = compare([run()], [run(fingerprint=machine, settings={"page_size": 32})])
    assert "libraries.torch is 2.13.0 and 2.14.0." in found.notes
    assert "settings.page_size is 16 and 32." in found.notes


def test_unknown_machine_is_compared_with_a_note() -> None:
    found = compare([run()], [run(fingerprint=Fingerprint())])
    assert any("does not say which machine" in note for note in found.notes)


def test_interleaved_runs_are_compared_pair_by_pair() -> None:
    """A drift of a factor of three hides ten percent, unless each value has its partner."""
    rng = np.random.default_rng(3)
    drift = 10 * np.exp(np.linspace(0, np.log(3), 12))
    base, new = (drift * f * np.exp(rng.normal(0, 0.01, 12)) for f in (1.0, 1.1))
    sides = [{"metrics": {"tpot_ms": samples.times(v.tolist())}} for v in (base, new)]
    pair = [run(interleave="x", **side) for side in sides]
    assert verdicts(*pair) == {"tpot_ms": "worse"}
    assert verdicts(*(run(**side) for side in sides)) == {"tpot_ms": "can't tell"}


def test_five_runs_of_one_bench_become_five_independent_values() -> None:
    merged = merge([run(seed=s, run_id=str(s)) for s in range(5)])
    metric = merged.metrics["tpot_ms"]
    assert (metric.sample, len(metric.values)) == ("process", 5)
    assert merged.metrics["kv_tokens"].sample == "exact"


def test_side_made_of_different_runs_is_refused() -> None:
    with pytest.raises(ConfigError, match="one side are of different runs"):
        merge([run(), run(model="other")])


def test_results_without_a_common_metric_are_refused() -> None:
    with pytest.raises(ConfigError, match="no metric in common"):
        compare([run()], [run(metrics={"x": samples.times([1.0])})])


def test_metric_of_another_unit_is_not_judged() -> None:
    seconds = {"tpot_ms": Metric.of([1.0] * 6, unit="s", direction="lower")}
    assert verdicts(run(), run(metrics=seconds)) == {"tpot_ms": "not judged"}


@pytest.mark.parametrize("text", ["", "worse:", "worse:5", "worse:-1%", "worse:x%", "slower:5%"])
def test_broken_threshold_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--fail-on takes"):
        FailOn.parse(text)


def test_threshold_is_read_as_a_share() -> None:
    assert FailOn.parse("worse:2.5%").margin == pytest.approx(0.025)


def test_every_form_says_the_same() -> None:
    found = compare([run(seed=1)], [run(1.2, seed=2)])
    document = json.loads(to_json(found))
    assert document["rows"][0]["judgement"]["verdict"] == "worse"
    markdown = render_markdown(found)
    assert "**Worse by more than 5%: tpot_ms, output_tokens_per_s.**" in markdown
    html = render_comparison_html(found)
    assert "<svg" in html
    assert found.verdict in html
