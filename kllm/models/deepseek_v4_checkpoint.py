"""The tensors of released DeepSeek-V4 checkpoints: names, shapes, formats and targets."""

from collections.abc import Iterator
from dataclasses import dataclass

from kllm.models.base import BlockScale, CheckpointTensor
from kllm.models.deepseek_v4_config import DeepseekV4Config, DSparkConfig
from kllm.models.scope import Scope

FP8_SCALE = BlockScale("scale", "F8_E8M0", (128, 128))
FP4_SCALE = BlockScale("scale", "F8_E8M0", (1, 32))


def manifest(config: DeepseekV4Config) -> Iterator[CheckpointTensor]:
    """All tensors of the released checkpoint, those of the draft head flagged `mtp`.

    DSpark's stages are flagged too; their targets name parts that the network does not have.
    """
    root = _Scope("", "")
    matrix = (config.vocab_size, config.hidden_size)
    yield root.tensor("embed.weight", matrix, "embed.weight", split="column")
    for i, kind in enumerate(config.layer_kinds):
        scope = _Scope(f"layers.{i}.", f"layers.{i}.")
        yield from _layer(scope, config, kind, hashed=i < config.num_hash_layers)
    yield from _final(root, config)
    yield root.tensor("head.weight", matrix, "head.weight", split="column")
    if config.dspark:
        yield from _dspark(config, config.dspark)
    elif config.mtp_layers:
        yield from _mtp(config)


@dataclass(frozen=True, slots=True)
class _Scope(Scope):
    """Adds the kinds of tensors that are peculiar to the family."""

    def fp8(
        self,
        name: str,
        shape: tuple[int, int],
        target: str,
        *,
        row: int = 0,
        split: str | None = None,
    ) -> CheckpointTensor:
        return self.tensor(name, shape, target, "F8_E4M3", scale=FP8_SCALE, row=row, split=split)

    def hyper(
        self, name: str, rows: int, scales: int, c: DeepseekV4Config, target: str
    ) -> Iterator[CheckpointTensor]:
        width = c.hc_mult * c.hidden_size
        yield self.tensor(f"{name}_fn", (rows, width), f"{target}.fn", "F32")
        yield self.tensor(f"{name}_base", (rows,), f"{target}.base", "F32")
        yield self.tensor(f"{name}_scale", (scales,), f"{target}.scale", "F32")


def _final(scope: _Scope, config: DeepseekV4Config) -> Iterator[CheckpointTensor]:
    """What turns streams into the input of the lm head."""
    yield scope.tensor("norm.weight", (config.hidden_size,), "norm.weight")
    yield from scope.hyper("hc_head", config.hc_mult, 1, config, "hc_head")


def _layer(
    scope: _Scope, config: DeepseekV4Config, kind: str, hashed: bool
) -> Iterator[CheckpointTensor]:
    rows = (2 + config.hc_mult) * config.hc_mult
    yield from scope.hyper("hc_attn", rows, 3, config, "hc_attn")
    yield scope.tensor("attn_norm.weight", (config.hidden_size,), "attn_norm.weight")
    yield from _attention(scope.inner("attn.", "attn."), config, kind)
    yield from scope.hyper("hc_ffn", rows, 3, config, "hc_ffn")
    yield scope.tensor("ffn_norm.weight", (config.hidden_size,), "ffn_norm.weight")
    yield from _ffn(scope.inner("ffn.", "ffn."), config, hashed)


