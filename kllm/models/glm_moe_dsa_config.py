"""The config of the MLA families GLM-5, DeepSeek-V3 and V3.2: reading, checking, cutting."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kllm.errors import ConfigError
from kllm.layers.moe import Routing
from kllm.layers.rotary import Rotary, Yarn
from kllm.models.hf_config import MOST_LAYERS, ConfigReader
from kllm.models.layer_mix import check_layers, keep_mix

FULL, SHARED, DENSE = "full", "shared", "none"  # how a layer finds the entries it attends to
PATTERN = {"F": FULL, "S": SHARED}  # letters of `index_topk_pattern`
# What transformers assumes where a GLM config has no `index_skip_topk_offset`.
DEFAULT_SKIP_OFFSET = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """The lightning indexer of DSA."""

    heads: int
    head_dim: int
    topk: int  # entries a token attends to
    interleaved: bool  # rotary pairs (2i, 2i + 1), otherwise (i, i + rope / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmMoeDsaConfig:
    """The keys of a glm_moe_dsa, deepseek_v3 or deepseek_v32 `config.json` that are needed."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int  # of dense layers
    moe_intermediate_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer: IndexerConfig | None
    indexer_types: tuple[str, ...]  # FULL, SHARED or DENSE of each layer
    sparse_mlp: tuple[bool, ...]  # which layers have experts
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_theta: float
    rope_interleaved: bool
    yarn: Yarn | None
    yarn_mscale: float  # `mscale_all_dim`; 0: the softmax scale does not follow YaRN
    max_position_embeddings: int
    mtp_layers: int  # 0 or 1
    mtp_tables: bool = False  # whether the MTP head is released with copies of both tables
    fp8_weights: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("indexer_types", "sparse_mlp"):
            count = len(getattr(self, name))
            if count != self.num_hidden_layers:
                raise ConfigError(
                    f"{name} names {count} layers and num_hidden_layers is {self.num_hidden_layers}"
                )
        if self.indexer_types[0] == SHARED:
            raise ConfigError("the first layer cannot share the selection of a layer before it")
        rope = self.qk_rope_head_dim
        if rope % 2 or (self.indexer and rope > self.indexer.head_dim):
            raise ConfigError(
                f"qk_rope_head_dim must be even and at most index_head_dim, got {rope}"
            )
        if self.n_routed_experts % self.n_group or self.topk_group > self.n_group:
            raise ConfigError(
                f"n_group = {self.n_group} must divide n_routed_experts = {self.n_routed_experts} "
                f"and be at least topk_group = {self.topk_group}"
            )
        allowed = self.n_routed_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > allowed:
            raise ConfigError(
                f"num_experts_per_tok = {self.num_experts_per_tok} exceeds the {allowed} experts "
                "that a token can choose from"
            )

    def layers_of(self, kind: str) -> tuple[int, ...]:
        """Indices of the layers of one indexer type."""
        return tuple(i for i, k in enumerate(self.indexer_types) if k == kind)

    @property
    def qk_head_dim(self) -> int:
        """Channels of a query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def entry_width(self) -> int:
        """Channels of a cached latent and its rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """D^-0.5, with YaRN times (0.1 mscale ln(factor) + 1)^2 (DeepSeek-V3)."""
        scale: float = self.qk_head_dim**-0.5
        if self.yarn and self.yarn.factor > 1:
            scale *= (0.1 * self.yarn_mscale * math.log(self.yarn.factor) + 1.0) ** 2
        return scale

    @property
    def rotary(self) -> Rotary:
        """The rotary embedding of all layers and of the indexer."""
        return Rotary(self.qk_rope_head_dim, self.rope_theta, self.yarn)

    @property
    def routing(self) -> Routing:
        """How routers weigh experts."""
        return Routing(
            num_experts=self.n_routed_experts,
            top_k=self.num_experts_per_tok,
            scoring="sigmoid",
            scaling=self.routed_scaling_factor,
            normalize=self.norm_topk_prob,
            groups=self.n_group,
            kept_groups=self.topk_group,
        )

    @property
    def shared_intermediate_size(self) -> int:
        """Hidden features of the shared expert."""
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def mtp_indexer_type(self) -> str:
        """Of the MTP layer, which has an indexer of its own where there are any."""
        return FULL if self.indexer else DENSE


