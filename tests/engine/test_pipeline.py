"""Pipeline stages in threads against the same network on one rank."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kllm.attention.context import ForwardContext
from kllm.config import EngineConfig
from kllm.engine.pipeline import SlicedStage, run_stages
from kllm.errors import ConfigError, DataError
from kllm.models.base import CausalLM, Groups, Stage
from kllm.models.load import load_model, resolve
from kllm.models.weights import SafetensorsFolder
from kllm.parallel.communicator import Communicator
from kllm.parallel.emulated import EmulatedComm
from kllm.parallel.link import Link
from kllm.parallel.single import Done, SingleComm
from kllm.scheduler.microbatch import split_plan
from tests.models import deepseek_v4_tiny, glm_moe_dsa_tiny
from tests.models.checkpoints import Rank, write_sharded
from tests.models.harness import Harness
from tests.models.logit_cases import seeded_ids
from tests.parallel.threads import run_ranks
from tests.tolerances import LOGITS

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
GLM = glm_moe_dsa_tiny.GLM
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama tied": LLAMA | {"tie_word_embeddings": True},
    "deepseek_v4": deepseek_v4_tiny.TINY,
    "deepseek_v3": glm_moe_dsa_tiny.V3,
    # Boundaries at layers 4 and 8 of 11, which share the selections of layers 2 and 6.
    "glm_moe_dsa": GLM,
    # Boundaries right behind an indexer, and behind a stage that only passes its selection on.
    "glm_moe_dsa shared": GLM
    | {"num_hidden_layers": 6, "index_topk_pattern": "FFSSSS", "first_k_dense_replace": 1},
}
SPLITS = [(name, stages) for name in CONFIGS for stages in (2, 3)]
PAGE = {"llama": 16, "deepseek_v4": 16, "deepseek_v3": 4, "glm_moe_dsa": 4}
PROMPT = seeded_ids(60, 96)
# Requests in prefill, in chunks and in decode, in the same steps; tokens of each request.
STEPS = [{0: 22}, {0: 7, 1: 20}, {0: 1, 1: 1, 2: 21}, {0: 1, 1: 13}, {0: 19, 2: 1}, {0: 1, 1: 1}]


def tensors_of(name: str) -> dict[str, Tensor]:
    """A checkpoint's tensors: values that matter in every one of them."""
    module = deepseek_v4_tiny if name == "deepseek_v4" else glm_moe_dsa_tiny
    generator = torch.Generator().manual_seed(0)
    folder_config = resolved(name).config
    manifest = resolved(name).family.manifest(folder_config)
    return {t.name: module.random_values(t, generator) for t in manifest}


@cache
def home() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


@cache
def folder_of(name: str) -> Path:
    """A folder with the case's config; `checkpoint` adds the weights."""
    folder = Path(home().name) / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return folder


@cache
def checkpoint(name: str) -> Path:
    save_file(tensors_of(name), folder_of(name) / "model.safetensors")
    return folder_of(name)


def resolved(name: str, folder: Path | None = None) -> Any:
    config = EngineConfig(model=str(folder or folder_of(name)), device="cpu", dtype="float32")
    return resolve(config)


def load(name: str, rank: int = 0, size: int = 1, folder: Path | None = None, mtp: bool = False):
    """The stage of one of `size` pipeline ranks."""
    one = SingleComm()
    groups = Groups(one, one, one, one, one, Rank(rank, size))  # type: ignore[arg-type]
    return load_model(
        resolved(name, folder or checkpoint(name)),
        device=torch.device("cpu"),
        dtype=torch.float32,
        groups=groups,
        mtp=mtp,
    )


@cache
def stages_of(name: str, size: int, mtp: bool = False) -> list[CausalLM]:
    return [load(name, rank, size, mtp=mtp) for rank in range(size)]


def harness(name: str, model: CausalLM) -> Harness:
    return Harness(model, num_requests=3, max_len=64, page_size=PAGE[name.split()[0]])


def tolerance(name: str) -> dict[str, float]:
    family = name.split()[0].replace("deepseek_v3", "glm_moe_dsa")
    return {"rtol": 0, "atol": LOGITS[family]}


