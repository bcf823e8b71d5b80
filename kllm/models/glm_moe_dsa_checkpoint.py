"""The tensors of released GLM-5, DeepSeek-V3 and V3.2 checkpoints: names, shapes, targets."""

from collections.abc import Iterator
from dataclasses import dataclass

from kllm.models.base import BlockScale, CheckpointTensor
from kllm.models.glm_moe_dsa_config import FULL, GlmMoeDsaConfig
from kllm.models.scope import Scope

FP8_SCALE = BlockScale("weight_scale_inv", "F32", (128, 128))


def manifest(config: GlmMoeDsaConfig) -> Iterator[CheckpointTensor]:
    """All tensors of the released checkpoint, those of the MTP head flagged `mtp`."""
    root = _Scope("", "", fp8=config.fp8_weights)
    table = (config.vocab_size, config.hidden_size)
    yield root.tensor("model.embed_tokens.weight", table, "embed.weight", split="column")
    for i in range(config.num_hidden_layers):
        scope = root.inner(f"model.layers.{i}.", f"layers.{i}.")
        yield from _layer(scope, config, config.indexer_types[i], config.sparse_mlp[i])
    yield root.tensor("model.norm.weight", (config.hidden_size,), "norm.weight")
    yield root.tensor("lm_head.weight", table, "head.weight", split="column")
    if config.mtp_layers:
        yield from _mtp(config)


@dataclass(frozen=True, slots=True)
class _Scope(Scope):
    """Adds matrices, which are FP8 with block scales in some releases and BF16 in others."""

    fp8: bool = False

    def matrix(
        self,
        name: str,
        shape: tuple[int, int],
        target: str,
        *,
        row: int = 0,
        expert: int | None = None,
        split: str | None = None,
    ) -> CheckpointTensor:
        dtype, scale = ("F8_E4M3", FP8_SCALE) if self.fp8 else ("BF16", None)
        return self.tensor(
            name, shape, target, dtype, scale=scale, row=row, expert=expert, split=split
        )

    def gated(
        self, hidden: int, d: int, up: str, down: str, expert: int | None = None
    ) -> Iterator[CheckpointTensor]:
        """Gate and up, stacked in the target `up`, and down."""
        for k, name in enumerate(("gate", "up")):
            yield self.matrix(
                f"{name}_proj.weight",
                (hidden, d),
                up,
                row=k * hidden,
                expert=expert,
                split="column",
            )
        yield self.matrix("down_proj.weight", (d, hidden), down, expert=expert, split="row")


def _layer(
    scope: _Scope, config: GlmMoeDsaConfig, indexer_type: str, sparse: bool
) -> Iterator[CheckpointTensor]:
    d = config.hidden_size
    yield scope.tensor("input_layernorm.weight", (d,), "attn_norm.weight")
    yield from _attention(scope.inner("self_attn.", "attn."), config, indexer_type)
    yield scope.tensor("post_attention_layernorm.weight", (d,), "ffn_norm.weight")
    ffn = scope.inner("mlp.", "ffn.")
    if sparse:
        yield from _experts(ffn, config)
    else:
        yield from ffn.gated(config.intermediate_size, d, "gate_up.weight", "down.weight")


def _attention(
    scope: _Scope, config: GlmMoeDsaConfig, indexer_type: str
) -> Iterator[CheckpointTensor]:
    c, d, q_rank, rank = config, config.hidden_size, config.q_lora_rank, config.kv_lora_rank
    q_rows = c.num_attention_heads * c.qk_head_dim
    kv_rows = c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)
    columns = c.num_attention_heads * c.v_head_dim
    yield scope.matrix("q_a_proj.weight", (q_rank, d), "qkv_a.weight")
    shape = (c.entry_width, d)
    yield scope.matrix("kv_a_proj_with_mqa.weight", shape, "qkv_a.weight", row=q_rank)
    yield scope.tensor("q_a_layernorm.weight", (q_rank,), "q_norm.weight")
    yield scope.tensor("kv_a_layernorm.weight", (rank,), "kv_norm.weight")
    yield scope.matrix("q_b_proj.weight", (q_rows, q_rank), "q_b.weight", split="column")
    yield scope.matrix("kv_b_proj.weight", (kv_rows, rank), "kv_b.weight", split="column")
    yield scope.matrix("o_proj.weight", (d, columns), "out.weight", split="row")
    if indexer_type == FULL:
        yield from _indexer(scope.inner("indexer.", "indexer."), config)


def _indexer(scope: _Scope, config: GlmMoeDsaConfig) -> Iterator[CheckpointTensor]:
    assert config.indexer is not None
    heads, dim, d = config.indexer.heads, config.indexer.head_dim, config.hidden_size
    yield scope.matrix("wq_b.weight", (heads * dim, config.q_lora_rank), "wq_b.weight")
    yield scope.matrix("wk.weight", (dim, d), "wk.weight")
    yield scope.tensor("k_norm.weight", (dim,), "k_norm.weight")
    yield scope.tensor("k_norm.bias", (dim,), "k_norm.bias")
    yield scope.tensor("weights_proj.weight", (heads, d), "weights.weight")


def _experts(scope: _Scope, config: GlmMoeDsaConfig) -> Iterator[CheckpointTensor]:
    c, d, count = config, config.hidden_size, config.n_routed_experts
    yield scope.tensor("gate.weight", (count, d), "router.weight")
    yield scope.tensor("gate.e_score_correction_bias", (count,), "router.bias", "F32")
    for e in range(count):
        expert = scope.inner(f"experts.{e}.", "experts.")
        yield from expert.gated(c.moe_intermediate_size, d, "w13", "w2", expert=e)
    shared = scope.inner("shared_experts.", "shared.")
    yield from shared.gated(c.shared_intermediate_size, d, "gate_up.weight", "down.weight")


def _mtp(config: GlmMoeDsaConfig) -> Iterator[CheckpointTensor]:
    """The layer behind the last one, and what joins it to the backbone."""
    d = config.hidden_size
    prefix = f"model.layers.{config.num_hidden_layers}."
    scope = _Scope(prefix, "mtp.", mtp=True, fp8=config.fp8_weights)
    for name in ("e", "h"):
        yield scope.tensor(f"{name}norm.weight", (d,), f"{name}_norm.weight")
    yield scope.tensor("eh_proj.weight", (d, 2 * d), "eh_proj.weight")
    yield from _layer(scope.inner("", "layer."), config, config.mtp_indexer_type, sparse=True)
    yield scope.tensor("shared_head.norm.weight", (d,), "norm.weight")
    if config.mtp_tables:  # the network uses the backbone's
        table = (config.vocab_size, d)
        yield scope.tensor("embed_tokens.weight", table, "embed.weight", split="column")
        yield scope.tensor("shared_head.head.weight", table, "head.weight", split="column")
