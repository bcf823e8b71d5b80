"""Layouts of two ranks on two GPUs, over NCCL: answers like one rank's, and no hang.

`KLLM_TEST_REPEATS=100 pytest -m gpu tests/gpu/test_two_gpus.py -s` runs the skewed load a hundred
times with each exchange of experts, and prints how long it took and how far layouts are from one
rank.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kllm.config import ParallelConfig
from kllm.engine.rank_pool import RankPool, launch
from kllm.parallel import expert_deep_ep
from tests.engine.layout_cases import (
    FAMILIES,
    LAYOUTS,
    LENGTHS,
    Answers,
    answers,
    checkpoint,
    print_differences,
    suited,
)
from tests.engine.rank_cases import REPEATS, SPREAD, closing, engine, run_skewed_load
from tests.tolerances import GPU_SLACK, LAYOUT

pytestmark = [pytest.mark.multi_gpu, pytest.mark.usefixtures("two_gpus")]

DEVICE = "cuda"
NAMES = [name for name, layout in LAYOUTS.items() if layout.world == 2]
TABLE: dict[tuple[str, str], float] = {}
# Then the ranks go on with new groups and new graphs.
REPEATS_OF_AN_ENGINE = min(10, -(-REPEATS // 2))
BACKENDS = [
    "all_to_all",
    "all_gather",
    pytest.param(
        "deep_ep",
        marks=pytest.mark.skipif(not expert_deep_ep.installed(), reason="no deep_ep installed"),
    ),
]


@pytest.fixture(scope="module")
def pools(two_gpus: None) -> Iterator[list[RankPool]]:
    started: list[RankPool] = []
    yield started
    for ranks in started:
        ranks.close()


@pytest.fixture
def pool(pools: list[RankPool]) -> RankPool:
    """The same ranks for all tests, unless a test has ended them."""
    if not pools or not pools[-1].alive:
        pools.append(launch(2))
    return pools[-1]


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang is found in minutes."""
    monkeypatch.setattr("kllm.env.step_timeout_s", lambda: 120.0)
    monkeypatch.setattr("kllm.engine.multi_rank.BUILD_TIMEOUT_S", 240.0)


@pytest.fixture(scope="module", params=FAMILIES)
def model(
    two_gpus: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return checkpoint(request.param, tmp_path_factory.mktemp("two") / request.param)


@pytest.fixture(scope="module")
def alone(model: Path) -> Answers:
    return answers(model, ParallelConfig(), device=DEVICE)


@pytest.fixture(scope="module")
def table(two_gpus: None) -> Iterator[None]:
    yield
    print_differences(TABLE, NAMES)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("name", NAMES)
def test_a_layout_answers_like_one_rank(
    name: str, model: Path, alone: Answers, pool: RankPool
) -> None:
    found = answers(model, suited(LAYOUTS[name], model.name), pool, device=DEVICE)
    assert found.tokens == alone.tokens
    difference = TABLE[model.name, name] = found.difference(alone)
    assert difference <= GPU_SLACK * LAYOUT[model.name]


@pytest.mark.parametrize("name", NAMES)
def test_a_layout_runs_in_bfloat16(name: str, model: Path, pool: RankPool) -> None:
    """What it answers is not compared: tiny networks of random weights amplify each rounding."""
    layout = suited(LAYOUTS[name], model.name)
    found = answers(model, layout, pool, device=DEVICE, dtype="bfloat16", new_tokens=12)
    assert [len(tokens) for tokens in found.tokens] == [12] * len(LENGTHS)
    assert all(np.isfinite(logprobs).all() for logprobs in found.logprobs)


@pytest.mark.timeout(300 + 5 * REPEATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_skewed_load_does_not_hang(backend: str, tmp_path: Path, pool: RankPool) -> None:
    """In bfloat16; the rank without requests keeps the other company."""
    hidden = min(expert_deep_ep.HIDDEN_SIZES) if backend == "deep_ep" else 64
    folder = checkpoint("deepseek_v4", tmp_path / "deepseek_v4", hidden_size=hidden)
    layout = replace(SPREAD, ep_backend=backend)
    rng, begin = np.random.default_rng(0), time.monotonic()
    took: list[float] = []
    while len(took) < REPEATS:
        fresh = engine(folder, pool, layout, device=DEVICE, max_batch=16, token_budget=256)
        with closing(fresh) as running:
            count = min(REPEATS_OF_AN_ENGINE, REPEATS - len(took))
            took += [run_skewed_load(running, rng) for _ in range(count)]
    print(
        f"\n{backend}: {len(took)} repetitions of {np.median(took):.2f} s, the longest "
        f"{max(took):.2f} s, in {time.monotonic() - begin:.0f} s with the engines' starts"
    )