@torch.inference_mode()
def run(driven: Harness, comm: Communicator, micro: int) -> list[Tensor]:
    """[tokens, V] of each request after STEPS, on the last stage; elsewhere empty."""
    model, device = driven.model, torch.device("cpu")
    found: dict[tuple[int, int], Tensor] = {}
    for step in STEPS:
        done = driven.lengths
        tokens = {r: PROMPT[done[r] : done[r] + n] for r, n in step.items()}
        order, plan = driven.plan(tokens)
        plans = split_plan(plan, micro)
        contexts = [ForwardContext.from_plan(p, driven.pool, device) for p in plans]
        if isinstance(comm, EmulatedComm):
            states = SlicedStage(comm).run(model, contexts)
        else:
            states = run_stages(model, contexts, comm)
        assert (states is not None) == model.stage.last
        for part, state in zip(plans, states or [], strict=states is not None):
            owner = part.rows.repeat(part.query_lens).tolist()
            where = zip(owner, part.positions.tolist(), strict=True)
            found |= dict(zip(where, model.logits(state), strict=True))
        driven.lengths[order] += plan.query_lens
    rows = driven.rows.tolist() if found else []
    return [
        torch.stack([found[row, p] for p in range(driven.lengths[r])]) for r, row in enumerate(rows)
    ]


@cache
def single(name: str) -> list[Tensor]:
    """The same from one rank, without micro-batches."""
    driven = harness(name, load(name))
    parts: list[list[Tensor]] = [[], [], []]
    for step in STEPS:
        done = driven.lengths
        tokens = {r: PROMPT[done[r] : done[r] + n] for r, n in step.items()}
        for r, logits in driven.step(tokens).items():
            parts[r].append(logits)
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize(("size", "micro"), [(2, 1), (2, 3), (3, 2), (3, 3)])
@pytest.mark.parametrize("name", CONFIGS)
def test_stages_give_the_logits_of_one_rank(name: str, size: int, micro: int) -> None:
    models = stages_of(name, size)
    *others, last = run_ranks(size, lambda comm: run(harness(name, models[comm.rank]), comm, micro))
    assert others == [[]] * (size - 1)
    for got, want in zip(last, single(name), strict=True):
        torch.testing.assert_close(got, want, **tolerance(name))


@pytest.mark.parametrize("name", ["glm_moe_dsa", "glm_moe_dsa shared"])
def test_a_stage_attends_to_what_the_stage_before_selected(name: str) -> None:
    """The selection that arrives decides the logits: another one gives others."""
    models = stages_of(name, 3)
    middle, topk = models[1], GLM["index_topk"]
    driven = harness(name, middle)
    _, plan = driven.plan({0: PROMPT[:30]})
    ctx = ForwardContext.from_plan(plan, driven.pool, torch.device("cpu"))
    shapes = [((30, GLM["hidden_size"]), torch.float32), ((30, topk), torch.int32)]
    assert middle.boundary_shapes(ctx) == shapes
    state, newest = middle.stand_in(ctx)
    assert [(t.shape, t.dtype) for t in (state, newest)] == shapes
    oldest = torch.arange(topk, dtype=torch.int32).expand(30, topk)
    oldest = torch.where(oldest <= torch.arange(30).unsqueeze(1), oldest, -1)
    with torch.inference_mode():
        outs = []
        for selection in (newest, oldest):
            ctx.shared.clear()
            outs.append(middle(ctx, [state, selection]))
    # Up to `topk` tokens both say: everything before.
    torch.testing.assert_close(outs[0][:topk], outs[1][:topk], rtol=0, atol=1e-5)
    assert (outs[0][topk:] - outs[1][topk:]).abs().amax(1).min() > 1e-3


def test_nothing_but_the_state_crosses_where_every_token_sees_all() -> None:
    middle = stages_of("glm_moe_dsa", 3)[1]
    driven = harness("glm_moe_dsa", middle)
    topk = GLM["index_topk"]
    _, plan = driven.plan({0: PROMPT[:topk], 1: [1]})
    ctx = ForwardContext.from_plan(plan, driven.pool, torch.device("cpu"))
    assert len(middle.boundary_shapes(ctx)) == len(middle.stand_in(ctx)) == 1


