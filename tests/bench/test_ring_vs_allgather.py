"""`kllm bench ring-vs-allgather`: real ranks, a slice, what does not fit, and what it finds."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kllm.bench import ring_arms, ring_rows
from kllm.bench.base import Context, warming_up
from kllm.bench.prompt_time import Place
from kllm.bench.record import Record, Subject
from kllm.bench.ring_arms import Arm, arms_of
from kllm.bench.ring_findings import CLAIM, CLAIM_ISL, conclude, crossing_points
from kllm.bench.ring_predictions import tokens
from kllm.bench.ring_setup import attention_folder, choose
from kllm.bench.ring_vs_allgather import RingVsAllGatherBench
from kllm.bench.run import run_bench
from kllm.bench.shared_prompt import KINDS, SharedPrompt
from kllm.config import EngineConfig
from kllm.errors import CapacityError, ConfigError
from kllm.hardware import Ceilings
from kllm.models.load import resolve
from kllm.models.shape import model_shape
from kllm.results.claims import side_by_side
from kllm.results.schema import LEFT_OUT, RunResult
from tests.bench.rows import rows_of
from tests.models.glm_moe_dsa_tiny import GLM

TINY = EngineConfig(model="glm-5.2", scale="tiny", device="cpu")
LINK = "processes on this CPU"  # of ranks that all run
CEILINGS = Ceilings(
    device="cpu",
    copy_bytes_per_s=1e10,
    read_bytes_per_s=1e10,
    matmul_flops_per_s={"float32": 1e11},
    launch_s=1e-6,
)


@pytest.fixture(autouse=True)
def ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kllm.bench.ring_vs_allgather.ceilings", lambda device: CEILINGS)
    monkeypatch.setattr("kllm.engine.cp_kind.cached_ceilings", lambda device: CEILINGS)


def bench(**options: Any) -> RingVsAllGatherBench:
    given = {"models": ("glm-5.2",), "isls": (300, 1024), "cps": (2,), "links": ("nvlink4",)}
    return RingVsAllGatherBench(**{"chunks": (256,), **given, **options})


def run(made: RingVsAllGatherBench, folder: Path, fidelity: str, repeats: int = 2) -> RunResult:
    config = choose(replace(TINY, model=made.models[0]), fidelity, max(made.cps))
    return run_bench(made, Context(config=config, repeats=repeats), folder)[0]


def test_all_ranks_run_in_processes_of_their_own(tmp_path: Path) -> None:
    result = run(bench(), tmp_path, "auto")
    assert result.fidelity == "real"
    sweep = rows_of(result, "sweep")
    assert [(row["link"], row["prompt_tokens"]) for row in sweep] == [(LINK, 300), (LINK, 1024)]
    for row in sweep:
        assert row["state"] == "ok"
        assert row["ratio"] > 0
    seconds = result.metrics["ring_s.glm-5.2.cp2.chunk256.processes.on.this.CPU.isl1024"].values
    assert len(seconds) == 2
    assert sweep[1]["ring_tokens_per_s"] == pytest.approx(1024 / (sum(seconds) / 2))
    speeds = [sweep[1][f"{kind}_tokens_per_s"] for kind in ("ring", "all_gather", "replicated")]
    assert sweep[1]["ratio"] == pytest.approx(speeds[0] / speeds[1]), "as the throughputs say"
    assert speeds[2] > 0
    assert result.find_series("exposure") is None, "real transfers are not watched"
    assert all(row["measured_over_mean"] is None for row in rows_of(result, "balance"))
    assert any("not measured then" in note for note in result.notes)
    [claimed] = side_by_side([result])
    assert claimed.status == "not measured"


def test_a_slice_tells_links_apart_and_what_they_expose(tmp_path: Path) -> None:
    links = ("nvlink4", "1e-4:2e6")
    result = run(bench(models=("llama-3-8b", "glm-5.2"), links=links), tmp_path, "rank-slice", 1)
    assert result.fidelity == "rank-slice"
    sweep = {(r["model"], r["link"], r["prompt_tokens"]): r for r in rows_of(result, "sweep")}
    assert len(sweep) == 2 * 2 * 2
    for model in ("llama-3-8b", "glm-5.2"):
        fast, slow = (sweep[model, link, 1024] for link in links)
        for kind in KINDS:
            assert slow[f"{kind}_tokens_per_s"] < fast[f"{kind}_tokens_per_s"]
    for row in rows_of(result, "exposure"):
        if row["link"] == links[1]:
            assert row["all_gather_exposed_share"] > 0.95
            assert row["ring_exposed_s"] > 0
            # A ring sends as many bytes, in calls that wait for each other.
            assert row["ring_transfer_s"] >= 0.99 * row["all_gather_transfer_s"]
            assert row["all_gather_transfer_s"] > row["replicated_transfer_s"]
    memory = {(r["model"], r["prompt_tokens"]): r for r in rows_of(result, "memory")}
    big = memory["llama-3-8b", 1024]
    assert big["kv_gib"] == pytest.approx(big["replicated_kv_gib"] / 2, rel=1e-6)
    assert big["all_gather_peak_gib"] > big["ring_peak_gib"] > big["kv_gib"]
    assert any("for up to 2 times the KV memory" in note for note in result.notes)
    chosen = rows_of(result, "predictions")
    assert len(chosen) == len(sweep)
    assert {row["auto"] for row in chosen} <= {"ring", "all_gather"}
    balance = {(r["model"], r["prompt_tokens"]): r for r in rows_of(result, "balance")}
    for model in ("llama-3-8b", "glm-5.2"):
        assert balance[model, 300]["measured_over_mean"] is None
        assert balance[model, 1024]["measured_over_mean"] >= 1
        assert balance[model, 1024]["measured_steps"] == 2, "the last one hands the prompt over"
    assert any("times as long as the mean rank" in note for note in result.notes)
    assert {row["transferred"] for row in rows_of(result, "overlap")} == {
        "keys and values",
        "index keys",
        "selected latents",
    }
    assert result.boundary is not None
    assert "llama-3-8b, cp 2, chunk 256, ISL 1K:" in result.boundary
    [told] = [n for n in result.notes if n.startswith("llama-3-8b, cp 2, ISL 1K, over nvlink4:")]
    # The tiny llama has as many KV heads as half of its query heads.
    assert "less than 100 % (keys and values) of the prompt so far" in told
    assert told.endswith("those of the last step are 25 %.")
    # The tiny GLM's own attention selects; a llama's step over a block is timed alone.
    [kernel] = rows_of(result, "block kernel")
    assert (kernel["model"], kernel["queries"], kernel["keys"]) == ("llama-3-8b", 128, 512)
    assert kernel["of_matmul_pct"] > 0
    assert any("A dense step of a ring (GQA, 128 queries, 512 keys)" in n for n in result.notes)


def test_lengths_that_do_not_fit_are_marked_and_the_ring_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Room for all of a short prompt, and for half of a long one.
    config = choose(TINY, "rank-slice", 2)
    spec = resolve(config).family.cache_spec(resolve(config).config)
    room = 1100 * spec.bytes_per_token("float32")
    monkeypatch.setattr(SharedPrompt, "free_bytes", lambda self: room / ring_arms.KV_SHARE)
    result = run(bench(isls=(1024, 2048, 8192)), tmp_path, "rank-slice", repeats=1)
    sweep = rows_of(result, "sweep")
    assert [row["state"] for row in sweep] == ["ok", "ok", LEFT_OUT]
    assert sweep[1]["ratio"] > 0
    assert sweep[1]["replicated_tokens_per_s"] is None
    assert sweep[1]["reason"].startswith("replicated: needs")
    assert sweep[2]["reason"] == "the model has 4096 positions"
    memory = rows_of(result, "memory")
    assert [row["prompt_tokens"] for row in memory] == [1024, 2048]  # nothing is said of the last
    assert memory[1]["replicated_peak_gib"] is None
    assert memory[1]["replicated_kv_gib"] > memory[1]["kv_gib"]


def test_a_block_kernel_that_does_not_fit_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(ring_rows, "block_rates", full)
    result = run(bench(models=("llama-3-8b",), isls=(300,)), tmp_path, "rank-slice", repeats=1)
    assert [row["state"] for row in rows_of(result, "sweep")] == ["ok"]
    assert "llama-3-8b: the block kernel was not timed: out of device memory." in result.notes


def test_an_interrupt_keeps_the_rounds_that_are_complete(tmp_path: Path) -> None:
    rounds = []

    def progress(what: str, done: int, total: int) -> None:
        if "all_gather at 0 over" in what:
            rounds.append(what)
        if len(rounds) == 3:  # two whole rounds, and one that is not complete
            raise KeyboardInterrupt

    config = choose(replace(TINY, model="llama-3-8b"), "rank-slice", 2)
    ctx = Context(config=config, repeats=5, progress=progress)
    result, _ = run_bench(bench(models=("llama-3-8b",)), ctx, tmp_path)
    assert result.extra == {"interrupted": True}
    assert [row["state"] for row in rows_of(result, "sweep")] == ["ok", "ok"]
    assert len(result.metrics["ring_s.llama-3-8b.cp2.chunk256.nvlink4.isl1024"].values) == 2


def test_a_limit_ends_the_rounds_of_a_layout_after_the_first(tmp_path: Path) -> None:
    made = bench(models=("llama-3-8b",), isls=(300,), limit_s=1e-3)
    result = run(made, tmp_path, "rank-slice", repeats=3)
    assert rows_of(result, "balance")[0]["measured_over_mean"] is None
    assert len(result.metrics["ring_s.llama-3-8b.cp2.chunk256.nvlink4.isl300"].values) == 1
    assert any("1 of 3 rounds fit the limit of 0.001 s" in note for note in result.notes)
    assert any(
        "1 of 1 points were measured in fewer than 3 rounds" in note for note in result.notes
    )


def test_the_estimate_grows_with_what_runs_and_ends_at_the_limit() -> None:
    config = choose(replace(TINY, model="llama-3-8b"), "rank-slice", 2)
    few = bench(models=("llama-3-8b",))
    more = replace(few, links=("nvlink4", "ib400"))
    assert few.estimate_s(config, 1) < few.estimate_s(config, 2) < more.estimate_s(config, 2)
    limited = replace(more, limit_s=1e-3)
    assert limited.estimate_s(config, 1) == limited.estimate_s(config, 9)
    # One round runs whatever the limit; the ring's other ranks do only where it allows them.
    assert more.estimate_s(config, 1) > limited.estimate_s(config, 1)
    real = replace(config, fidelity="real")
    assert more.estimate_s(real, 1) == limited.estimate_s(real, 1)


def test_a_layout_that_cannot_be_built_does_not_end_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(config: EngineConfig, *rest: Any) -> SharedPrompt:
        if config.scheduler.token_budget == 512:
            raise CapacityError("a step of 512 tokens does not fit")
        return SharedPrompt(config, *rest)

    monkeypatch.setattr("kllm.bench.ring_vs_allgather.SharedPrompt", build)
    both_chunks = bench(models=("llama-3-8b",), isls=(300,), chunks=(512, 256))
    sweep = rows_of(run(both_chunks, tmp_path, "rank-slice", repeats=1), "sweep")
    assert [(row["chunk"], row["state"]) for row in sweep] == [(512, "failed"), (256, "ok")]
    assert sweep[0]["reason"] == "a step of 512 tokens does not fit"
    with pytest.raises(CapacityError, match="does not fit"):
        run(bench(chunks=(512,)), tmp_path, "rank-slice")


class Short:
    """A prompt whose steps do not fit beyond a place."""

    chunk = 256

    def __init__(self, most: int, pool: int = 1 << 30) -> None:
        self.most, self.pool = most, pool
        self.ran: list[Place] = []
        self.arranged: list[int] = []

    def arrange(self, kind: str, length: int) -> None:
        if length > self.pool:
            raise CapacityError("the pool does not fit")
        self.arranged.append(length)

    def run(self, place: Place, link: object) -> Any:
        if place.end > self.most:
            raise CapacityError("out of device memory")
        self.ran.append(place)
        return place


def test_a_step_without_memory_takes_the_longer_prompts_out() -> None:
    arm = arms_of(KINDS, [512, 1024, 2048])["ring"]
    short: Any = Short(most=1100)
    said: list[str] = []
    arm.run(short, {"a": None, "b": None}, said.append, warm_up=True)
    assert arm.isls == [512, 1024]
    assert "out of device memory in a step behind" in arm.refused[2048]
    assert short.arranged == [2048, 1024], "what is left has a pool of its own"
    assert set(arm.rounds["a"][0]) == set(arm.rounds["b"][0]) == set(arm.places(256))


def test_the_largest_step_runs_before_a_round_is_measured() -> None:
    arm = Arm("ring", [4096])
    short: Any = Short(most=1 << 30)
    counts = []
    for warm_up in (True, False):
        said: list[str] = []
        arm.run(short, {"a": None, "b": None}, said.append, warm_up=warm_up)
        before = [what for what in said if "warming up" in what]
        assert before[-1] == warming_up("ring at 3840")
        assert said[: len(before)] == before
        assert warm_up == (before[0] == warming_up("ring at 0"))
        counts.append(len(said))
    assert sum(counts) == arm.steps(256, 2, 2)


def test_a_pool_without_memory_takes_the_longest_prompt_out() -> None:
    arm = Arm("ring", [512, 1024, 2048])
    short: Any = Short(most=1 << 30, pool=1024)
    arm.run(short, {"a": None}, lambda what: None, warm_up=False)
    assert arm.isls == [512, 1024]
    assert arm.refused == {2048: "ring: the pool does not fit"}


def test_crossings_lie_on_lines_between_logarithms() -> None:
    assert crossing_points([(1, 2.0), (10, 3.0)]) == []
    [(at, above)] = crossing_points([(100, 2.0), (1, 0.5)])
    assert (at, above) == (pytest.approx(10), True)
    [first, second] = crossing_points([(1, 2.0), (100, 0.5), (10000, 2.0)])
    assert (first[0], first[1]) == (pytest.approx(10), False)
    assert (second[0], second[1]) == (pytest.approx(1000), True)


def point(link: str, isl: int, ratio: float, chunk: int = 8192) -> Mapping[str, Any]:
    about = {"model": "m", "attention": "MLA", "cp": 8, "chunk": chunk, "link": link}
    return about | {"prompt_tokens": isl, "ratio": ratio, "state": "ok"}


def test_findings_name_the_boundary_and_where_the_claim_is_reproduced(tmp_path: Path) -> None:
    about = Subject(name="ring-vs-allgather", model="m", scale="layers:4", dtype="bfloat16")
    record = Record(replace(about, fidelity="rank-slice"), tmp_path)
    record.claims.append(CLAIM)
    for link, ratios in {"ib400": (0.5, 0.9), "nvlink4": (0.8, 1.25)}.items():
        for isl, ratio in zip((CLAIM_ISL // 4, CLAIM_ISL), ratios, strict=True):
            record.row("sweep", point(link, isl, ratio))
    conclude(record)
    result = record.result()
    assert result.verdict == (
        "m, cp 8, chunk 8K (MLA), ISL 512K: a ring has 1.25 times the throughput of all-gather "
        "over nvlink4 and 0.90 times over ib400."
    )
    assert result.boundary is not None
    assert "over ib400: a ring is slower in the swept range, ISL 128K to 512K." in (result.boundary)
    assert "over nvlink4: a ring wins from ISL 256K on." in result.boundary
    assert "ISL 512K: a ring wins from bandwidth 101 GB/s on." in result.boundary
    claims = {row["link"]: row for row in rows_of(result, "claim")}
    assert claims["ib400"]["status"] == "not reproduced"
    assert claims["ib400"]["measured_pct"] == pytest.approx(-10)
    assert claims["nvlink4"]["status"] == "reproduced"
    [row] = side_by_side([result])
    assert (row.status, row.fidelity) == ("reproduced", "rank-slice")
    assert row.measured is not None
    assert row.measured.values == (pytest.approx(25),)


def test_the_boundary_along_the_length_of_steps_is_found(tmp_path: Path) -> None:
    about = Subject(name="ring-vs-allgather", model="m", scale="layers:4", dtype="bfloat16")
    record = Record(about, tmp_path)
    for chunk, ratio in ((1 << 13, 0.5), (1 << 15, 2.0)):
        record.row("sweep", point("ib400", 1 << 18, ratio, chunk))
    conclude(record)
    assert record.boundary is not None
    words = "ISL 256K, over ib400: a ring wins from chunk 16K on."
    assert words in record.boundary


def test_a_percent_of_a_single_round_is_no_boundary(tmp_path: Path) -> None:
    about = Subject(name="ring-vs-allgather", model="m", scale="layers:4", dtype="bfloat16")
    record = Record(about, tmp_path)
    for isl, ratio in ((1 << 15, 0.992), (1 << 17, 1.004), (1 << 19, 1.03)):
        record.row("sweep", point("ib400", isl, ratio))
    conclude(record)
    assert record.boundary is not None
    words = (
        "a ring is faster in the swept range, ISL 32K to 512K (2 of 3 points show no difference)"
    )
    assert words in record.boundary


def test_a_difference_within_the_repeats_is_no_boundary(tmp_path: Path) -> None:
    about = Subject(name="ring-vs-allgather", model="m", scale="layers:4", dtype="bfloat16")
    record = Record(about, tmp_path)
    spread = {"ratio_lo": 0.9, "ratio_hi": 1.1}
    record.row("sweep", {**point("ib400", 1 << 17, 0.99), **spread})
    record.row("sweep", {**point("ib400", 1 << 18, 1.01), **spread})
    conclude(record)
    assert record.boundary is not None
    words = "over ib400: the repeats show no difference in the swept range, ISL 128K to 256K."
    assert words in record.boundary
    clear = {"ratio_lo": 1.1, "ratio_hi": 1.3}
    record.row("sweep", {**point("ib400", 1 << 20, 1.2), **clear})
    conclude(record)
    assert "a ring is faster in the swept range, ISL 128K to 1M (2 of 3 points" in record.boundary


def test_the_dense_twin_of_a_model_has_its_dimensions_and_no_indexer() -> None:
    config = EngineConfig(model="glm-5.2", scale="layers:4", load="random", device="cpu")
    sparse = resolve(config)
    with attention_folder("glm-5.2", "dense", "layers:4") as name:
        dense = resolve(replace(config, model=name))
    assert dense.name == "glm-5.2-dense"
    assert not Path(name).exists()
    kinds = model_shape(dense.family, dense.config).attention
    assert [kind.name for kind in kinds] == ["MLA"]
    for field in ("hidden_size", "num_attention_heads", "kv_lora_rank", "v_head_dim", "sparse_mlp"):
        assert getattr(dense.config, field) == getattr(sparse.config, field)


def test_one_run_shows_sparse_and_dense_attention_of_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "small-glm"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GLM))
    config = EngineConfig(model=str(folder), load="random", scale="full", device="cpu")
    made = bench(models=(str(folder),), attentions=("model", "dense"), isls=(96, 192), chunks=(64,))
    ctx = Context(config=choose(config, "rank-slice", 2), repeats=1)
    result, _ = run_bench(made, ctx, tmp_path / "results")
    found = [(r["model"], r["attention"], r["state"]) for r in rows_of(result, "sweep")]
    assert found == [("small-glm", "DSA", "ok")] * 2 + [("small-glm-dense", "MLA", "ok")] * 2
    assert {
        r["transferred"] for r in rows_of(result, "overlap") if r["model"] == "small-glm-dense"
    } == {"latents"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: bench(cps=(1, 2)), "cp must be 2 or more"),
        (lambda: bench(isls=()), "isl must be 1 or more"),
        (lambda: bench(attentions=()), "an attention; name one"),
        (lambda: bench(links=("carrier-pigeon",)), "carrier-pigeon"),
        (lambda: attention_folder("glm-5.2", "dense", "tiny"), "scale tiny has none"),
        (lambda: attention_folder("llama-3-8b", "dense", "full"), "selects no entries"),
        (lambda: attention_folder("glm-5.2", "dens", "full"), "known: model, dense"),
    ],
)
def test_wrong_options_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_numbers_of_tokens_are_short() -> None:
    assert [tokens(n) for n in (512, 1024, 1536, 512 * 1024, 1 << 20)] == [
        *("512", "1K", "1.5K", "512K", "1M")
    ]
