"""The result document: round trips, strict JSON, named errors."""

import json
import math
from importlib.resources import files

import jsonschema
import numpy as np
import pytest

from kllm.errors import DataError
from kllm.results.schema import (
    Column,
    Fingerprint,
    Metric,
    RunResult,
    Series,
    decode,
    encode,
    json_schema_text,
)
from tests.results import samples


def test_published_json_schema_is_the_one_of_the_dataclasses() -> None:
    assert files("kllm.results").joinpath("schema.json").read_text() == json_schema_text()


@pytest.mark.parametrize("result", [samples.bench(), samples.tune()], ids=["bench", "tune"])
def test_written_result_validates_and_reads_back_equal(result: RunResult) -> None:
    raw = encode(result)
    jsonschema.validate(json.loads(raw), json.loads(json_schema_text()))
    assert decode(raw) == result


def test_infinite_and_missing_numbers_give_strict_json() -> None:
    series = Series.of("sweep", [{"x": math.inf, "y": math.nan}, {"x": np.float32(2)}])
    result = samples.bench(series=(series,), workload={"request_rate": math.inf})

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not strict JSON")

    document = json.loads(encode(result), parse_constant=refuse)
    assert document["series"][0]["rows"] == [["inf", None], [2.0, None]]
    assert document["workload"] == {"request_rate": "inf"}


def test_metric_counts_repeats_that_gave_no_number() -> None:
    metric = Metric.of([1.0, math.nan, 3.0, math.inf, 2.0], unit="ms", direction="lower")
    assert (metric.values, metric.median, metric.dropped) == ((1.0, 3.0, 2.0), 2.0, 2)


def test_metric_without_any_number_has_no_median() -> None:
    metric = Metric.of([math.nan], unit="ms", direction="lower")
    assert (metric.median, metric.ci95, metric.dropped) == (None, None, 1)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("fidelity", "guessed", "$.fidelity"),
        ("duration_s", "long", "$.duration_s"),
        ("metrics", {"tpot_ms": {"unit": "ms"}}, "$.metrics"),
        ("schema_version", 99, "update kllm"),
    ],
)
def test_wrong_field_is_named(field: str, value: object, named: str) -> None:
    document = json.loads(encode(samples.bench())) | {field: value}
    with pytest.raises(DataError) as caught:
        decode(json.dumps(document).encode())
    assert named in str(caught.value)


def test_series_refuses_a_short_row_and_a_double_home() -> None:
    with pytest.raises(DataError, match="row 1 has 1 cells for 2 columns"):
        Series(name="s", columns=(Column(name="a"), Column(name="b")), rows=((1, 2), (3,)))
    with pytest.raises(DataError, match="either rows or a file"):
        Series(name="s", columns=(), rows=(), file="s.csv")


def test_two_series_of_one_name_are_refused() -> None:
    series = Series.of("sweep", [{"x": 1}])
    with pytest.raises(DataError, match="two series are named 'sweep'"):
        samples.bench(series=(series, series))


def test_fingerprint_takes_plain_data_and_ignores_unknown_keys() -> None:
    machine = Fingerprint.from_dict(
        {"cpu": "X", "cores": 4, "gpus": [{"name": "G", "sm_clock_mhz": [1.0, 2.0]}], "new": 1}
    )
    assert machine.gpus[0].sm_clock_mhz == (1.0, 2.0)
    with pytest.raises(DataError, match=r"\$.cores"):
        Fingerprint.from_dict({"cores": "many"})