def read_config(data: Mapping[str, Any]) -> GlmMoeDsaConfig:
    """The config from the JSON of a `config.json`.

    Raises:
        ConfigError: for a missing key or a value the network cannot run.
    """
    reader = ConfigReader(data)
    reader.require("hidden_act", ("silu",))
    reader.require("attention_bias", (False,))
    reader.require("mlp_bias", (False,))
    reader.require("tie_word_embeddings", (False,))
    reader.require("scoring_func", ("sigmoid",))
    reader.require("topk_method", ("noaux_tc",))
    reader.require("moe_layer_freq", (1,))
    reader.require("num_nextn_predict_layers", (0, 1))
    layers = reader.positive("num_hidden_layers", most=MOST_LAYERS)
    deepseek = data.get("model_type") != "glm_moe_dsa"
    indexer = _read_indexer(reader)
    yarn, mscale = _read_yarn(reader)
    return GlmMoeDsaConfig(
        vocab_size=reader.positive("vocab_size"),
        hidden_size=reader.positive("hidden_size"),
        num_hidden_layers=layers,
        intermediate_size=reader.positive("intermediate_size"),
        moe_intermediate_size=reader.positive("moe_intermediate_size"),
        num_attention_heads=reader.positive("num_attention_heads"),
        q_lora_rank=reader.positive("q_lora_rank"),
        kv_lora_rank=reader.positive("kv_lora_rank"),
        qk_nope_head_dim=reader.positive("qk_nope_head_dim"),
        qk_rope_head_dim=reader.positive("qk_rope_head_dim"),
        v_head_dim=reader.positive("v_head_dim"),
        indexer=indexer,
        indexer_types=_read_indexer_types(reader, layers) if indexer else (DENSE,) * layers,
        sparse_mlp=_read_sparse_mlp(reader, layers),
        n_routed_experts=reader.positive("n_routed_experts"),
        num_experts_per_tok=reader.positive("num_experts_per_tok"),
        n_shared_experts=reader.positive("n_shared_experts"),
        n_group=reader.positive("n_group", 1),
        topk_group=reader.positive("topk_group", 1),
        norm_topk_prob=bool(data.get("norm_topk_prob", True)),
        routed_scaling_factor=reader.number("routed_scaling_factor"),
        rms_norm_eps=reader.number("rms_norm_eps"),
        rope_theta=reader.rope_number("rope_theta"),
        rope_interleaved=bool(data.get("rope_interleave", True)),
        yarn=yarn,
        yarn_mscale=mscale,
        max_position_embeddings=reader.positive("max_position_embeddings"),
        mtp_layers=int(reader.number("num_nextn_predict_layers", 0)),
        mtp_tables=deepseek,
        fp8_weights=_reads_fp8(data),
        bos_token_id=data.get("bos_token_id"),
        eos_token_ids=reader.token_ids("eos_token_id"),
    )


def _read_indexer(reader: ConfigReader) -> IndexerConfig | None:
    kind = reader.data.get("model_type")
    if kind == "deepseek_v3":
        return None
    return IndexerConfig(
        heads=reader.positive("index_n_heads"),
        head_dim=reader.positive("index_head_dim"),
        topk=reader.positive("index_topk"),
        interleaved=bool(reader.data.get("indexer_rope_interleave", kind == "glm_moe_dsa")),
    )


