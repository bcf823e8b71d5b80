"""The bench on tiny models: pools really filled, both layouts sliced and with real processes."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kllm.bench import tp_vs_dp
from kllm.bench.base import Context, warming_up
from kllm.bench.run import run_bench
from kllm.bench.serve_loop import run_workload
from kllm.bench.tp_vs_dp import TpVsDpBench
from kllm.bench.tp_vs_dp_capacity import CAPACITY_CLAIM, TTFT_CLAIM
from kllm.bench.tp_vs_dp_fill import fill
from kllm.bench.tp_vs_dp_loads import warm_load
from kllm.bench.tp_vs_dp_serve import SIDES, Side, layout_of
from kllm.cache.pool import KVPool
from kllm.config import CacheConfig, EngineConfig, SchedulerConfig
from kllm.core import Request
from kllm.engine.engine import Engine
from kllm.engine.graphs import batch_bucket
from kllm.engine.rank import Rank
from kllm.engine.step import MicroStep, RankOutcome
from kllm.errors import CapacityError, ConfigError
from kllm.models.load import resolve
from kllm.models.shape import collect_weights
from kllm.parallel.footprint import weight_bytes
from tests.bench.rows import rows_of

TINY = EngineConfig(model="deepseek-v4", scale="tiny", device="cpu", fidelity="rank-slice")
SIZES: dict[str, Any] = {
    "world": 2,
    "in_flight": (1, 4),
    "isls": (16, 40),
    "osl": 2,
    "skewed": 4,
    "step_tokens": 64,
}


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("model", ["deepseek-v4", "glm-5.2"])
def test_a_filled_pool_holds_what_was_computed(model: str, kv_dtype: str) -> None:
    cache = CacheConfig(memory_bytes=16 << 20, dtype=kv_dtype)
    held = {}
    for side in ("tp", "dp"):
        layout = layout_of(side, 4)  # type: ignore[arg-type]
        found, network = fill(replace(TINY, model=model, cache=cache, parallel=layout))
        assert abs(found.difference) < 0.03
        assert found.tokens > 0
        assert found.kv_bytes <= 16 << 20
        assert found.weight_bytes == found.computed.heaviest.weight_bytes
        assert network.training is False
        held[side] = found.tokens
    # The same memory for KV on each of four ranks, and no entry twice.
    assert held["dp"] == 4 * held["tp"]


@pytest.mark.parametrize("side", ["tp", "dp"])
def test_a_pool_sized_by_the_device_holds_what_was_computed(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device of 24 MiB of which the weights take their part before KV is planned."""
    config = replace(TINY, parallel=layout_of(side, 4))  # type: ignore[arg-type]
    resolved = resolve(config)
    (weights,) = weight_bytes(
        collect_weights(resolved.family.manifest(resolved.config)),
        config.parallel,
        "float32",
        layers=resolved.config.num_hidden_layers,
    )
    memory = 24 << 20
    monkeypatch.setattr("kllm.bench.tp_vs_dp_fill.free_bytes", lambda device: memory)
    monkeypatch.setattr("kllm.models.devices.free_bytes", lambda device: memory - weights)
    monkeypatch.setattr("kllm.models.devices.CPU_KV_BYTES", 1 << 40)
    found, _ = fill(config)
    assert abs(found.difference) < 0.03
    assert found.kv_bytes == pytest.approx(0.85 * (memory - weights), rel=0.01)


def test_memory_that_forgets_is_no_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write = KVPool.write

    def forgetful(self: KVPool, name: str, layer: int, slots: Tensor, values: Tensor) -> None:
        write(self, name, layer, slots, values)
        if not written:
            self.pages(name, layer)[-1] = torch.zeros_like(self.pages(name, layer)[-1])
            written.append(name)

    monkeypatch.setattr(KVPool, "write", forgetful)
    config = replace(TINY, cache=CacheConfig(memory_bytes=4 << 20), parallel=layout_of("tp", 2))
    with pytest.raises(CapacityError, match="does not keep"):
        fill(config)


