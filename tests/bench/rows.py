"""The rows of a result's series, for tests that look into them."""

from typing import Any

from kllm.results.schema import RunResult


def rows_of(result: RunResult, name: str) -> list[dict[str, Any]]:
    """The inline rows of the series of that name, which must be there."""
    series = result.find_series(name)
    assert series is not None, f"no series '{name}'"
    return series.to_dicts()
