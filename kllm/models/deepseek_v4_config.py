"""The config of the DeepSeek-V4 family: reading, checking, and making smaller ones."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kllm.attention.compressor import Compression
from kllm.errors import ConfigError
from kllm.layers.hyper_connection import StreamSettings
from kllm.layers.moe import SCORES, Routing
from kllm.layers.rotary import Rotary, Yarn
from kllm.models.hf_config import MOST_LAYERS, ConfigReader
from kllm.models.layer_mix import check_layers, keep_mix

LAYER_KINDS = {0: "window", 4: "csa", 128: "hca"}  # by the codes in `compress_ratios`


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig:
    """The block drafter that later releases carry in place of the MTP head."""

    block_size: int  # tokens drafted at once
    noise_token_id: int
    target_layer_ids: tuple[int, ...]  # layers whose outputs it reads
    markov_rank: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Config:
    """The keys of a deepseek_v4 `config.json` that network and checkpoint need."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_kinds: tuple[str, ...]  # "window", "csa" or "hca" of each layer
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int  # the last channels of a head
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int  # per group
    sliding_window: int
    csa_ratio: int  # tokens an entry
    hca_ratio: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    num_hash_layers: int
    scoring_func: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    max_position_embeddings: int
    mtp_layers: int  # 0 or 1; not counting DSpark's stages
    dspark: DSparkConfig | None = None
    expert_dtype: str = "fp4"  # of the released checkpoint: "fp4" or "fp8"
    clamp_shared_expert: bool = True  # the first release left the shared expert unclamped
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.layer_kinds) != self.num_hidden_layers:
            raise ConfigError(
                f"compress_ratios names {len(self.layer_kinds)} layers and "
                f"num_hidden_layers is {self.num_hidden_layers}"
            )
        if self.num_attention_heads % self.o_groups:
            raise ConfigError(
                f"num_attention_heads = {self.num_attention_heads} is not a multiple of "
                f"o_groups = {self.o_groups}"
            )
        rope = self.qk_rope_head_dim
        if rope % 2 or rope >= min(self.head_dim, self.index_head_dim):
            raise ConfigError(
                f"qk_rope_head_dim must be even and below head_dim and index_head_dim, got {rope}"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ConfigError(
                f"num_experts_per_tok = {self.num_experts_per_tok} exceeds "
                f"n_routed_experts = {self.n_routed_experts}"
            )

    def layers_of(self, kind: str) -> tuple[int, ...]:
        """Indices of the layers of one kind."""
        return tuple(i for i, k in enumerate(self.layer_kinds) if k == kind)

    def compression(self, kind: str) -> Compression | None:
        """The main compressed state of layers of a kind; None: "window"."""
        if kind == "csa":
            return Compression("csa", "csa_tail", self.csa_ratio, overlap=True)
        if kind == "hca":
            return Compression("hca", "hca_tail", self.hca_ratio, overlap=False)
        return None

    @property
    def index_compression(self) -> Compression:
        """The compressed state of the indexer's keys."""
        return Compression("csa_index", "csa_index_tail", self.csa_ratio, overlap=True)

    def rotary(self, kind: str) -> Rotary:
        """The rotary embedding of layers of a kind."""
        if kind == "window":
            return Rotary(self.qk_rope_head_dim, self.rope_theta)
        return Rotary(self.qk_rope_head_dim, self.compress_rope_theta, self.yarn)

    @property
    def routing(self) -> Routing:
        """How routers weigh experts."""
        return Routing(
            num_experts=self.n_routed_experts,
            top_k=self.num_experts_per_tok,
            scoring=self.scoring_func,
            scaling=self.routed_scaling_factor,
            normalize=self.norm_topk_prob,
        )

    @property
    def shared_intermediate_size(self) -> int:
        """Hidden features of the shared expert."""
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def streams(self) -> StreamSettings:
        """What all hyper-connections share."""
        return StreamSettings(
            streams=self.hc_mult,
            dim=self.hidden_size,
            norm_eps=self.rms_norm_eps,
            eps=self.hc_eps,
            iterations=self.hc_sinkhorn_iters,
        )


def read_config(data: Mapping[str, Any]) -> DeepseekV4Config:
    """The config from the JSON of a `config.json`.

    Raises:
        ConfigError: for a missing key or a value the network cannot run.
    """
    reader = ConfigReader(data)
    reader.require("hidden_act", ("silu",))
    reader.require("attention_bias", (False,))
    reader.require("tie_word_embeddings", (False,))
    reader.require("num_key_value_heads", (1,))
    reader.require("scoring_func", tuple(SCORES))
    reader.require("topk_method", ("noaux_tc",))
    reader.require("expert_dtype", ("fp4", "fp8"))
    layers = reader.positive("num_hidden_layers", most=MOST_LAYERS)
    ratios = _read_ratios(data, layers)
    dspark = _read_dspark(reader, len(ratios) - layers)
    hash_layers = int(reader.number("num_hash_layers", 0))
    return DeepseekV4Config(
        vocab_size=reader.positive("vocab_size"),
        hidden_size=reader.positive("hidden_size"),
        num_hidden_layers=layers,
        layer_kinds=tuple(LAYER_KINDS[ratio] for ratio in ratios[:layers]),
        num_attention_heads=reader.positive("num_attention_heads"),
        head_dim=reader.positive("head_dim"),
        qk_rope_head_dim=reader.positive("qk_rope_head_dim"),
        q_lora_rank=reader.positive("q_lora_rank"),
        o_groups=reader.positive("o_groups"),
        o_lora_rank=reader.positive("o_lora_rank"),
        sliding_window=reader.positive("sliding_window"),
        csa_ratio=reader.positive("compress_rate_csa", 4),
        hca_ratio=reader.positive("compress_rate_hca", 128),
        index_n_heads=reader.positive("index_n_heads"),
        index_head_dim=reader.positive("index_head_dim"),
        index_topk=reader.positive("index_topk"),
        n_routed_experts=reader.positive("n_routed_experts"),
        num_experts_per_tok=reader.positive("num_experts_per_tok"),
        n_shared_experts=reader.positive("n_shared_experts"),
        moe_intermediate_size=reader.positive("moe_intermediate_size"),
        num_hash_layers=hash_layers,
        scoring_func=data.get("scoring_func", "sqrtsoftplus"),
        norm_topk_prob=bool(data.get("norm_topk_prob", True)),
        routed_scaling_factor=reader.number("routed_scaling_factor"),
        swiglu_limit=reader.number("swiglu_limit"),
        hc_mult=reader.positive("hc_mult"),
        hc_sinkhorn_iters=reader.positive("hc_sinkhorn_iters"),
        hc_eps=reader.number("hc_eps"),
        rms_norm_eps=reader.number("rms_norm_eps"),
        rope_theta=reader.number("rope_theta"),
        compress_rope_theta=reader.number("compress_rope_theta"),
        yarn=_read_yarn(reader),
        max_position_embeddings=reader.positive("max_position_embeddings"),
        mtp_layers=0 if dspark else int(reader.number("num_nextn_predict_layers", 0)),
        dspark=dspark,
        expert_dtype=data.get("expert_dtype", "fp4"),
        clamp_shared_expert=bool(data.get("clamp_shared_expert", True)),
        bos_token_id=data.get("bos_token_id"),
        eos_token_ids=reader.token_ids("eos_token_id"),
    )


def _read_ratios(data: Mapping[str, Any], layers: int) -> list[int]:
    """`compress_ratios`: a code for each layer, then one for each draft layer."""
    ratios = data.get("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < layers:
        raise ConfigError(
            f"config.json: compress_ratios must list at least {layers} layers, got {ratios!r}"
        )
    unknown = {repr(ratio) for ratio in ratios if ratio not in LAYER_KINDS}
    if unknown:
        raise ConfigError(
            f"config.json: compress_ratios has {', '.join(sorted(unknown))}; known: 0, 4, 128"
        )
    return ratios


def _read_dspark(reader: ConfigReader, stages: int) -> DSparkConfig | None:
    if "dspark_block_size" not in reader.data:
        return None
    targets = reader.data.get("dspark_target_layer_ids")
    if not isinstance(targets, list) or not targets:
        raise ConfigError(
            f"config.json: dspark_target_layer_ids must be a list of layers, got {targets!r}"
        )
    return DSparkConfig(
        block_size=reader.positive("dspark_block_size"),
        noise_token_id=int(reader.number("dspark_noise_token_id")),
        target_layer_ids=tuple(targets),
        markov_rank=reader.positive("dspark_markov_rank"),
        stages=stages,
    )


def _read_yarn(reader: ConfigReader) -> Yarn | None:
    if reader.rope_type(("default", "yarn")) == "default":
        return None
    return Yarn(
        factor=reader.rope_number("factor"),
        original_max_position=int(reader.rope_number("original_max_position_embeddings")),
        beta_fast=reader.rope_number("beta_fast", 32.0),
        beta_slow=reader.rope_number("beta_slow", 1.0),
    )


def tiny_config() -> DeepseekV4Config:
    """All layer kinds, both routers, YaRN and a clamp that is active, in half a million weights.

    16 index heads: with few of them all scores can be exactly 0, and ties have no right order.
    """
    return DeepseekV4Config(
        vocab_size=96,
        hidden_size=64,
        num_hidden_layers=6,
        layer_kinds=("window", "hca", "csa", "hca", "csa", "window"),
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=8,
        q_lora_rank=24,
        o_groups=4,
        o_lora_rank=12,
        sliding_window=8,
        csa_ratio=4,
        hca_ratio=16,
        index_n_heads=16,
        index_head_dim=16,
        index_topk=3,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=32,
        num_hash_layers=2,
        scoring_func="sqrtsoftplus",
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        swiglu_limit=0.5,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        yarn=Yarn(16.0, 64),
        max_position_embeddings=4096,
        mtp_layers=1,
        bos_token_id=0,
        eos_token_ids=(1,),
    )


def scaled_config(config: DeepseekV4Config, layers: int) -> DeepseekV4Config:
    """The config cut to `layers` layers with the same mix of kinds and of hash layers.

    Raises:
        ConfigError: when `layers` is not between 1 and the number of layers.
    """
    total = config.num_hidden_layers
    check_layers(layers, total)
    kept = keep_mix(config.layer_kinds, layers)
    hashed = max(1, round(config.num_hash_layers * layers / total))
    dspark = config.dspark
    if dspark:
        ids = (max(i - total + layers, 0) for i in dspark.target_layer_ids)
        dspark = replace(dspark, target_layer_ids=tuple(ids))
    return replace(
        config,
        num_hidden_layers=layers,
        layer_kinds=tuple(config.layer_kinds[i] for i in kept),
        num_hash_layers=min(hashed, config.num_hash_layers),
        dspark=dspark,
    )
