"""Routing counts survive a result file, and are taken for the model that they are of."""

from pathlib import Path

import pytest

from kllm.bench.record import Record, Subject
from kllm.errors import ConfigError, DataError
from kllm.parallel.expert_counts import ROUTING, MeasuredRouting, routing_rows

COUNTS = {3: [7, 0, 2], 11: [1, 2, 3]}


def stored(
    folder: Path, counts: dict[int, list[int]], *, model: str = "m", scale: str = "tiny"
) -> Path:
    """A result with routing counts."""
    subject = Subject(name="expert-balance", model=model, scale=scale, dtype="float32")
    with Record(subject, folder) as record:
        record.details(ROUTING, list(routing_rows(counts)))
        return record.finish()[1]


# More rows than a result holds inline go to a table beside it.
@pytest.mark.parametrize("counts", [COUNTS, {0: list(range(600))}], ids=["inline", "beside"])
def test_counts_are_read_as_they_were_written(tmp_path: Path, counts: dict[int, list[int]]) -> None:
    routing = MeasuredRouting.read(stored(tmp_path, counts))
    assert routing.counts == counts
    assert (routing.model, routing.scale) == ("m", "tiny")


@pytest.mark.parametrize(("model", "scale"), [("other", "tiny"), ("m", "full")])
def test_routing_of_another_model_is_refused(tmp_path: Path, model: str, scale: str) -> None:
    routing = MeasuredRouting.read(stored(tmp_path, COUNTS))
    routing.check("m", "tiny")
    with pytest.raises(ConfigError, match=rf"m \(tiny\) and this is {model} \({scale}\)") as caught:
        routing.check(model, scale)
    assert "\n" not in str(caught.value)


def test_a_result_without_counts_is_refused(tmp_path: Path) -> None:
    subject = Subject(name="latency", model="m", scale="tiny", dtype="float32")
    with Record(subject, tmp_path) as record:
        _, path = record.finish()
    with pytest.raises(DataError, match=r"holds no routing counts; .* expert-balance --model m"):
        MeasuredRouting.read(path)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (list(routing_rows(COUNTS))[1:], "layer 3 continues with expert 1"),
        ([{"layer": 0, "expert": 0, "tokens": -1}], ">= 0"),
        ([{"layer": 0, "expert": 0, "tokens": "many"}], "Expected `int`"),
        ([{"layer": 0, "expert": 0}], "length 3"),
    ],
)
def test_counts_that_cannot_be_are_refused(
    tmp_path: Path, rows: list[dict[str, object]], words: str
) -> None:
    subject = Subject(name="expert-balance", model="m", scale="tiny", dtype="float32")
    with Record(subject, tmp_path) as record:
        record.details(ROUTING, rows)
        _, path = record.finish()
    with pytest.raises(DataError, match=f"series 'routing' cannot be used: .*{words}"):
        MeasuredRouting.read(path)
