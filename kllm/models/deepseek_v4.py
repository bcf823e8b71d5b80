"""DeepSeek-V4 (V4-Flash, V4-Pro): hyper-connections, compressed attention, hash-routed experts.

Sources: the DeepSeek-V4 technical report and model cards; mHC (Xie et al. 2026). Parts live in
deepseek_v4_config, deepseek_v4_checkpoint and deepseek_v4_layers.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from kllm.attention.compressed import WINDOW
from kllm.attention.compressor import Compression
from kllm.attention.context import ForwardContext
from kllm.cache.spec import CacheSpec, PagedState, RingState
from kllm.errors import ConfigError
from kllm.layers.embedding import VocabEmbedding, VocabHead
from kllm.layers.hyper_connection import HyperHead
from kllm.layers.linear import Linear
from kllm.layers.norm import RMSNorm
from kllm.models.base import CausalLM, Groups, Stage, WorkShape
from kllm.models.deepseek_v4_checkpoint import manifest
from kllm.models.deepseek_v4_config import (
    DeepseekV4Config,
    read_config,
    scaled_config,
    tiny_config,
)
from kllm.models.deepseek_v4_layers import DeepseekV4Layer
from kllm.quant.entry import EntryFormat

__all__ = [
    "DeepseekV4Config",
    "DeepseekV4ForCausalLM",
    "build",
    "cache_spec",
    "init_special",
    "manifest",
    "read_config",
    "scaled_config",
    "tiny_config",
    "work_shape",
]

KV_GROUP = 64  # channels that share an FP8 scale, in window and compressed entries
INDEX_GROUP = 128  # the same of index keys
PACKED_ALIGNMENT = 8  # bytes; a packed entry is padded to a multiple


def _kv_format(config: DeepseekV4Config) -> EntryFormat:
    """584 bytes at the real sizes: rotary channels stay bfloat16, scales are powers of two."""
    plain = config.head_dim - config.qk_rope_head_dim
    group = KV_GROUP if plain % KV_GROUP == 0 else plain
    used = plain + plain // group + 2 * config.qk_rope_head_dim
    return EntryFormat(
        width=config.head_dim,
        fp8_channels=plain,
        group=group,
        scale="ue8m0",
        pad=-used % PACKED_ALIGNMENT,
    )


def _index_format(config: DeepseekV4Config) -> EntryFormat:
    dim = config.index_head_dim
    return EntryFormat(
        width=dim, fp8_channels=dim, group=INDEX_GROUP if dim % INDEX_GROUP == 0 else dim
    )


def _compressed(config: DeepseekV4Config) -> list[tuple[Compression, tuple[int, ...], EntryFormat]]:
    """Each kind of compressed state that the model has: its layers and the entries' format."""
    found = []
    for kind in ("csa", "hca"):
        layers, compression = config.layers_of(kind), config.compression(kind)
        if layers and compression:
            found.append((compression, layers, _kv_format(config)))
    if config.layers_of("csa"):
        found.append((config.index_compression, config.layers_of("csa"), _index_format(config)))
    return found


def cache_spec(config: DeepseekV4Config, mtp: bool = False) -> CacheSpec:
    """Compressed entries in pages; window keys and compressor rows in rings.

    Nothing is split by tensor parallelism: there is one KV head. The MTP head's window is that
    of a layer behind the last one.
    """
    layers = config.num_hidden_layers + (config.mtp_layers if mtp else 0)
    window = RingState(
        name=WINDOW,
        layers=tuple(range(layers)),
        window=config.sliding_window,
        width=config.head_dim,
        entry=_kv_format(config),
    )
    paged, rings = [], [window]
    for kind, where, entry in _compressed(config):
        paged.append(
            PagedState(name=kind.state, layers=where, entry=entry, tokens_per_entry=kind.ratio)
        )
        width = 2 * entry.width * kind.span // kind.ratio  # values and gates
        rings.append(RingState(name=kind.tail, layers=where, window=kind.span, width=width))
    return CacheSpec(paged=tuple(paged), rings=tuple(rings))


