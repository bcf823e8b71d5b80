"""Llama: dense decoder with grouped-query attention, rotary embedding and SwiGLU.

Source: Touvron et al. 2023 (Llama), Grattafiori et al. 2024 (Llama 3, its frequency scaling).
Queries, keys and values are one matrix, gate and up another: fewer, larger products.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from kllm import kernels
from kllm.attention.base import ATTENTION, AttentionBackend, resolve_attention
from kllm.attention.context import ForwardContext
from kllm.attention.sequence_parallel import SequenceAttention
from kllm.cache.spec import CacheSpec, PagedState
from kllm.errors import ConfigError
from kllm.layers.embedding import VocabEmbedding, VocabHead
from kllm.layers.linear import ColumnLinear, Linear, RowLinear, shard_size
from kllm.layers.mlp import GatedMLP
from kllm.layers.norm import RMSNorm
from kllm.layers.rotary import Llama3Scaling, Rotary
from kllm.models.base import CausalLM, CheckpointTensor, Groups, Stage, WorkShape
from kllm.models.hf_config import MOST_LAYERS, ConfigReader
from kllm.quant.entry import EntryFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The keys of a llama `config.json` that the network needs."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None = None
    tie_word_embeddings: bool = False
    stored_dtype: str = "BF16"  # of the released checkpoint
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads = {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary pairs, got {self.head_dim}")

    @property
    def rotary(self) -> Rotary:
        """The rotary embedding all layers share."""
        return Rotary(self.head_dim, self.rope_theta, llama3=self.rope_scaling)


def read_config(data: Mapping[str, Any]) -> LlamaConfig:
    """The config from the JSON of a `config.json`.

    Raises:
        ConfigError: for a missing key, biases, or an activation or rope type not offered.
    """
    reader = ConfigReader(data)
    reader.require("hidden_act", ("silu",))
    reader.require("attention_bias", (False,))
    reader.require("mlp_bias", (False,))
    hidden, heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
    return LlamaConfig(
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.positive("intermediate_size"),
        num_hidden_layers=reader.positive("num_hidden_layers", most=MOST_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=reader.positive("num_key_value_heads", heads),
        head_dim=reader.positive("head_dim", hidden // heads),
        max_position_embeddings=reader.positive("max_position_embeddings"),
        rms_norm_eps=reader.number("rms_norm_eps"),
        rope_theta=reader.rope_number("rope_theta", 10000.0),
        rope_scaling=_read_scaling(reader),
        tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
        stored_dtype=reader.stored_dtype(),
        bos_token_id=data.get("bos_token_id"),
        eos_token_ids=reader.token_ids("eos_token_id"),
    )


def _read_scaling(reader: ConfigReader) -> Llama3Scaling | None:
    if reader.rope_type(("default", "llama3")) == "default":
        return None
    return Llama3Scaling(
        factor=reader.rope_number("factor"),
        low_freq_factor=reader.rope_number("low_freq_factor"),
        high_freq_factor=reader.rope_number("high_freq_factor"),
        original_max_position=int(reader.rope_number("original_max_position_embeddings")),
    )


def tiny_config() -> LlamaConfig:
    """Grouped queries, a head dimension of its own, frequency scaling and an untied head."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
        ),
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def scaled_config(config: LlamaConfig, layers: int) -> LlamaConfig:
    """The config cut to `layers` layers: all are alike."""
    return replace(config, num_hidden_layers=layers)