@pytest.mark.parametrize("name", ["deepseek_v4", "glm_moe_dsa", "deepseek_v3"])
def test_the_last_stage_drafts(name: str) -> None:
    """The MTP head is there, with its embedding and its own KV."""

    def drafts(driven: Harness, comm: Communicator) -> Tensor | None:
        model: Any = driven.model
        _, plan = driven.plan({0: PROMPT[:30]})
        ctx = ForwardContext.from_plan(plan, driven.pool, torch.device("cpu"))
        with torch.inference_mode():
            states = run_stages(model, [ctx], comm)
            if states is None:
                assert model.mtp is None
                return None
            state = model.draft(ctx, states[0], torch.tensor(PROMPT[1:31]))
            logits: Tensor = model.draft_logits(state)
        return logits

    models = stages_of(name, 2, mtp=True)
    want = drafts(harness(name, load(name, mtp=True)), SingleComm())
    none, got = run_ranks(2, lambda comm: drafts(harness(name, models[comm.rank]), comm))
    assert none is None
    torch.testing.assert_close(got, want, **tolerance(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_each_stage_reads_its_own_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    original = SafetensorsFolder.read

    def spy(self: SafetensorsFolder, tensor: str, part: tuple[slice, ...]) -> Tensor:
        reads.append(tensor)
        return original(self, tensor, part)

    monkeypatch.setattr(SafetensorsFolder, "read", spy)
    whole = load(name).state_dict()
    everything = sorted(reads)
    seen: list[str] = []
    parameters: dict[str, Tensor] = {}
    for rank in range(3):
        reads.clear()
        model = load(name, rank, 3)
        seen += reads
        for key, value in model.state_dict().items():
            assert torch.equal(value, whole[key])
        parameters |= model.state_dict()
    assert parameters.keys() == whole.keys()
    tied = ["model.embed_tokens.weight"] if name == "llama tied" else []
    assert sorted(seen) == sorted(everything + tied)


def test_a_stage_misses_only_its_own_tensors(tmp_path: Path) -> None:
    tensors = tensors_of("llama")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    write_sharded(tmp_path, tensors)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    load("llama", 0, 2, folder=tmp_path)
    with pytest.raises(DataError, match=r"lacks 1 of \d+ tensors: model\.layers\.3\.mlp\.up_proj"):
        load("llama", 1, 2, folder=tmp_path)


@pytest.mark.parametrize(("name", "size"), SPLITS)
def test_stages_store_the_models_states_once(name: str, size: int) -> None:
    whole = load(name).cache_spec
    specs = [model.cache_spec for model in stages_of(name, size)]
    assert {spec.page_granule for spec in specs} == {whole.page_granule}
    for kind in ("paged", "rings"):
        for i, state in enumerate(getattr(whole, kind)):
            parts = [getattr(spec, kind)[i] for spec in specs]
            assert {part.name for part in parts} == {state.name}
            assert tuple(layer for part in parts for layer in part.layers) == state.layers


@pytest.mark.parametrize("name", CONFIGS)
def test_a_stage_runs_alone_on_plausible_values(name: str) -> None:
    """With emulated peers nothing arrives: the stage's input is made up."""
    size, link = 3, Link(latency_s=1e-6, bytes_per_s=1e9)
    for rank, model in enumerate(stages_of(name, size)):
        comm = EmulatedComm(link, size=size, rank=rank, device=torch.device("cpu"))
        for logits in run(harness(name, model), comm, micro=2):
            assert logits.isfinite().all()
        assert (comm.calls["receive"] > 0) == (rank > 0)
        assert (comm.calls["send"] > 0) == (rank < size - 1)


class Unhurried(SingleComm):
    """Looks at what is sent when the step is over, as a slow link would."""

    def __init__(self) -> None:
        self.sent: list[tuple[Tensor, Tensor]] = []
        self.waits = 0

    def send(self, x: Tensor, to: int) -> Done:
        assert to == 1
        self.sent.append((x, x.clone()))
        return _Counted(self)


class _Counted(Done):
    def __init__(self, comm: Unhurried) -> None:
        self.comm = comm

    def wait(self) -> None:
        assert all(torch.equal(x, then) for x, then in self.comm.sent)
        self.comm.waits += 1


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_sent_stays_as_it_is_until_it_has_arrived(name: str) -> None:
    comm = Unhurried()
    run(harness(name, stages_of(name, 2)[0]), comm, micro=3)
    assert comm.waits == len(comm.sent) >= 3


def split(layers: int, size: int) -> list[Stage]:
    return [Stage.of(layers, Rank(rank, size)) for rank in range(size)]  # type: ignore[arg-type]


def test_layers_are_dealt_evenly_and_no_stage_is_empty() -> None:
    assert [s.layers for s in split(11, 3)] == [range(4), range(4, 8), range(8, 11)]
    for count in range(1, 30):
        for size in range(1, count + 1):
            stages = split(count, size)
            assert [i for stage in stages for i in stage.layers] == list(range(count))
            lengths = [len(stage.layers) for stage in stages]
            assert lengths == sorted(lengths, reverse=True)
            assert lengths[0] - lengths[-1] <= 1
            assert [s.first for s in stages] == [True] + [False] * (size - 1)
            assert [s.last for s in stages] == [False] * (size - 1) + [True]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pp 5 .* has 4 layers; use a pp of at most 4"):
        load("llama", 0, 5)
