"""The layout algebra's numbers against networks that are really built, and published ones."""

from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

from kllm.config import ParallelConfig
from kllm.errors import ConfigError
from kllm.models import deepseek_v4, glm_moe_dsa, llama
from kllm.models.base import Groups, Stage, default_device_and_dtype
from kllm.models.deployment import Device, Load, deployment
from kllm.models.load import rank_bytes, read_family_config
from kllm.models.shape import model_shape
from kllm.parallel.emulated import EmulatedComm
from kllm.parallel.expert_placement import ExpertOptions
from kllm.parallel.footprint import STORED, ModelShape, capacity, footprint
from kllm.parallel.gpus import GPUS
from kllm.parallel.layout import layouts, parse, problem, stage_bounds
from kllm.parallel.link import Link

LINK = Link(latency_s=0.0, bytes_per_s=1e12)
FAMILIES = (llama, glm_moe_dsa, deepseek_v4)
NAMES = [family.__name__.rpartition(".")[2] for family in FAMILIES]


@cache
def preset(name: str) -> ModelShape:
    _, family, config = read_family_config(name)
    return model_shape(family, config)


@pytest.fixture
def glm() -> ModelShape:
    return preset("glm-5.2")


def groups(layout: ParallelConfig, stage: int) -> Groups:
    def comm(size: int, rank: int = 0) -> EmulatedComm:
        return EmulatedComm(LINK, size=size, rank=rank, device=torch.device("cpu"))

    tp = comm(layout.tp)
    rest = comm(layout.ep), comm(layout.cp), comm(layout.pp, stage)
    return Groups(tp, tp, tp, *rest, ExpertOptions.of(layout))


@pytest.mark.parametrize("family", FAMILIES, ids=NAMES)
@pytest.mark.parametrize(
    "text",
    [
        "tp=1",
        "tp=2",
        "tp=2,ep=2",
        "dp=4,ep=4",
        "dp=2,ep=2,redundant_experts=4",
        "pp=2",
        "tp=2,pp=3",
    ],
)
@pytest.mark.parametrize("mtp", [False, True], ids=["", "mtp"])
def test_weight_bytes_are_those_of_the_network(family: Any, text: str, mtp: bool) -> None:
    """Every stage of a layout, built with its communicators."""
    layout, config = parse(text), family.tiny_config()
    if family is llama:
        layout = ParallelConfig(tp=layout.tp, dp=layout.dp, pp=layout.pp)
        mtp = False
    shape = model_shape(family, config, mtp=mtp)
    if family is not llama and layout.tp > 1 and config.vocab_size % layout.tp:
        config = type(config)(**{**_fields(config), "vocab_size": config.vocab_size + 1})
        shape = model_shape(family, config, mtp=mtp)
    assert problem(shape.dims, layout) is None
    stages = footprint(shape, layout, dtype="bfloat16", kv_dtype="bfloat16")
    for i, stage in enumerate(stages):
        with default_device_and_dtype(torch.device("meta"), torch.bfloat16):
            model = family.build(config, groups(layout, i), mtp)
        assert stage.weight_bytes == sum(p.nbytes for p in model.parameters()), f"stage {i}"
        spec = model.cache_spec
        assert stage.kv_bytes_per_token == spec.bytes_per_token("bfloat16")
        assert stage.state_bytes_per_request == spec.bytes_per_request("bfloat16")
    heaviest = max(stage.weight_bytes for stage in stages)
    assert rank_bytes(family.manifest(config), layout, "bfloat16", mtp) == heaviest