def manifest(config: LlamaConfig) -> Iterator[CheckpointTensor]:
    """All tensors of the released checkpoint, under their Hugging Face names."""
    c, d = config, config.hidden_size
    q_rows, kv_rows = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim

    def tensor(
        name: str, shape: tuple[int, ...], target: str, row: int = 0, split: str | None = None
    ) -> CheckpointTensor:
        return CheckpointTensor(
            name=name, shape=shape, dtype=c.stored_dtype, target=target, row=row, split=split
        )

    yield tensor("model.embed_tokens.weight", (c.vocab_size, d), "embed.weight", split="column")
    for i in range(c.num_hidden_layers):
        src, dst = f"model.layers.{i}.", f"layers.{i}."
        yield tensor(src + "input_layernorm.weight", (d,), dst + "attn_norm.weight")
        row = 0
        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            target = dst + "attn.qkv.weight"
            yield tensor(f"{src}self_attn.{name}_proj.weight", (rows, d), target, row, "column")
            row += rows
        target = dst + "attn.out.weight"
        yield tensor(src + "self_attn.o_proj.weight", (d, q_rows), target, split="row")
        yield tensor(src + "post_attention_layernorm.weight", (d,), dst + "ffn_norm.weight")
        for k, name in enumerate(("gate", "up")):
            shape = (c.intermediate_size, d)
            target, row = dst + "ffn.gate_up.weight", k * c.intermediate_size
            yield tensor(f"{src}mlp.{name}_proj.weight", shape, target, row, "column")
        shape = (d, c.intermediate_size)
        yield tensor(src + "mlp.down_proj.weight", shape, dst + "ffn.down.weight", split="row")
    yield tensor("model.norm.weight", (d,), "norm.weight")
    if not c.tie_word_embeddings:
        yield tensor("lm_head.weight", (c.vocab_size, d), "head.weight", split="column")


def cache_spec(config: LlamaConfig, mtp: bool = False) -> CacheSpec:
    """Keys and values of every layer."""
    head = EntryFormat(width=config.head_dim, fp8_channels=config.head_dim, group=config.head_dim)
    kv = PagedState(
        name="kv",
        layers=tuple(range(config.num_hidden_layers)),
        entry=head,
        heads=2 * config.num_key_value_heads,
        head_shards=True,
    )
    return CacheSpec(paged=(kv,), page_multiple=16)


def work_shape(config: LlamaConfig) -> WorkShape:
    """Counts for the cost model, unsplit."""
    c = config
    heads = c.num_attention_heads + c.num_key_value_heads  # q and o; k and v
    layer = 2 * heads * c.head_dim * c.hidden_size + 3 * c.hidden_size * c.intermediate_size
    per_context = 4.0 * c.num_hidden_layers * c.num_attention_heads * c.head_dim
    return WorkShape(
        token_params=c.num_hidden_layers * layer,
        head_params=c.vocab_size * c.hidden_size,
        expert_params=0,
        num_experts=0,
        experts_per_token=0,
        moe_layers=0,
        attention_flops=lambda context: per_context * context,
        attention_entries=lambda context: {"kv": float(c.num_hidden_layers * context)},
    )


def build(config: LlamaConfig, groups: Groups, mtp: bool = False) -> "LlamaForCausalLM":
    """The network with uninitialised weights; llama has no MTP head to add."""
    return LlamaForCausalLM(config, groups)