@pytest.mark.parametrize("side", SIDES)
def test_the_warm_up_meets_every_size_of_a_decode_step(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a full chunk, in each group."""
    seen: list[tuple[bool, int]] = []
    run = Rank.run

    def watched(rank: Rank, micro: Sequence[MicroStep], requests: Sequence[Request]) -> RankOutcome:
        seen.append((micro[0].decode_only, max(micro[0].peer_tokens)))
        return run(rank, micro, requests)

    monkeypatch.setattr(Rank, "run", watched)
    layout = layout_of(side, 2)
    config = replace(
        TINY,
        parallel=layout,
        max_model_len=128,
        scheduler=SchedulerConfig(max_batch=12, token_budget=48),
        cache=CacheConfig(memory_bytes=4 << 20),
    )
    engine = Engine(config)
    found = run_workload(engine, warm_load(12, 32, 48 * layout.dp))
    engine.close()
    assert found.complete
    decodes = {batch_bucket(tokens) for decode_only, tokens in seen if decode_only}
    assert decodes == {batch_bucket(n) for n in range(1, 1 + 12 // layout.dp)}
    assert max(tokens for _, tokens in seen) == 48


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> Any:
    seen: list[tuple[str, int, int]] = []
    ctx = Context(config=TINY, repeats=2, progress=lambda *state: seen.append(state))
    result, _ = run_bench(TpVsDpBench(**SIZES), ctx, tmp_path_factory.mktemp("sliced"))
    return result, seen


def test_a_sweep_has_both_layouts_side_by_side(sliced: Any) -> None:
    result, _ = sliced
    assert result.fidelity == "rank-slice"
    for isl in SIZES["isls"]:
        rows = rows_of(result, f"sweep:ISL {isl}")
        assert [row["in_flight"] for row in rows] == [1, 4]
        for row in rows:
            assert row["state"] == "ok"
            assert all(row[f"{side}_ttft_ms"] > 0 for side in ("tp", "dp"))  # type: ignore[operator]
        for metric in ("ttft", "tpot", "output"):
            assert len(rows_of(result, f"gain:{metric} at ISL {isl}")) == 2
        assert len(result.metrics[f"ttft_ms.dp.isl{isl}.c4"].values) == 2
        assert f"ISL {isl}, 1 to 4 in flight" in result.boundary
    filled = rows_of(result, "filled")
    assert all(abs(row["difference_pct"]) < 3 for row in filled)  # type: ignore[arg-type]


def test_the_default_memory_shows_tp_queueing_for_kv(sliced: Any) -> None:
    result, _ = sliced
    heaviest = rows_of(result, "sweep:ISL 40")[-1]
    assert heaviest["kv_full"] == "tp"
    kv = {row["prompt_tokens"]: row for row in rows_of(result, "kv")}
    assert kv[40]["tp_full_from"] <= 4 < kv[40]["dp_full_from"]  # type: ignore[operator]


def test_skewed_loads_are_held_against_even_ones(sliced: Any) -> None:
    result, _ = sliced
    rows = rows_of(result, "skew")
    kinds = [(row["layout"], row["lengths"], row["placed_by"]) for row in rows]
    assert kinds == [
        ("tp", "even", ""),
        ("tp", "periodic", ""),
        ("tp", "giant", ""),
        ("dp", "even", "tokens"),
        ("dp", "periodic", "tokens"),
        ("dp", "periodic", "count"),
        ("dp", "giant", "tokens"),
    ]
    assert [row["ttft_change_pct"] for row in rows if row["lengths"] == "even"] == [0, 0]
    assert any(note.startswith("Skew") for note in result.notes)


def test_the_claims_stand_beside_what_was_measured(sliced: Any) -> None:
    result, seen = sliced
    claims = rows_of(result, "claims")
    fidelities = [row["fidelity"] for row in claims]
    assert fidelities == ["modelled", "modelled", "rank-slice"]
    ttft = claims[-1]
    assert ttft["measured"] == result.metrics["ttft_mean_change_pct"].median
    assert "4 in flight, ISL 40, OSL 2" in str(ttft["conditions"])
    # Two ranks and a memory that was given say nothing about eight devices.
    assert result.claims == (TTFT_CLAIM,)
    assert "kv_capacity_ratio" not in result.metrics
    assert seen[-1][0] == "done"
    assert any("requests" in what for what, _, _ in seen)
    assert any(what.startswith(warming_up("dp, ISL 40")) for what, _, _ in seen)


def test_layouts_that_do_not_fit_together_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kllm.bench.tp_vs_dp.is_small", lambda scale, device: False)
    monkeypatch.setattr("kllm.bench.tp_vs_dp_capacity.WORLD", 2)
    monkeypatch.setattr("kllm.models.devices.CPU_KV_BYTES", 16 << 20)
    monkeypatch.setattr("kllm.bench.tp_vs_dp_fill.free_bytes", lambda device: 16 << 20)
    seen: list[str] = []
    ctx = Context(config=TINY, repeats=1, progress=lambda what, *_: seen.append(what))
    bench = TpVsDpBench(**SIZES | {"isls": (16,)})
    result, _ = run_bench(bench, ctx, tmp_path)
    order = [what for what in seen if what.startswith(("fill", "start"))]
    assert order == ["fill tp", "start tp", "fill dp", "start dp"]
    assert [row["state"] for row in rows_of(result, "sweep:ISL 16")] == ["ok", "ok"]
    assert any("one after the other" in note for note in result.notes)
    # The pools are sized by this device: their ratio answers to the claim.
    assert result.metrics["kv_capacity_ratio"].median == pytest.approx(2, rel=0.01)
    assert result.claims == (CAPACITY_CLAIM, TTFT_CLAIM)
    assert [row["fidelity"] for row in rows_of(result, "claims")][2:] == ["rank-slice"] * 2


def test_loads_beyond_the_limit_are_left_out(tmp_path: Path) -> None:
    bench = TpVsDpBench(**SIZES | {"isls": (16,), "limit_s": 1e-3})
    result, _ = run_bench(bench, Context(config=TINY, repeats=1), tmp_path)
    light, heavy = rows_of(result, "sweep:ISL 16")
    assert (light["state"], heavy["state"]) == ("ok", "left out")
    assert "limit" in str(heavy["reason"])
    assert len(rows_of(result, "skew")) == 7


def test_real_processes_serve_both_layouts_in_turns(tmp_path: Path) -> None:
    config = replace(TINY, fidelity="real")
    bench = TpVsDpBench(**SIZES | {"isls": (16,), "in_flight": (1, 3)})
    result, _ = run_bench(bench, Context(config=config, repeats=1), tmp_path)
    assert result.fidelity == "real"
    assert [row["state"] for row in rows_of(result, "sweep:ISL 16")] == ["ok", "ok"]
    assert ("dp", "count") in [(r["layout"], r["placed_by"]) for r in rows_of(result, "skew")]
    assert rows_of(result, "claims")[-1]["fidelity"] == "real"


def test_real_ranks_start_where_nothing_is_left_of_the_filled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its network lies on the device of rank 0, which may not hold two."""
    filled: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def watched(config: EngineConfig) -> Any:
        found, model = fill(config)
        model.itself = model  # type: ignore[assignment]  # a cycle, which only a collection ends
        filled.append(weakref.ref(model))
        return found, model

    def start(world: int) -> Any:
        alive.append(sum(model() is not None for model in filled))
        raise CapacityError("enough")

    monkeypatch.setattr(tp_vs_dp, "fill", watched)
    monkeypatch.setattr("kllm.engine.multi_rank.launch", start)
    gc.disable()
    try:
        ctx = Context(config=replace(TINY, fidelity="real"), repeats=1)
        with pytest.raises(CapacityError, match="enough"):
            run_bench(TpVsDpBench(**SIZES), ctx, tmp_path)
    finally:
        gc.enable()
    assert len(filled) == 2
    assert alive == [0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"world": 1}, "at least 2 ranks"),
        ({"in_flight": (0,)}, "--in-flight"),
        ({"isls": ()}, "--isl"),
        ({"osl": 1}, "2 output tokens"),
        ({"skewed": 3}, "2 requests a rank"),
    ],
)
def test_sizes_that_measure_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TpVsDpBench(**SIZES | options)


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (replace(TINY, model="llama-3-8b"), {}, "expert"),
        (TINY, {"world": 3, "skewed": 6}, "3"),
        (TINY, {"isls": (5000,)}, "lower --isl"),
    ],
)
def test_what_a_model_cannot_do_is_refused_before_work(
    tmp_path: Path, config: EngineConfig, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run_bench(TpVsDpBench(**SIZES | options), Context(config=config), tmp_path)
    assert list(tmp_path.iterdir()) == []
