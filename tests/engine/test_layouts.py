"""Every layout gives what one rank gives; `pytest -m "" tests/engine/test_layouts.py -s` tries all.

Real processes, gloo, float32, tiny models with random weights. Log probabilities of the whole
vocabulary are compared at each of 64 greedy tokens of three requests.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kllm.config import ParallelConfig
from kllm.engine.rank_pool import RankPool, launch
from tests.engine.layout_cases import Answers, answers, checkpoint
from tests.tolerances import LAYOUT

WORLD = 8
LAYOUTS = {
    "tp2": ParallelConfig(tp=2),
    "tp4": ParallelConfig(tp=4),
    "tp2+ep2": ParallelConfig(tp=2, ep=2),
    "dp2+ep2": ParallelConfig(dp=2, ep=2),
    "dp4+ep4": ParallelConfig(dp=4, ep=4),
    "dp2·tp2+ep4": ParallelConfig(dp=2, tp=2, ep=4),
    "pp2": ParallelConfig(pp=2),
    "pp2·tp2": ParallelConfig(pp=2, tp=2),
    "cp2 ring": ParallelConfig(cp=2, cp_kind="ring"),
    "cp4 ring": ParallelConfig(cp=4, cp_kind="ring"),
    "cp2 all-gather": ParallelConfig(cp=2, cp_kind="all_gather"),
    "cp4 all-gather": ParallelConfig(cp=4, cp_kind="all_gather"),
    "cp2 replicated": ParallelConfig(cp=2, cp_kind="replicated"),
    "cp2 ring·tp2": ParallelConfig(cp=2, tp=2, cp_kind="ring"),
    "cp4 ring, decode dp4+ep4": ParallelConfig(cp=4, ep=4, cp_kind="ring"),
    "dp2·cp2 ring·tp2+ep8": ParallelConfig(dp=2, cp=2, tp=2, ep=8, cp_kind="ring"),
    "pp2·dp2·cp2 all-gather+ep4": ParallelConfig(pp=2, dp=2, cp=2, ep=4, cp_kind="all_gather"),
}
QUICK = ("dp2·tp2+ep4",)  # what every run tries
FAMILIES = ("llama", "glm_moe_dsa", "deepseek_v4")
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
    print("\nlargest difference of a log probability to one rank, 64 greedy tokens equal")
    print(f"{'layout':28}" + "".join(f"{family:>14}" for family in FAMILIES))
    for name in LAYOUTS:
        found = [TABLE.get((family, name)) for family in FAMILIES]
        cells = ("-" if value is None else f"{value:.1e}" for value in found)
        print(f"{name:28}" + "".join(f"{cell:>14}" for cell in cells))


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS],
)
def test_a_layout_answers_like_one_rank(
    name: str, model: Path, alone: Answers, pool: RankPool
) -> None:
    layout = LAYOUTS[name]
    if model.name == "llama":
        layout = replace(layout, ep=1)  # a dense model has no experts
    found = answers(model, layout, pool)
    assert found.tokens == alone.tokens
    difference = TABLE[model.name, name] = found.difference(alone)
    assert difference <= LAYOUT[model.name]