class LlamaAttention(nn.Module):
    """Grouped-query attention over the paged cache, through the model's backend."""

    def __init__(self, config: LlamaConfig, layer: int, groups: Groups) -> None:
        super().__init__()
        tp = groups.attn.size
        self.layer = layer
        self.heads = shard_size("num_attention_heads", config.num_attention_heads, tp)
        self.kv_heads = shard_size("num_key_value_heads", config.num_key_value_heads, tp)
        self.head_dim = config.head_dim
        rows = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        columns = config.num_attention_heads * config.head_dim
        self.qkv = ColumnLinear(config.hidden_size, rows, groups.attn)
        self.out = RowLinear(columns, config.hidden_size, groups.attn)

    def forward(
        self, x: Tensor, ctx: ForwardContext, rope: tuple[Tensor, Tensor], backend: AttentionBackend
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        rotated = self.heads + self.kv_heads
        qkv = self.qkv(x).view(x.shape[0], rotated + self.kv_heads, self.head_dim)
        qk = kernels.rope(qkv[:, :rotated], *rope, interleaved=False)
        o = backend.attend(
            ctx, self.layer, qk[:, : self.heads], qk[:, self.heads :], qkv[:, rotated:]
        )
        y: Tensor = self.out(o.reshape(x.shape[0], -1))
        return y


class LlamaLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: LlamaConfig, layer: int, groups: Groups) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = LlamaAttention(config, layer, groups)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn = GatedMLP(config.hidden_size, config.intermediate_size, groups.ffn)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        ctx: ForwardContext,
        rope: tuple[Tensor, Tensor],
        backend: AttentionBackend,
    ) -> tuple[Tensor, Tensor]:
        """(residual stream, what the layer still has to add to it), both [T, hidden].

        `delta` is what the layer before left to add, so that its sum and the next norm are one
        pass over memory.
        """
        if delta is None:
            h = self.attn_norm(x)
        else:
            h, x = self.attn_norm.add(delta, x)
        h, x = self.ffn_norm.add(self.attn(h, ctx, rope, backend), x)
        return x, self.ffn(h)


class LlamaForCausalLM(CausalLM):
    """The network on one rank.

    With tied embeddings a last stage that is not the first one has a copy of the embedding.
    """

    def __init__(self, config: LlamaConfig, groups: Groups) -> None:
        super().__init__()
        self.config = config
        self.stage = stage = Stage.of(config.num_hidden_layers, groups.pp)
        self.cache_spec = stage.cache(shard_heads(cache_spec(config), groups.attn.size))
        self.query_heads = config.num_attention_heads // groups.attn.size
        self.attention = SequenceAttention(ATTENTION["torch"](self.query_heads))
        self.rotary = config.rotary
        if stage.first or (stage.last and config.tie_word_embeddings):
            self.embed = VocabEmbedding(config.vocab_size, config.hidden_size, groups.vocab)
        self.layers = nn.ModuleDict({str(i): LlamaLayer(config, i, groups) for i in stage.layers})
        if not stage.last:
            return
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = VocabHead(config.hidden_size, config.vocab_size, groups.vocab)
        if config.tie_word_embeddings:
            self.head.weight = self.embed.weight

    def freeze(self) -> None:
        """Pack the matrices where that makes their products faster."""
        for module in self.modules():
            if isinstance(module, Linear | VocabHead):
                module.pack()

    def prepare(self, ctx: ForwardContext) -> None:
        """Plan the step's attention."""
        self.attention.prepare(ctx)

    def forward(self, ctx: ForwardContext, received: Sequence[Tensor] = ()) -> Tensor:
        """[T, hidden] after the stage's last layer, not normed."""
        rope = self.rotary.tables(ctx)
        x: Tensor = received[0] if received else self.embed(ctx.token_ids)
        delta: Tensor | None = None
        for layer in self.layers.values():
            x, delta = layer(x, delta, ctx, rope, self.attention)
        assert delta is not None  # a stage has at least one layer
        return x + delta

    def use_attention(self, name: str, kv_dtype: str) -> None:
        """Attend through this entry of `ATTENTION`, or the best one here for "auto"."""
        device = next(self.parameters()).device
        name = resolve_attention(name, device, self.config.head_dim, kv_dtype)
        self.attention = SequenceAttention(ATTENTION[name](self.query_heads))
        self.capturable = name != "torch"  # which reads lengths and block tables on the host

    def logits(self, state: Tensor) -> Tensor:
        """[S, hidden] -> [S, V] float32."""
        y: Tensor = self.head(self.norm(state))
        return y


def shard_heads(spec: CacheSpec, tp: int) -> CacheSpec:
    """The spec of one of `tp` ranks: states with `head_shards` keep their share of heads."""
    paged = tuple(
        replace(state, heads=shard_size("KV heads", state.heads, tp))
        if state.head_shards
        else state
        for state in spec.paged
    )
    return replace(spec, paged=paged)
