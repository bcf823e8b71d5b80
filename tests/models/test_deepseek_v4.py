"""DeepSeek-V4's state handling, MTP head and counts. Logits: test_logits_table.py."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kllm.attention import workspace
from kllm.attention.context import ForwardContext
from kllm.cache.pool import KVPool
from kllm.kernels import reference
from kllm.models import deepseek_v4, presets
from kllm.models.base import Groups
from kllm.models.random import fill_random
from tests.models.deepseek_v4_equations import mtp_logits
from tests.models.deepseek_v4_logits import PROMPT, pair
from tests.models.deepseek_v4_tiny import TINY, load_ours, write_checkpoint
from tests.models.harness import Harness
from tests.tolerances import FP8_KV, LOGITS

EXACT = {"rtol": 0, "atol": LOGITS["deepseek_v4"]}
REWIND = 5
FLASH = deepseek_v4.read_config(presets.load("deepseek-v4-flash"))
KINDS = deepseek_v4.tiny_config().layer_kinds
PRO = deepseek_v4.read_config(presets.load("deepseek-v4-pro"))


def rewindable(rewind_tokens: int) -> Harness:
    """A harness whose rings let the newest tokens be taken back."""
    harness = Harness(pair()[0])
    old = harness.pool
    harness.pool = KVPool(
        old.spec,
        num_pages=old.num_pages,
        page_size=old.page_size,
        max_batch=len(harness.rows) + 2,
        kv_dtype=old.kv_dtype,
        compute_dtype=old.compute_dtype,
        device=harness.device,
        rewind_tokens=rewind_tokens,
    )
    return harness


def after_rewind(harness: Harness, start: int, taken_back: int) -> Tensor:
    """Logits from `start` on, after as many wrong tokens as `taken_back` were run and undone."""
    harness.run(PROMPT, [start])
    wrong = [(token + 1) % TINY["vocab_size"] for token in PROMPT[start : start + taken_back]]
    harness.step({0: wrong})
    harness.lengths[0] -= taken_back
    return harness.run(PROMPT[start:], [1] * 12 + [20])


@pytest.mark.parametrize("start", [31, 32, 45, 47])  # around ends of groups of 4 and 16
def test_lowering_the_length_takes_tokens_back(start: int) -> None:
    """Rings longer by the rewind keep all that later tokens need: nothing is to be undone."""
    want = pair()[1][start : start + 32]
    for taken_back in (1, 3, REWIND):
        got = after_rewind(rewindable(REWIND), start, taken_back)
        torch.testing.assert_close(got, want, **EXACT)


def test_rings_without_rewind_lose_tokens_that_are_needed() -> None:
    got = after_rewind(rewindable(0), 45, REWIND)
    assert (got - pair()[1][45:77]).abs().max() > 1e-2


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work space as if the context were huge: everything in many small blocks."""
    monkeypatch.setattr(workspace, "BLOCK_BYTES", 1)
    monkeypatch.setattr(reference, "WORKSPACE_BYTES", 1 << 10)


@pytest.mark.parametrize("chunks", [[90], [21] + [1] * 20])
@pytest.mark.usefixtures("small_blocks")
def test_results_do_not_depend_on_the_work_space(chunks: list[int]) -> None:
    ours, want = pair()
    torch.testing.assert_close(Harness(ours).run(PROMPT, chunks), want[: sum(chunks)], **EXACT)


@pytest.mark.parametrize("page_size", [32, 128])
def test_results_do_not_depend_on_the_page_size(page_size: int) -> None:
    ours, want = pair()
    got = Harness(ours, page_size=page_size).run(PROMPT, [33, 1, 1, 55])
    torch.testing.assert_close(got, want, **EXACT)


def attended(folder: Path, layer: int, kv_dtype: str, chunks: Sequence[int]) -> Tensor:
    """What one attention layer makes of random input that comes in chunks. Everything is
    selected: selection and routing are discrete, so that in a random model a small error can
    flip them and become a large one."""
    write_checkpoint(folder, {**TINY, "index_topk": 64}, seed=0)
    attention = load_ours(folder).layers[str(layer)].attn
    x = torch.randn(sum(chunks), 64, generator=torch.Generator().manual_seed(1))
    return Harness(pair()[0], kv_dtype=kv_dtype).attend(attention, x, chunks)


@pytest.mark.parametrize("layer", [0, 1, 2], ids=lambda i: KINDS[i])
def test_fp8_kv_attention_is_close_to_float32(layer: int, tmp_path: Path) -> None:
    exact, rounded = (attended(tmp_path, layer, kind, [90]) for kind in ("float32", "fp8"))
    assert 0 < (rounded - exact).norm() / exact.norm() < FP8_KV