def work_shape(config: DeepseekV4Config) -> WorkShape:
    """Counts for the cost model, unsplit."""
    c = config
    csa, hca = len(c.layers_of("csa")), len(c.layers_of("hca"))
    heads = 4.0 * c.num_attention_heads * c.head_dim  # a key's score and its value
    index = 2.0 * c.index_n_heads * c.index_head_dim

    def entries(context: int) -> Mapping[str, float]:
        found = {
            WINDOW: float(c.num_hidden_layers * min(c.sliding_window, context)),
            "csa": float(csa * min(context // c.csa_ratio, c.index_topk)),
            "csa_index": float(csa * (context // c.csa_ratio)),
            "hca": float(hca * (context // c.hca_ratio)),
        }
        for kind, layers, _ in _compressed(c):  # an entry is made once in `ratio` tokens
            found[kind.tail] = len(layers) * kind.span / kind.ratio
        return {name: count for name, count in found.items() if count}

    def flops(context: int) -> float:
        read = entries(context)
        keys = sum(read.get(name, 0.0) for name in (WINDOW, "csa", "hca"))
        return heads * keys + index * read.get("csa_index", 0.0)

    dense = (t for t in manifest(c) if not t.mtp and t.expert is None and t.dtype != "I64")
    tables = {"embed.weight", "head.weight"}
    return WorkShape(
        token_params=sum(
            t.parameters
            for t in dense
            if len(t.shape) == 2 and t.name not in tables and not t.name.endswith("ape")
        ),
        head_params=c.vocab_size * c.hidden_size,
        expert_params=3 * c.hidden_size * c.moe_intermediate_size,
        num_experts=c.n_routed_experts,
        experts_per_token=c.num_experts_per_tok,
        moe_layers=c.num_hidden_layers,
        attention_flops=flops,
        attention_entries=entries,
    )


def build(config: DeepseekV4Config, groups: Groups, mtp: bool = False) -> "DeepseekV4ForCausalLM":
    """The network with uninitialised weights.

    Raises:
        ConfigError: when an MTP head is asked for and the release has none.
    """
    if mtp and not config.mtp_layers:
        other = "a DSpark drafter instead" if config.dspark else "no draft head"
        raise ConfigError(f"this checkpoint has {other} of an MTP head; run it without MTP")
    return DeepseekV4ForCausalLM(config, groups, mtp)


def init_special(
    config: DeepseekV4Config, name: str, tensor: Tensor, generator: torch.Generator
) -> bool:
    """Fill what random weights must not treat as a matrix or a norm; whether it did."""
    leaf = name.rpartition(".")[2]
    if leaf == "tid2eid":  # distinct experts for each token, evenly used
        rows, k = tensor.shape
        experts, device = config.n_routed_experts, tensor.device
        first = torch.randint(experts, (rows, 1), generator=generator, device=device)
        step = torch.randint(1, experts // k + 1, (rows, 1), generator=generator, device=device)
        tensor.copy_((first + step * torch.arange(k, device=device)) % experts)
    elif leaf == "scale":  # of a hyper-connection
        tensor.fill_(1.0)
    else:
        return False
    return True


class MTPHead(nn.Module):
    """Drafts token t + 2 from the streams at t and token t + 1 (DeepSeek-V3, section 2.2).

    Embedding and lm head are the backbone's. Its layer keeps a window of its own.
    """

    def __init__(self, config: DeepseekV4Config, groups: Groups) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.e_norm, self.h_norm = RMSNorm(d, eps), RMSNorm(d, eps)
        self.e_proj, self.h_proj = Linear(d, d), Linear(d, d)
        index = config.num_hidden_layers
        self.layer = DeepseekV4Layer(config, "window", False, index, groups)
        self.hc_head = HyperHead(config.streams)
        self.norm = RMSNorm(d, eps)

    def forward(
        self, streams: Tensor, next_embeddings: Tensor, next_ids: Tensor, ctx: ForwardContext
    ) -> Tensor:
        """[T, N, d] streams at t, [T, d] and [T] of token t + 1 -> [T, N, d]."""
        x = self.h_proj(self.h_norm(streams))
        x = x + self.e_proj(self.e_norm(next_embeddings)).unsqueeze(1)
        y: Tensor = self.layer(x, next_ids, ctx)
        return y


class DeepseekV4ForCausalLM(CausalLM):
    """The network on one rank. With the MTP head the last stage has the embedding too."""

    def __init__(self, config: DeepseekV4Config, groups: Groups, mtp: bool = False) -> None:
        super().__init__()
        self.config = config
        self.stage = stage = Stage.of(config.num_hidden_layers, groups.pp)
        self.cache_spec = stage.cache(cache_spec(config, mtp))
        if stage.first or (stage.last and mtp):
            self.embed = VocabEmbedding(config.vocab_size, config.hidden_size, groups.vocab)
        self.layers = nn.ModuleDict()
        for i in stage.layers:
            kind, hashed = config.layer_kinds[i], i < config.num_hash_layers
            self.layers[str(i)] = DeepseekV4Layer(config, kind, hashed, i, groups)
        self.mtp: MTPHead | None = None
        if not stage.last:
            return
        self.hc_head = HyperHead(config.streams)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = VocabHead(config.hidden_size, config.vocab_size, groups.vocab)
        if mtp:
            self.mtp = MTPHead(config, groups)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """All streams of a token."""
        return self.config.hc_mult, self.config.hidden_size

    def forward(self, ctx: ForwardContext, received: Sequence[Tensor] = ()) -> Tensor:
        """The streams [T, N, hidden] after the stage's last layer."""
        streams: Tensor
        if received:
            streams = received[0]
        else:
            x = self.embed(ctx.token_ids)
            streams = x.unsqueeze(1).expand(-1, self.config.hc_mult, -1)
        for layer in self.layers.values():
            streams = layer(streams, ctx.token_ids, ctx)
        return streams

    def logits(self, state: Tensor) -> Tensor:
        """Streams [S, N, hidden] -> [S, V] float32."""
        y: Tensor = self.head(self.norm(self.hc_head(state)))
        return y

    def draft(self, ctx: ForwardContext, state: Tensor, next_ids: Tensor) -> Tensor:
        """The MTP head's streams at the step's positions.

        Args:
            ctx: of the step that made `state`, or of a later draft step.
            state: [T, N, hidden] from `forward`, or from the draft before.
            next_ids: [T] int64, the token after each position.
        """
        assert self.mtp is not None, "built without the MTP head"
        streams: Tensor = self.mtp(state, self.embed(next_ids), next_ids, ctx)
        return streams

    def draft_logits(self, state: Tensor) -> Tensor:
        """What `draft` returned, rows [S, N, hidden] -> logits [S, V] of the token after next."""
        assert self.mtp is not None, "built without the MTP head"
        y: Tensor = self.head(self.mtp.norm(self.mtp.hc_head(state)))
        return y
