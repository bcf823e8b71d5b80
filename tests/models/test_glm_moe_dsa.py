"""State handling, MTP head and counts of GLM-5.2 and its kin. Logits: test_logits_table.py."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kllm.attention import mla, workspace
from kllm.attention.chunks import Chunk
from kllm.attention.context import ForwardContext
from kllm.attention.latent import LatentHeads, expanding_pays
from kllm.errors import ConfigError
from kllm.kernels import reference
from kllm.models import glm_moe_dsa, presets
from kllm.models.base import Groups
from kllm.models.random import fill_random
from tests.models.glm_moe_dsa_equations import mtp_states
from tests.models.glm_moe_dsa_logits import PROMPT, harness, models, pair
from tests.models.glm_moe_dsa_tiny import GLM, TINY, load_ours, write_checkpoint
from tests.models.harness import Harness, without_data
from tests.tolerances import FP8_KV, LOGITS

EXACT = {"rtol": 0, "atol": LOGITS["glm_moe_dsa"]}
TOPK = GLM["index_topk"]
GLM_52 = glm_moe_dsa.read_config(presets.load("glm-5.2"))
V3 = glm_moe_dsa.read_config(presets.load("deepseek-v3"))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work space as if the context were huge: everything in many small blocks."""
    monkeypatch.setattr(workspace, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(reference, "WORKSPACE_BYTES", 1 << 10)


@pytest.mark.parametrize("expanded", [True, False], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("model_type", TINY)
@pytest.mark.usefixtures("small_blocks")
def test_results_do_not_depend_on_the_work_space(
    model_type: str, expanded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla, "expanding_pays", lambda *_: expanded)
    got = harness(model_type).run(PROMPT, [23, 1, 1, 16])
    torch.testing.assert_close(got, pair(model_type)[1], **EXACT)


@pytest.mark.parametrize("page_size", [1, 64])
def test_results_do_not_depend_on_the_page_size(page_size: int) -> None:
    got = harness(page_size=page_size).run(PROMPT, [9, 1, 1, 30])
    torch.testing.assert_close(got, pair()[1], **EXACT)


@pytest.mark.parametrize("model_type", TINY)
def test_lowering_the_length_takes_tokens_back(model_type: str) -> None:
    """Entries are addressed by position, so that wrong tokens are simply overwritten."""
    driven = harness(model_type)
    driven.run(PROMPT, [20])
    driven.step({0: [(token + 1) % GLM["vocab_size"] for token in PROMPT[20:24]]})
    driven.lengths[0] -= 4
    got = driven.run(PROMPT[20:], [1, 1, 1, 1, 17])
    torch.testing.assert_close(got, pair(model_type)[1][20:], **EXACT)


def counted_scores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of queries of all calls of the indexer's kernel from now on."""
    calls: list[int] = []
    scores = reference.index_scores

    def count(q: Tensor, *args: Any) -> Tensor:
        calls.append(len(q))
        return scores(q, *args)

    monkeypatch.setattr(reference, "index_scores", count)
    return calls


@pytest.mark.parametrize("chunks", [[TOPK], [2, 3, 1], [1] * TOPK])
def test_short_contexts_are_not_scored_but_their_index_keys_are_kept(
    chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted_scores(monkeypatch)
    driven = harness()
    head = driven.run(PROMPT, chunks)
    assert not calls
    tail = driven.run(PROMPT[TOPK:], [1, 1, 33])
    layers_with_indexer = len(models("glm_moe_dsa")[0].config.layers_of("full"))
    assert calls == [n for n in (1, 1, 33) for _ in range(layers_with_indexer)]
    torch.testing.assert_close(torch.cat((head, tail)), pair()[1], **EXACT)


@pytest.mark.parametrize("model_type", TINY)
def test_decode_step_looks_at_no_value_on_the_host(model_type: str) -> None:
    """Its attention runs on tensors without data, as CUDA graph capture asks of it."""
    ours, meta = models(model_type)[0], torch.device("meta")
    driven = Harness(ours, num_requests=3, page_size=4, max_len=64)
    _, plan = driven.plan({0: [1], 1: [2], 2: [3]})
    plan = replace(plan, context_lens=plan.context_lens + 40, positions=plan.positions + 40)
    plan = replace(plan, block_tables=driven.tables.astype("int32"))
    ctx = ForwardContext.from_plan(plan, driven.pool, torch.device("cpu"))
    for name in (
        "token_ids",
        "positions",
        "request_index",
        "context_lens",
        "block_tables",
        "rows",
        "places",
    ):
        setattr(ctx, name, getattr(ctx, name).to(meta))
    ctx.pool = without_data(ctx.pool)
    config = ours.config
    with meta:
        bare = glm_moe_dsa.build(config, Groups.single())
    x = torch.empty(3, config.hidden_size, device=meta)
    for layer in bare.layers.values():
        x = layer.attn(x, ctx)
    assert x.shape == (3, config.hidden_size)


def attended(folder: Path, kv_dtype: str, chunks: Sequence[int]) -> Tensor:
    """What one attention layer makes of random input that comes in chunks. Everything is
    selected: selection is discrete, so that in a random model a small error can flip it and
    become a large one."""
    write_checkpoint(folder, {**GLM, "index_topk": 64})
    attention = load_ours(folder).layers["0"].attn
    x = torch.randn(41, 64, generator=torch.Generator().manual_seed(1))
    return harness(kv_dtype=kv_dtype).attend(attention, x, chunks)


def test_fp8_kv_attention_is_close_to_float32(tmp_path: Path) -> None:
    exact, rounded = (attended(tmp_path, kind, [41]) for kind in ("float32", "fp8"))
    assert 0 < (rounded - exact).norm() / exact.norm() < FP8_KV


@pytest.mark.parametrize("chunks", [[13] + [1] * 28, [7, 1, 13, 2, 18]])
def test_fp8_kv_does_not_depend_on_the_chunks(chunks: list[int], tmp_path: Path) -> None:
    """A chunk sees its own entries rounded as later steps will. In norm, against the rounding
    itself: a float32 rounding can push single channels over an e4m3 boundary."""
    exact, one_shot, got = (
        attended(tmp_path, kind, sizes)
        for kind, sizes in (("float32", [41]), ("fp8", [41]), ("fp8", chunks))
    )
    assert (got - one_shot).norm() < 0.1 * (one_shot - exact).norm()


def draft(chunks: Sequence[int], drafts: int) -> tuple[list[Tensor], list[Tensor]]:
    """Logits of PROMPT in chunks from so many chained drafts, and the states they came from."""
    ours, _ = pair()
    driven, start = harness(), 0
    logits: list[list[Tensor]] = [[] for _ in range(drafts)]
    states: list[list[Tensor]] = [[] for _ in range(drafts)]
    for size in chunks:
        _, plan = driven.plan({0: PROMPT[start : start + size]})
        ctx = ForwardContext.from_plan(plan, driven.pool, torch.device("cpu"))
        with torch.inference_mode():
            state = ours(ctx)
            for k in range(drafts):
                states[k].append(state)
                next_ids = torch.tensor(PROMPT[start + 1 + k : start + 1 + k + size])
                state = ours.draft(ctx, state, next_ids)
                logits[k].append(ours.draft_logits(state))
        driven.lengths[0] += size
        start += size
    return [torch.cat(rows) for rows in logits], [torch.cat(rows) for rows in states]


@pytest.mark.parametrize("chunks", [[39], [13] + [1] * 26, [7, 1, 13, 18]])
def test_mtp_head_follows_its_equations(chunks: list[int], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, GLM)
    weights = load_file(tmp_path / "model.safetensors")
    [got], [state] = draft(chunks, drafts=1)
    _, want = mtp_states(weights, state, PROMPT[1:40], GLM)
    assert want.std() > 0.3
    torch.testing.assert_close(got.double(), want, **EXACT)


def test_chained_drafts_feed_the_normed_state_back(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, GLM)
    weights = load_file(tmp_path / "model.safetensors")
    got, states = draft([39], drafts=2)
    second, _ = mtp_states(weights, states[0], PROMPT[1:40], GLM)
    _, want = mtp_states(weights, second, PROMPT[2:41], GLM)
    torch.testing.assert_close(got[1].double(), want, **EXACT)


def test_mtp_head_leaves_the_backbone_alone() -> None:
    """It writes to states of its own, and its selection is not one that a later step reuses."""
    ours, want = pair()
    driven, parts, start = harness(), [], 0
    for size in (20, 1, 1, 18):
        _, plan = driven.plan({0: PROMPT[start : start + size]})
        ctx = ForwardContext.from_plan(plan, driven.pool, torch.device("cpu"))
        with torch.inference_mode():
            state = ours(ctx)
            ours.draft(ctx, state, torch.tensor(PROMPT[start + 1 : start + 1 + size]))
            parts.append(ours.logits(state))
        driven.lengths[0] += size
        start += size
    torch.testing.assert_close(torch.cat(parts), want[:40], **EXACT)


def test_mtp_head_is_refused_where_the_release_has_none() -> None:
    config = replace(glm_moe_dsa.tiny_config(), mtp_layers=0)
    with pytest.raises(ConfigError, match="has no MTP head"):
        glm_moe_dsa.build(config, Groups.single(), mtp=True)


def test_random_model_gives_finite_logits_that_differ() -> None:
    config = glm_moe_dsa.tiny_config()
    model = glm_moe_dsa.build(config, Groups.single())
    fill_random(model, glm_moe_dsa, seed=0)
    logits = Harness(model, page_size=4).run(PROMPT, [30, 1, 1])
    assert logits.isfinite().all()
    assert logits.std() > 0


def form_flops(start: int, end: int, topk: int | None) -> tuple[int, int]:
    """(expanded, absorbed) by counting pairs one by one, in units of 2 H; sizes of GLM-5.2."""
    projection = 512 * (192 + 256)
    dense = sum(t + 1 for t in range(start, end))
    chosen = sum(min(t + 1, topk or t + 1) for t in range(start, end))
    expanded = end * projection + dense * (192 + 64 + 256)
    return expanded, (end - start) * projection + chosen * (2 * 512 + 64)


@pytest.mark.parametrize("topk", [None, 2048])
@pytest.mark.parametrize(
    ("start", "end"),
    [(0, 2), (0, 2048), (0, 8192), (1000, 3000), (2040, 2050), (8000, 8004), (65536, 73728)],
)
def test_the_form_with_fewer_flops_is_chosen(start: int, end: int, topk: int | None) -> None:
    heads = LatentHeads(torch.empty(2, 192, 512), torch.empty(2, 256, 512), rope=64, scale=1.0)
    expanded, absorbed = form_flops(start, end, topk)
    found = expanding_pays(heads, [Chunk(0, slice(0, end - start), start, end)], end, topk)
    assert found == (expanded < absorbed)


def test_prompts_are_expanded_and_drafts_to_verify_absorbed() -> None:
    heads = LatentHeads(torch.empty(2, 192, 512), torch.empty(2, 256, 512), rope=64, scale=1.0)
    assert expanding_pays(heads, [Chunk(0, slice(0, 2048), 0, 2048)], 2048)
    assert not expanding_pays(heads, [Chunk(0, slice(0, 4), 8000, 8004)], 8004, 2048)


@pytest.mark.parametrize(("mtp", "bf16", "fp8"), [(False, 95_232, 53_940), (True, 96_640, 54_728)])
def test_kv_bytes_per_token_are_the_published_ones(mtp: bool, bf16: int, fp8: int) -> None:
    spec = glm_moe_dsa.cache_spec(GLM_52, mtp)
    assert spec.bytes_per_token("bfloat16") == bf16
    assert spec.bytes_per_token("fp8") == fp8
    assert spec.bytes_per_request("fp8") == 0
    entries = {state.name: state.entry.nbytes("fp8") for state in spec.paged}
    assert entries == {"latent": 656, "index_key": 132}


def test_fp8_capacity_of_eight_gpus_is_the_published_one() -> None:
    """141 GB each, 90 % for weights and KV: 0.60 million tokens with TP8's 94.68 GB."""
    pool = 0.9 * 141e9 - 94.68e9
    assert f"{pool / glm_moe_dsa.cache_spec(GLM_52).bytes_per_token('fp8') / 1e6:.2f}" == "0.60"


def test_states_lie_on_the_layers_that_have_them() -> None:
    latent, index_key = glm_moe_dsa.cache_spec(GLM_52, mtp=True).paged
    assert latent.layers == tuple(range(79))
    assert index_key.layers == (0, 1, *range(2, 78, 4), 78)
    [only] = glm_moe_dsa.cache_spec(V3, mtp=True).paged
    assert (only.name, len(only.layers)) == ("latent", 62)


def test_active_parameters_are_the_published_ones() -> None:
    """With the lm head, without the embedding and the MTP head."""
    work = glm_moe_dsa.work_shape(GLM_52)
    routed = work.moe_layers * work.experts_per_token * work.expert_params
    assert work.token_params + work.head_params + routed == pytest.approx(40.30e9, abs=0.005e9)


def test_attention_reads_grow_until_the_selection_is_full() -> None:
    work = glm_moe_dsa.work_shape(GLM_52)
    assert work.attention_entries(2048) == {"latent": 78 * 2048}
    assert work.attention_entries(1 << 20) == {"latent": 78 * 2048, "index_key": 21 << 20}
    dense = 2 * 64 * (576 + 512) * 78 * 2048
    assert work.attention_flops(2048) == dense
    assert work.attention_flops(4096) == dense + 2 * 32 * 128 * 21 * 4096
