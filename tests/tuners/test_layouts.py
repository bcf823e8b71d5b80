"""Layouts as points of a space: only valid ones, once each, and measured as what they are."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kllm.bench.workloads import Lengths, Workload
from kllm.config import EngineConfig, ParallelConfig, SchedulerConfig
from kllm.engine.memory import plan_kv
from kllm.errors import CapacityError, ConfigError
from kllm.models.load import read_family_config, scale_config
from kllm.models.shape import model_shape
from kllm.parallel.layout import problem, short_name
from kllm.tuners.importance import importance
from kllm.tuners.layouts import Deployment, _divide, layout_name, layout_of, share_of
from kllm.tuners.objective import Goal, Slo
from kllm.tuners.outcome import Outcome, Served, measure
from kllm.tuners.params import in_flight
from kllm.tuners.prior import Guess, Prior
from kllm.tuners.sampler import FIRST_ROWS, Evidence, PointSampler
from kllm.tuners.setup import Request, Setup, describe, fidelity_here, predictor, prepare, prior_of
from tests.bench.test_costmodel import CEILINGS

GIB = 2**30
SMALL = ("kv_dtype=auto", "page_size=0")  # few points, soon predicted
TINY = EngineConfig(model="deepseek-v4", scale="tiny", device="cpu")
LOAD = Workload(isl=Lengths(64, 128), osl=Lengths(8), num_requests=64, concurrency=32)


def setup(world: int = 4, config: EngineConfig = TINY, **more) -> Setup:
    options = {"isl": "64-128", "osl": "8", "concurrency": 32, "world": world} | more
    return prepare(Request(config=config, **options))


def test_every_point_is_a_valid_layout_and_no_two_run_alike() -> None:
    study = setup()
    space = study.space
    assert study.deployment is not None
    seen = set()
    for i in range(len(space.points)):
        settings = space.settings(i)
        config = space.config(settings)
        assert config.parallel.world == 4
        assert problem(study.deployment.shape.dims, config.parallel) is None
        each = in_flight(settings, space.site)
        batch = min(config.scheduler.max_batch, each)
        budget = min(config.scheduler.token_budget, each * 128)
        key = (config.parallel, batch, budget, config.cache, config.attention)
        assert key not in seen
        seen.add(key)
    assert len({key[0] for key in seen}) == len(space.rows) > 20


def test_degrees_are_ordered_features() -> None:
    """One step from tp 1 to 2 is as long as from 2 to 4, and half as long as both."""
    space = setup().space
    rows = {layout_name(space.settings(i)): space.features[i] for i in range(len(space.points))}
    spread = {np.round(f, 6).tobytes() for f in space.features}
    assert len(spread) == len(space.points)
    tp = next(
        column
        for column in range(space.features.shape[1])
        if rows["dp4"][column] == 0
        and rows["tp4"][column] == 1
        and rows["dp2·tp2"][column] == 0.5
        and rows["pp4"][column] == 0
    )
    assert rows["pp2·tp2"][tp] == 0.5


@pytest.mark.parametrize(
    ("model", "name"), [("deepseek-v4", "dp4+ep4"), ("glm-5.2", "dp4+ep4"), ("llama-3-8b", "tp4")]
)
def test_default_is_what_deployments_begin_with(model: str, name: str) -> None:
    study = setup(config=replace(TINY, model=model))
    assert layout_name(study.space.default) == name
    assert study.config(study.space.default).fidelity == "rank-slice"


def test_degrees_can_be_fixed_like_any_parameter() -> None:
    space = setup(fixed=("tp=2", "pp=1")).space
    assert {row["tp"] for row in space.rows} == {2}
    assert {row["pp"] for row in space.rows} == {1}
    assert layout_name(space.default) == "dp2·tp2+ep4"
    assert "tp" not in space.free
    with pytest.raises(ConfigError, match=r"no usable combination of .* has tp=3"):
        setup(fixed=("tp=3",))


def test_one_layout_can_be_asked_for() -> None:
    study = setup(world=1, layout="tp=2,dp=2,ep=4")
    assert len(study.space.rows) == 1
    assert study.world == 4
    assert layout_name(study.space.default) == "dp2·tp2+ep4"
    with pytest.raises(ConfigError, match="has 4 ranks and --world is 8"):
        setup(world=8, layout="tp=4")
    with pytest.raises(ConfigError, match="ep 4 has nothing to spread"):
        setup(config=replace(TINY, model="llama-3-8b"), world=1, layout="dp=4,ep=4")


def test_fidelity_is_real_only_where_there_are_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert fidelity_here("", 4, cuda) == "real"
    assert fidelity_here("", 8, cuda) == "rank-slice"
    assert fidelity_here("", 2, cpu) == "rank-slice"
    assert fidelity_here("real", 2, cpu) == "real"
    with pytest.raises(CapacityError, match="needs 8 GPUs and this machine has 4"):
        fidelity_here("real", 8, cuda)


@pytest.mark.parametrize("dp", [1, 2, 3, 8, 100])
def test_shares_of_all_groups_are_the_workload(dp: int) -> None:
    part, groups = share_of(LOAD, dp)
    assert groups == min(dp, 32)
    assert part.concurrency == -(-32 // groups)
    rows = LOAD.shapes()
    assert [(r.isl, r.osl) for r in part.shapes()] == [(r.isl, r.osl) for r in rows[::groups]]
    assert abs(groups * part.num_requests - len(rows)) < groups
    assert part.max_tokens <= LOAD.max_tokens


def test_rates_are_told_by_gpu_too() -> None:
    row = Served(1.0, 0.1, 0.01, 1.0, 10, 50, True)
    late = row._replace(ttft_s=9.0)
    outcome = Outcome(state="complete", run_s=2.0, requests=(row, late), ranks=8)
    metrics = measure(outcome, Slo(ttft_s=1.0))
    assert metrics["output_tokens_per_s"] == 100 / 2
    assert metrics["goodput_tokens_per_s"] == 50 / 2
    assert metrics["goodput_per_gpu_tokens_per_s"] == 50 / 2 / 8
    assert metrics["requests_per_s"] == 1.0
    assert metrics["attainment"] == 0.5
    assert "goodput_per_gpu_tokens_per_s" not in measure(replace(outcome, ranks=1), Slo())


def cut_deployment(memory: int | None = 140 * GIB) -> tuple[Deployment, object]:
    _, family, config = read_family_config("deepseek-v4")
    whole, cut = model_shape(family, config), scale_config(family, config, "layers:8")
    layout = ParallelConfig(dp=8, ep=8)
    found = Deployment(
        shape=model_shape(family, cut),
        whole=whole,
        memory_bytes=memory,
        dtype="bfloat16",
        allowed=(layout,),
    )
    return found, family.cache_spec(cut)


def test_pool_of_a_cut_holds_the_tokens_of_the_whole_model() -> None:
    """(140 GiB - 78.3 GiB of weights) * 0.85, less the state of 65 requests, over all layers."""
    deployment, spec = cut_deployment()
    config = EngineConfig(
        model="deepseek-v4", parallel=ParallelConfig(dp=8, ep=8), fidelity="rank-slice"
    )
    limited = deployment.config(config, "bfloat16", 128)
    wanted = deployment.rank_tokens(config.parallel, "bfloat16", 65, 0.85)
    budget = plan_kv(
        limited,
        spec,
        kv_dtype="bfloat16",
        model_len=1 << 20,
        device=torch.device("cpu"),
        activation_bytes=0,
    )
    assert wanted - 128 <= budget.num_tokens <= wanted + 128
    _, family, whole = read_family_config("deepseek-v4")
    full = family.cache_spec(whole)
    bytes_of_all = wanted * full.bytes_per_token("bfloat16") + 65 * full.bytes_per_request(
        "bfloat16", 0
    )
    weights = model_weights(deployment)
    assert bytes_of_all == pytest.approx(0.85 * (140 * GIB - weights), rel=1e-3)


def model_weights(deployment: Deployment) -> float:
    """Bytes of a rank under dp8+ep8: an eighth of the experts and everything else."""
    total = 0.0
    for w in deployment.whole.weights:
        total += w.count * w.nbytes("bfloat16", 1) / (8 if w.part == "experts" else 1)
    return total


def test_slowest_stage_of_a_pipeline_is_the_slice() -> None:
    deployment, _ = cut_deployment(None)
    layout = ParallelConfig(pp=4, dp=2, ep=2)
    config = EngineConfig(model="deepseek-v4", parallel=layout, fidelity="rank-slice")
    sliced = deployment.config(config, "bfloat16", 128)
    # Two layers a stage; the embedding or the head makes an outer one the heaviest.
    assert sliced.slice_rank in (0, 6)
    assert sliced.cache.memory_bytes == 0
    real = deployment.config(replace(config, fidelity="real"), "bfloat16", 128)
    assert real.slice_rank == 0


def test_layouts_that_no_rank_can_hold_are_left_out_with_a_reason() -> None:
    _, family, config = read_family_config("deepseek-v4")
    whole = model_shape(family, config)
    choices = (ParallelConfig(dp=8), ParallelConfig(dp=8, ep=8), ParallelConfig(tp=8))
    allowed, excluded = _divide(whole, choices, "bfloat16", 140 * GIB)
    assert [short_name(a) for a in allowed] == ["dp8+ep8", "tp8"]
    ((layout, reason),) = excluded
    assert short_name(layout) == "dp8"
    assert reason.startswith("529.8 GiB of weights on a rank of 140.0 GiB")


def test_first_trials_are_of_different_layouts() -> None:
    study = setup(fixed=SMALL)
    space = study.space
    prior = prior_of(study, predictor(study, CEILINGS))
    sampler = PointSampler(space, study.goal, prior=prior, seed=1)
    taken: list[int] = []
    for number in range(FIRST_ROWS):
        index = sampler.propose(Evidence(frozenset(taken), tuple(taken), (), frozenset()), number)
        assert index is not None
        taken.append(index)
    assert space.settings(taken[0]) == space.default
    assert len({space.row_of(i) for i in taken}) >= FIRST_ROWS - 1  # the default and the favourite


def test_floor_above_the_slo_rules_out_with_a_reason() -> None:
    space = setup(fixed=SMALL).space

    def guess(settings) -> Guess:
        slow = settings["pp"] == 4
        return Guess(value=float(settings["max_batch"]), slo_ratio=1.0, floor_ratio=2.0 * slow)

    prior = Prior.of(space, guess)
    assert prior is not None
    sampler = PointSampler(space, Goal.of(["goodput"], None), prior=prior)
    ruled_out = sampler.ruled_out(Evidence(frozenset(), (), (), frozenset()))
    assert ruled_out
    assert {space.settings(i)["pp"] for i in ruled_out} == {4}
    assert all("its floor of TPOT is 2 times the limit" in why for why in ruled_out.values())


def test_importance_names_the_layout_as_one() -> None:
    space = setup(fixed=SMALL).space
    rng = np.random.default_rng(0)
    picks = rng.choice(len(space.points), 30, replace=False)
    measured = []
    for i in picks.tolist():
        rate = 100.0 * float(space.settings(i)["tp"])
        measured.append(
            (
                i,
                {
                    "goodput_tokens_per_s": rate,
                    "output_tokens_per_s": rate,
                    "attainment": 1.0,
                    "slo_ratio": 0.5,
                },
            )
        )
    shares = importance(space, Goal.of(["goodput"], None), measured)
    assert next(iter(shares)) == "layout"
    assert shares["layout"] > 0.8
    assert not set(space.joint) & shares.keys()


def test_words_for_settings_begin_with_the_layout() -> None:
    space = setup().space
    assert describe(space.default, space.default, space.free) == "dp4+ep4 (the default settings)"
    other = {**space.default, "dp": 1, "ep": 1, "tp": 4, "max_batch": 8}
    assert describe(other, space.default, space.free) == "tp4, max_batch=8"
    assert layout_of({"max_batch": 8}) is None


def test_scheduler_settings_are_kept_beside_the_layout() -> None:
    space = setup().space
    config = space.config({**space.default, "tp": 4, "dp": 1, "ep": 4, "max_batch": 8})
    assert config.parallel == ParallelConfig(tp=4, ep=4)
    assert config.scheduler == SchedulerConfig(max_batch=8)
