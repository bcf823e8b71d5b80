"""Every layout gives what one rank gives; `pytest -m "" tests/engine/test_layouts.py -s` tries all.

Real processes, gloo, float32, tiny models with random weights. Log probabilities of the whole
vocabulary are compared at each of 64 greedy tokens of three requests.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kllm.config import ParallelConfig
from kllm.engine.rank_pool import RankPool, launch
from tests.engine.layout_cases import (
    FAMILIES,
    LAYOUTS,
    Answers,
    answers,
    checkpoint,
    print_differences,
    suited,
)
from tests.tolerances import LAYOUT

WORLD = 8
QUICK = ("dp2·tp2+ep4",)  # what every run tries
TABLE: dict[tuple[str, str], float] = {}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with launch(WORLD) as ranks:
        yield ranks


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(request.param, tmp_path_factory.mktemp("layouts") / request.param)


@pytest.fixture(scope="module")
def alone(model: Path) -> Answers:
    return answers(model, ParallelConfig())


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    yield
    print_differences(TABLE, LAYOUTS)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS],
)
def test_a_layout_answers_like_one_rank(
    name: str, model: Path, alone: Answers, pool: RankPool
) -> None:
    found = answers(model, suited(LAYOUTS[name], model.name), pool)
    assert found.tokens == alone.tokens
    difference = TABLE[model.name, name] = found.difference(alone)
    assert difference <= LAYOUT[model.name]