def _read_indexer_types(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """`indexer_types`, else `index_topk_pattern`, else the schedule by frequency and offset."""
    if reader.data.get("model_type") != "glm_moe_dsa":
        return (FULL,) * layers
    listed = reader.data.get("indexer_types")
    pattern = reader.data.get("index_topk_pattern")
    if listed is None and pattern is not None:
        listed = [PATTERN.get(letter, letter) for letter in pattern]
    if listed is None:
        frequency = reader.positive("index_topk_freq", 1)
        offset = int(reader.number("index_skip_topk_offset", DEFAULT_SKIP_OFFSET))
        own = (max(i - offset + 1, 0) % frequency == 0 for i in range(layers))
        return tuple(FULL if full else SHARED for full in own)
    unknown = {repr(kind) for kind in listed if kind not in (FULL, SHARED)}
    if unknown or len(listed) < layers:
        raise ConfigError(
            f"config.json: indexer_types must name {layers} layers '{FULL}' or '{SHARED}', got "
            f"{len(listed)} names" + (f" with {', '.join(sorted(unknown))}" if unknown else "")
        )
    return tuple(listed[:layers])


def _read_sparse_mlp(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    listed = reader.data.get("mlp_layer_types")
    if listed is None:
        dense = int(reader.number("first_k_dense_replace"))
        return tuple(i >= dense for i in range(layers))
    if len(listed) < layers or set(listed) - {"dense", "sparse"}:
        raise ConfigError(
            f"config.json: mlp_layer_types must name {layers} layers 'dense' or 'sparse'"
        )
    return tuple(kind == "sparse" for kind in listed[:layers])


def _read_yarn(reader: ConfigReader) -> tuple[Yarn | None, float]:
    if reader.rope_type(("default", "yarn")) == "default":
        return None, 0.0
    mscale = reader.rope_number("mscale_all_dim", 0.0)
    if not mscale or reader.rope_number("mscale", 0.0) != mscale:
        raise ConfigError(
            "config.json: YaRN's mscale and mscale_all_dim must be the same number, so that "
            "cosines and sines are not scaled"
        )
    yarn = Yarn(
        factor=reader.rope_number("factor"),
        original_max_position=int(reader.rope_number("original_max_position_embeddings")),
        beta_fast=reader.rope_number("beta_fast", 32.0),
        beta_slow=reader.rope_number("beta_slow", 1.0),
    )
    return yarn, mscale


def _reads_fp8(data: Mapping[str, Any]) -> bool:
    quantised = data.get("quantization_config")
    if not quantised:
        return False
    method, block = quantised.get("quant_method"), quantised.get("weight_block_size")
    if method != "fp8" or block != [128, 128]:
        raise ConfigError(
            f"config.json: quant_method {method!r} with weight_block_size {block!r} is not "
            "supported; known: 'fp8' with [128, 128]"
        )
    return True


def tiny_config() -> GlmMoeDsaConfig:
    """Dense and sparse layers, full and shared selections, in 0.7 million weights.

    16 index heads: with few of them all scores can be exactly 0, and ties have no right order.
    """
    layers = 11
    return GlmMoeDsaConfig(
        vocab_size=96,
        hidden_size=64,
        num_hidden_layers=layers,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_attention_heads=4,
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=20,
        indexer=IndexerConfig(heads=16, head_dim=16, topk=6, interleaved=True),
        indexer_types=tuple(FULL if i in (0, 1, 2, 6, 10) else SHARED for i in range(layers)),
        sparse_mlp=tuple(i >= 3 for i in range(layers)),
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        rms_norm_eps=1e-5,
        rope_theta=8_000_000.0,
        rope_interleaved=True,
        yarn=None,
        yarn_mscale=0.0,
        max_position_embeddings=4096,
        mtp_layers=1,
        bos_token_id=0,
        eos_token_ids=(1,),
    )


def scaled_config(config: GlmMoeDsaConfig, layers: int) -> GlmMoeDsaConfig:
    """The config cut to `layers` layers with the same mix of dense, sparse, full and shared ones.

    Raises:
        ConfigError: when `layers` is not between 1 and the number of layers.
    """
    check_layers(layers, config.num_hidden_layers)
    kept = keep_mix(list(zip(config.sparse_mlp, config.indexer_types, strict=True)), layers)
    types = [config.indexer_types[i] for i in kept]
    if types[0] == SHARED:  # there is no layer before it any more
        types[0] = FULL
    return replace(
        config,
        num_hidden_layers=layers,
        indexer_types=tuple(types),
        sparse_mlp=tuple(config.sparse_mlp[i] for i in kept),
    )