def _attention(scope: _Scope, config: DeepseekV4Config, kind: str) -> Iterator[CheckpointTensor]:
    c, d, rank = config, config.hidden_size, config.q_lora_rank
    width = c.num_attention_heads * c.head_dim
    low = c.o_groups * c.o_lora_rank
    yield scope.fp8("wq_a.weight", (rank, d), "wqkv_a.weight")
    yield scope.fp8("wkv.weight", (c.head_dim, d), "wqkv_a.weight", row=rank)
    yield scope.tensor("q_norm.weight", (rank,), "q_norm.weight")
    yield scope.tensor("kv_norm.weight", (c.head_dim,), "kv_norm.weight")
    yield scope.fp8("wq_b.weight", (width, rank), "wq_b.weight", split="column")
    yield scope.fp8("wo_a.weight", (low, width // c.o_groups), "wo_a", split="column")
    yield scope.fp8("wo_b.weight", (d, low), "wo_b.weight", split="row")
    yield scope.tensor("attn_sink", (c.num_attention_heads,), "sink", "F32", split="column")
    compression = c.compression(kind)
    if compression:
        inner = scope.inner("compressor.", "compressor.")
        streams = compression.span // compression.ratio
        yield from _compressor(inner, d, c.head_dim, streams, compression.ratio)
    if kind == "csa":
        inner = scope.inner("indexer.", "indexer.")
        queries = c.index_n_heads * c.index_head_dim
        yield inner.fp8("wq_b.weight", (queries, rank), "wq_b.weight")
        yield inner.tensor("weights_proj.weight", (c.index_n_heads, d), "weights.weight")
        inner = inner.inner("compressor.", "compressor.")
        yield from _compressor(inner, d, c.index_head_dim, 2, c.csa_ratio)


def _compressor(
    scope: _Scope, d: int, dim: int, streams: int, ratio: int
) -> Iterator[CheckpointTensor]:
    width = streams * dim
    yield scope.tensor("wkv.weight", (width, d), "wkv_gate.weight")
    yield scope.tensor("wgate.weight", (width, d), "wkv_gate.weight", row=width)
    yield scope.tensor("norm.weight", (dim,), "norm.weight")
    yield scope.tensor("ape", (ratio, width), "ape", "F32")


def _ffn(scope: _Scope, config: DeepseekV4Config, hashed: bool) -> Iterator[CheckpointTensor]:
    c, d = config, config.hidden_size
    yield scope.tensor("gate.weight", (c.n_routed_experts, d), "router.weight")
    if hashed:
        shape = (c.vocab_size, c.num_experts_per_tok)
        yield scope.tensor("gate.tid2eid", shape, "router.tid2eid", "I64")
    else:
        yield scope.tensor("gate.bias", (c.n_routed_experts,), "router.bias", "F32")
    hidden = c.moe_intermediate_size
    dtype, scale = ("F4_E2M1", FP4_SCALE) if c.expert_dtype == "fp4" else ("F8_E4M3", FP8_SCALE)
    parts = (
        ("w1", (hidden, d), "w13", 0, "column"),
        ("w3", (hidden, d), "w13", hidden, "column"),
        ("w2", (d, hidden), "w2", 0, "row"),
    )
    for e in range(c.n_routed_experts):
        expert = scope.inner(f"experts.{e}.", "experts.")
        for name, shape, target, row, split in parts:
            yield expert.tensor(
                f"{name}.weight",
                shape,
                target,
                dtype,
                scale=scale,
                row=row,
                expert=e,
                split=split,
            )
    hidden = c.shared_intermediate_size
    shared = scope.inner("shared_experts.", "shared.")
    yield shared.fp8("w1.weight", (hidden, d), "gate_up.weight", split="column")
    yield shared.fp8("w3.weight", (hidden, d), "gate_up.weight", row=hidden, split="column")
    yield shared.fp8("w2.weight", (d, hidden), "down.weight", split="row")


def _mtp(config: DeepseekV4Config) -> Iterator[CheckpointTensor]:
    """The head of the original releases: one layer behind two projections."""
    scope, d = _Scope("mtp.0.", "mtp.", mtp=True), config.hidden_size
    for name in ("e", "h"):
        yield scope.fp8(f"{name}_proj.weight", (d, d), f"{name}_proj.weight")
        yield scope.tensor(f"{name}norm.weight", (d,), f"{name}_norm.weight")
    yield from _layer(scope.inner("", "layer."), config, "window", hashed=False)
    yield from _final(scope, config)


def _dspark(config: DeepseekV4Config, dspark: DSparkConfig) -> Iterator[CheckpointTensor]:
    """The block drafter of the later releases: stages behind one projection of several layers."""
    d, rank = config.hidden_size, dspark.markov_rank
    for i in range(dspark.stages):
        scope = _Scope(f"mtp.{i}.", f"dspark.{i}.", mtp=True)
        if i == 0:
            width = len(dspark.target_layer_ids) * d
            yield scope.fp8("main_proj.weight", (d, width), "main_proj.weight")
            yield scope.tensor("main_norm.weight", (d,), "main_norm.weight")
        yield from _layer(scope.inner("", "layer."), config, "window", hashed=False)
        if i == dspark.stages - 1:
            yield from _final(scope, config)
            for table in ("markov_w1", "markov_w2"):
                name = f"markov_head.{table}.weight"
                yield scope.tensor(name, (config.vocab_size, rank), name)
            name = "confidence_head.proj.weight"
            yield scope.tensor(name, (1, d + rank), name)