@pytest.mark.parametrize("layer", [0, 1, 2], ids=lambda i: KINDS[i])
@pytest.mark.parametrize("chunks", [[21] + [1] * 69, [7, 1, 13, 2, 37, 30]])
def test_fp8_kv_does_not_depend_on_the_chunks(
    chunks: list[int], layer: int, tmp_path: Path
) -> None:
    """A chunk sees its own keys rounded as later steps will. In norm, against the rounding
    itself: a float32 rounding can push single channels over an e4m3 boundary."""
    exact, one_shot, got = (
        attended(tmp_path, layer, kind, sizes)
        for kind, sizes in (("float32", [90]), ("fp8", [90]), ("fp8", chunks))
    )
    assert (got - one_shot).norm() < 0.1 * (one_shot - exact).norm()


def draft(chunks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """MTP logits of PROMPT in chunks, and the backbone's streams that they came from."""
    ours, _ = pair()
    harness, logits, streams, start = Harness(ours), [], [], 0
    for size in chunks:
        _, plan = harness.plan({0: PROMPT[start : start + size]})
        ctx = ForwardContext.from_plan(plan, harness.pool, torch.device("cpu"))
        next_ids = torch.tensor(PROMPT[start + 1 : start + size + 1])
        with torch.inference_mode():
            state = ours(ctx)
            logits.append(ours.draft_logits(ours.draft(ctx, state, next_ids)))
        streams.append(state)
        harness.lengths[0] += size
        start += size
    return torch.cat(logits), torch.cat(streams)


@pytest.mark.parametrize("chunks", [[40], [13] + [1] * 27, [7, 1, 13, 19]])
def test_mtp_head_follows_its_equations(chunks: list[int], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY, seed=0)
    weights = load_file(tmp_path / "model.safetensors")
    got, streams = draft(chunks)
    want = mtp_logits(weights, streams, PROMPT[1:41], TINY)
    assert want.std() > 0.3
    torch.testing.assert_close(got.double(), want, **EXACT)


def test_random_model_routes_tokens_to_distinct_experts() -> None:
    config = deepseek_v4.tiny_config()
    model = deepseek_v4.build(config, Groups.single())
    fill_random(model, deepseek_v4, seed=0)
    for layer in range(config.num_hash_layers):
        table = model.layers[str(layer)].ffn.router.tid2eid
        assert ((table >= 0) & (table < config.n_routed_experts)).all()
        assert (table.sort(dim=1).values.diff(dim=1) > 0).all()
    logits = Harness(model).run(PROMPT, [40, 1, 1])
    assert logits.isfinite().all()
    assert logits.std() > 0


@pytest.mark.parametrize(
    ("config", "bf16", "fp8"),
    [(FLASH, 6880, 3850.25), (PRO, 9848, 5511.4375)],
    ids=["flash", "pro"],
)
def test_kv_bytes_per_token_are_the_published_ones(
    config: deepseek_v4.DeepseekV4Config, bf16: float, fp8: float
) -> None:
    spec = deepseek_v4.cache_spec(config)
    assert spec.bytes_per_token("bfloat16") == bf16
    assert spec.bytes_per_token("fp8") == fp8
    assert spec.page_granule == 128


def test_state_bytes_per_request_are_the_published_ones() -> None:
    spec = deepseek_v4.cache_spec(FLASH)
    rings = {ring.name: ring for ring in spec.rings}
    per_layer = {
        name: ring.bytes_per_request("fp8") / len(ring.layers) for name, ring in rings.items()
    }
    assert per_layer == {
        "window": 74_752,
        "csa_tail": 65_536,
        "csa_index_tail": 16_384,
        "hca_tail": 524_288,
    }
    assert rings["window"].bytes_per_request("bfloat16") / 43 == 131_072


def test_mtp_head_has_a_window_of_its_own() -> None:
    with_mtp = deepseek_v4.cache_spec(FLASH, mtp=True)
    assert with_mtp.rings[0].layers == (*deepseek_v4.cache_spec(FLASH).rings[0].layers, 43)


@pytest.mark.parametrize(
    ("config", "active"), [(FLASH, 13.27e9), (PRO, 48.85e9)], ids=["flash", "pro"]
)
def test_active_parameters_are_the_published_ones(
    config: deepseek_v4.DeepseekV4Config, active: float
) -> None:
    """With the lm head, without the embedding."""
    work = deepseek_v4.work_shape(config)
    routed = work.moe_layers * work.experts_per_token * work.expert_params
    assert work.token_params + work.head_params + routed == pytest.approx(active, abs=0.005e9)


def test_attention_reads_grow_until_the_selection_is_full() -> None:
    work = deepseek_v4.work_shape(FLASH)
    reads = [work.attention_entries(context) for context in (64, 2048, 1 << 20)]
    assert [r["window"] / 43 for r in reads] == [64, 128, 128]
    assert [r["csa"] / 21 for r in reads] == [16, 512, 512]
    assert [r["csa_index"] / 21 for r in reads] == [16, 512, 262_144]
    assert [r.get("hca", 0) / 20 for r in reads] == [0, 16, 8192]
    keys = 43 * 128 + 21 * 512 + 20 * 16
    assert work.attention_flops(2048) == 4 * 64 * 512 * keys + 2 * 64 * 128 * 21 * 512