def _fields(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def test_a_tied_embedding_lies_on_both_ends_of_a_pipeline() -> None:
    _, family, config = read_family_config("smollm2-135m")
    shape = model_shape(family, config)
    layout = parse("pp=2")
    for i, stage in enumerate(footprint(shape, layout, dtype="float32", kv_dtype="float32")):
        with default_device_and_dtype(torch.device("meta"), torch.float32):
            model = family.build(config, groups(layout, i))
        assert stage.weight_bytes == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(("layers", "stages"), [(78, 8), (43, 4), (3, 3), (7, 2), (5, 1)])
def test_stages_are_those_of_the_networks(layers: int, stages: int) -> None:
    bounds = stage_bounds(layers, stages)
    layout = ParallelConfig(pp=stages)
    found = [Stage.of(layers, groups(layout, i).pp) for i in range(stages)]
    assert [(stage.start, stage.stop) for stage in found] == list(pairwise(bounds))


@pytest.mark.parametrize("family", FAMILIES, ids=NAMES)
def test_a_layout_is_valid_if_the_network_can_be_built(family: ModuleType) -> None:
    config = family.tiny_config()
    dims = model_shape(family, config).dims
    for tp in (1, 2, 3, 4, 6):
        with default_device_and_dtype(torch.device("meta"), torch.float32):
            try:
                family.build(config, groups(ParallelConfig(tp=tp), 0))
                built = True
            except ConfigError:
                built = False
        assert built == (problem(dims, ParallelConfig(tp=tp)) is None), tp


def test_the_checkpoint_is_one_rank_of_no_layout() -> None:
    for name, published in (("glm-5.2", 745_585), ("deepseek-v4-flash", 156_020)):
        _, family, config = read_family_config(name)
        shape = preset(name)
        (alone,) = footprint(shape, ParallelConfig(), dtype=STORED, kv_dtype="fp8")
        tensors = [t for t in family.manifest(config) if not t.mtp]
        assert alone.weight_bytes == sum(t.nbytes for t in tensors)
        assert alone.weight_bytes / 1e6 == pytest.approx(published, abs=10)


def tokens(
    shape: ModelShape,
    text: str,
    memory: float,
    fraction: float,
    *wide: str,
    kv_dtype: str = "fp8",
) -> float:
    """Millions of tokens."""
    found = capacity(
        shape,
        parse(text),
        memory_bytes=memory,
        fraction=fraction,
        dtype=STORED,
        kv_dtype=kv_dtype,
        stage_wide=frozenset(wide),
    )
    return found.tokens / 1e6


def test_the_published_capacities_of_glm_at_288_gb(glm: ModelShape) -> None:
    """FP8 weights and KV, no MTP, 251.1 GB for both; vocabulary tables cut over all ranks."""
    tp, dp = (tokens(glm, text, 288e9, 0.872, "vocab") for text in ("tp=8", "dp=8,ep=8"))
    assert round(tp, 2) == 2.90
    assert round(dp, 2) == 21.24
    assert round(dp / tp, 2) == 7.32


@pytest.mark.parametrize(
    ("fraction", "row"),
    [
        (0.85, (0.47, 0.26, 2.23, 1.77, 1.28)),
        (0.90, (0.60, 0.34, 3.27, 2.81, 2.32)),
        (0.95, (0.73, 0.41, 4.32, 3.86, 3.37)),
        (1.00, (0.86, 0.49, 5.36, 4.91, 4.41)),
    ],
)
def test_the_capacities_of_glm_on_eight_h200(
    glm: ModelShape, fraction: float, row: tuple[float, ...]
) -> None:
    memory = GPUS["h200"].memory_bytes
    found = (
        tokens(glm, "tp=8", memory, fraction),
        tokens(glm, "tp=8", memory, fraction, kv_dtype="bfloat16"),
        tokens(glm, "dp=8,ep=8", memory, fraction, "vocab", "ffn"),
        tokens(glm, "dp=8,ep=8", memory, fraction, "vocab"),
        tokens(glm, "dp=8,ep=8", memory, fraction),
    )
    assert found == pytest.approx(row, abs=0.0051)  # the table has two decimals


def test_weights_of_glm_by_what_is_cut(glm: ModelShape) -> None:
    def gigabytes(text: str, *wide: str) -> float:
        found = capacity(
            glm,
            parse(text),
            memory_bytes=1e12,
            fraction=1,
            dtype=STORED,
            kv_dtype="fp8",
            stage_wide=frozenset(wide),
        )
        return round(found.heaviest.weight_bytes / 1e9, 2)

    assert gigabytes("tp=8") == 94.68
    assert gigabytes("dp=8,ep=8", "ffn", "vocab") == 104.85
    assert gigabytes("dp=8,ep=8", "vocab") == 107.92
    assert gigabytes("dp=8,ep=8") == 111.25


def test_memory_facts_of_deepseek_v4() -> None:
    facts = {"deepseek-v4-flash": (6880, 3850.25, 15.42), "deepseek-v4-pro": (9848, 5511.4, 23.26)}
    for name, (bf16, fp8, constant) in facts.items():
        shape = preset(name)
        for tp in (1, 8):  # one KV head: tensor parallelism cuts nothing
            for dtype, want in (("bfloat16", bf16), ("fp8", fp8)):
                layout = ParallelConfig(tp=tp)
                (stage,) = footprint(shape, layout, dtype=STORED, kv_dtype=dtype)
                assert stage.kv_bytes_per_token == pytest.approx(want, abs=0.06)
            assert stage.state_bytes_per_request / 1e6 == pytest.approx(constant, abs=0.02)


def test_a_latent_is_copied_by_tensor_parallelism_and_keys_by_head_are_not(glm: ModelShape) -> None:
    dense = preset("llama-3-8b")
    common = {"memory_bytes": 288e9, "fraction": 0.9, "dtype": STORED, "kv_dtype": "bfloat16"}
    latent, heads = (
        capacity(shape, parse("tp=8"), **common)  # type: ignore[arg-type]
        for shape in (glm, dense)
    )
    assert (latent.copies, heads.copies) == (8, 1)
    assert latent.kv_bytes_per_token == 8 * 95_232
    assert heads.kv_bytes_per_token == 131_072  # 32 layers, 2 * 8 heads of 128
    assert latent.tokens == latent.rank_tokens


def test_weights_that_do_not_fit_leave_no_tokens(glm: ModelShape) -> None:
    assert tokens(glm, "tp=1", 141e9, 0.9) == 0


def test_every_valid_layout_of_a_model_has_a_footprint(glm: ModelShape) -> None:
    found = layouts(glm.dims, 16)
    assert len(found) > 50
    for layout in found:
        stages = footprint(glm, layout, dtype=STORED, kv_dtype="fp8")
        copies = layout.tp * sum(stage.kv_bytes_per_token for stage in stages)
        assert len(stages) == layout.pp
        assert copies == pytest.approx(layout.tp * 53_940)


def test_a_prompt_lies_on_the_other_ranks_too_while_it_is_computed(glm: ModelShape) -> None:
    common = {"memory_bytes": 288e9, "fraction": 0.9, "dtype": STORED, "kv_dtype": "fp8"}
    found = {
        kind: capacity(glm, parse(f"cp=8,ep=8,cp_kind={kind}"), **common)  # type: ignore[arg-type]
        for kind in ("ring", "all_gather", "replicated")
    }
    # The whole of it on its owner, and an eighth on each of seven ranks.
    assert found["ring"].prompt_tokens == int(found["ring"].tokens / (1 + 7 / 8))
    assert found["all_gather"] == found["ring"]
    assert found["replicated"].prompt_tokens == found["replicated"].rank_tokens
    alone = capacity(glm, parse("dp=8,ep=8"), **common)  # type: ignore[arg-type]
    assert alone.prompt_tokens == alone.tokens == found["ring"].tokens


def test_redundant_experts_cost_their_share(glm: ModelShape) -> None:
    plain, more = (
        footprint(glm, parse(f"dp=8,ep=8,redundant_experts={n}"), dtype=STORED, kv_dtype="fp8")[0]
        for n in (0, 32)
    )
    one = 724.953e9 / 256  # all layers' copies of one expert
    assert more.weight_bytes - plain.weight_bytes == pytest.approx(32 / 8 * one, rel=1e-5)


def test_a_deployment_chooses_its_kind_of_context_parallelism() -> None:
    device = Device(
        name="h200",
        memory_bytes=141e9,
        memory_bytes_per_s=4.8e12,
        matmul_flops=989e12,
        link=LINK,
    )
    found = deployment(
        "glm-5.2",
        parse("cp=8,ep=8"),
        device,
        Load(tokens=1 << 17, cached=0, batch=8),
        memory_fraction=0.9,
        dtype=STORED,
        kv_dtype="fp8",
    )
    assert found.sequence is not None
    kinds = {"ring": found.sequence.ring_s, "all_gather": found.sequence.all_gather_s}
    assert found.layout.cp_kind == found.sequence.kind == min(kinds, key=lambda k: kinds[k])
    assert found.sequence.replicated_s == found.sequence.all_gather_s, "there is no prefix"
    assert found.fidelity == "modelled"
