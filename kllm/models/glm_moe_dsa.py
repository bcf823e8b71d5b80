"""GLM-5 and GLM-5.2, DeepSeek-V3 and V3.2: latent attention, sparse by an indexer, experts.

Sources: the GLM-5.2 model card; DeepSeek-V3 and DeepSeek-V3.2 technical reports. V3 has no
indexer, V3.2 and GLM-5 have one in every layer, in GLM-5.2 most layers share the selection of
a layer before them. Parts live in glm_moe_dsa_config, glm_moe_dsa_checkpoint and
glm_moe_dsa_layers.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from kllm.attention.context import ForwardContext
from kllm.attention.mla import INDEX_KEY, LATENT, Selection, select_newest, selection_shapes
from kllm.cache.spec import CacheSpec, PagedState
from kllm.errors import ConfigError
from kllm.layers.embedding import VocabEmbedding, VocabHead
from kllm.layers.linear import Linear
from kllm.layers.norm import RMSNorm
from kllm.models.base import CausalLM, Groups, Stage, WorkShape
from kllm.models.glm_moe_dsa_checkpoint import manifest
from kllm.models.glm_moe_dsa_config import (
    FULL,
    SHARED,
    GlmMoeDsaConfig,
    IndexerConfig,
    read_config,
    scaled_config,
    tiny_config,
)
from kllm.models.glm_moe_dsa_layers import SELECTION, GlmMoeDsaLayer
from kllm.quant.entry import EntryFormat

__all__ = [
    "GlmMoeDsaConfig",
    "GlmMoeDsaForCausalLM",
    "build",
    "cache_spec",
    "manifest",
    "read_config",
    "scaled_config",
    "tiny_config",
    "work_shape",
]

GROUP = 128  # channels that share an FP8 scale, in latents and index keys
PAGE_TOKENS = 64  # the page size of published MLA and indexer kernels


def _group(channels: int) -> int:
    return GROUP if channels % GROUP == 0 else channels


def cache_spec(config: GlmMoeDsaConfig, mtp: bool = False) -> CacheSpec:
    """Latents of every layer, index keys of the layers with an indexer.

    Nothing is split by tensor parallelism: all heads read the same latent. The MTP head's
    states are those of a layer behind the last one.
    """
    c = config
    behind = (c.num_hidden_layers,) if mtp and c.mtp_layers else ()
    latent = EntryFormat(
        width=c.entry_width, fp8_channels=c.kv_lora_rank, group=_group(c.kv_lora_rank)
    )
    layers = (*range(c.num_hidden_layers), *behind)
    paged = [PagedState(name=LATENT, layers=layers, entry=latent)]
    if c.indexer:
        dim = c.indexer.head_dim
        key = EntryFormat(width=dim, fp8_channels=dim, group=_group(dim))
        layers = (*c.layers_of(FULL), *behind)
        paged.append(PagedState(name=INDEX_KEY, layers=layers, entry=key))
    return CacheSpec(paged=tuple(paged), page_multiple=PAGE_TOKENS)


def work_shape(config: GlmMoeDsaConfig) -> WorkShape:
    """Counts for the cost model, unsplit, with attention in the absorbed form of decodes."""
    c, layers = config, config.num_hidden_layers
    per_entry = 2.0 * c.num_attention_heads * (c.entry_width + c.kv_lora_rank)
    per_key = 2.0 * c.indexer.heads * c.indexer.head_dim if c.indexer else 0.0

    def entries(context: int) -> Mapping[str, float]:
        if c.indexer is None or context <= c.indexer.topk:  # all entries, nothing to select
            return {LATENT: float(layers * context)}
        keys = float(len(c.layers_of(FULL)) * context)
        return {LATENT: float(layers * c.indexer.topk), INDEX_KEY: keys}

    def flops(context: int) -> float:
        read = entries(context)
        return per_entry * read[LATENT] + per_key * read.get(INDEX_KEY, 0.0)

    tables = {"embed.weight", "head.weight"}
    return WorkShape(
        token_params=sum(
            t.parameters
            for t in manifest(c)
            if not t.mtp and t.expert is None and len(t.shape) == 2 and t.target not in tables
        ),
        head_params=c.vocab_size * c.hidden_size,
        expert_params=3 * c.hidden_size * c.moe_intermediate_size,
        num_experts=c.n_routed_experts,
        experts_per_token=c.num_experts_per_tok,
        moe_layers=sum(c.sparse_mlp),
        attention_flops=flops,
        attention_entries=entries,
    )


def build(config: GlmMoeDsaConfig, groups: Groups, mtp: bool = False) -> "GlmMoeDsaForCausalLM":
    """The network with uninitialised weights.

    Raises:
        ConfigError: when an MTP head is asked for and the release has none.
    """
    if mtp and not config.mtp_layers:
        raise ConfigError("this checkpoint has no MTP head; run it without MTP")
    return GlmMoeDsaForCausalLM(config, groups, mtp)


class MTPHead(nn.Module):
    """Drafts token t + 2 from the state at t and token t + 1 (DeepSeek-V3, section 2.2).

    Embedding and lm head are the backbone's. Its layer has an indexer and states of its own.
    """

    def __init__(self, config: GlmMoeDsaConfig, groups: Groups) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.e_norm, self.h_norm = RMSNorm(d, eps), RMSNorm(d, eps)
        self.eh_proj = Linear(2 * d, d)
        index = config.num_hidden_layers
        self.layer = GlmMoeDsaLayer(config, config.mtp_indexer_type, True, index, groups)
        self.norm = RMSNorm(d, eps)

    def forward(self, state: Tensor, next_embeddings: Tensor, ctx: ForwardContext) -> Tensor:
        """The state at t and the embedding of token t + 1, both [T, d] -> [T, d], normed."""
        x = torch.cat((self.e_norm(next_embeddings), self.h_norm(state)), dim=1)
        x, delta = self.layer(self.eh_proj(x), None, ctx)
        y, _ = self.norm.add(delta, x)
        return y


class GlmMoeDsaForCausalLM(CausalLM):
    """The network on one rank. With the MTP head the last stage has the embedding too.

    Where a stage begins with layers that share a selection, that is received with the state.
    """

    def __init__(self, config: GlmMoeDsaConfig, groups: Groups, mtp: bool = False) -> None:
        super().__init__()
        self.config = config
        self.stage = stage = Stage.of(config.num_hidden_layers, groups.pp)
        self.cache_spec = stage.cache(cache_spec(config, mtp))
        if stage.first or (stage.last and mtp):
            self.embed = VocabEmbedding(config.vocab_size, config.hidden_size, groups.vocab)
        self.layers = nn.ModuleDict()
        for i in stage.layers:
            indexer_type, sparse = config.indexer_types[i], config.sparse_mlp[i]
            self.layers[str(i)] = GlmMoeDsaLayer(config, indexer_type, sparse, i, groups)
        self.mtp: MTPHead | None = None
        if not stage.last:
            return
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = VocabHead(config.hidden_size, config.vocab_size, groups.vocab)
        if mtp:
            self.mtp = MTPHead(config, groups)

    def forward(self, ctx: ForwardContext, received: Sequence[Tensor] = ()) -> Tensor:
        """[T, hidden]: of the last stage after the final norm, as lm head and MTP head read it."""
        x: Tensor = received[0] if received else self.embed(ctx.token_ids)
        if indexer := self._shared_at(self.stage.start):
            ctx.shared[SELECTION] = Selection.received(ctx, indexer.topk, received[1:])
        delta: Tensor | None = None
        for layer in self.layers.values():
            x, delta = layer(x, delta, ctx)
        assert delta is not None  # a stage has at least one layer
        return self.norm.add(delta, x)[0] if self.stage.last else x + delta

    def _shared_at(self, layer: int) -> IndexerConfig | None:
        """The indexer whose selection a stage that begins with `layer` has to be sent, if any."""
        if not 0 < layer < self.stage.count or self.config.indexer_types[layer] != SHARED:
            return None
        indexer: IndexerConfig | None = self.config.indexer
        return indexer

    def boundary(self, ctx: ForwardContext, state: Tensor) -> list[Tensor]:
        """The state, and the selection if the next layer shares it."""
        sent = super().boundary(ctx, state)
        if self._shared_at(self.stage.stop):
            sent += ctx.shared[SELECTION].tensors()
        return sent

    def boundary_shapes(self, ctx: ForwardContext) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The state's, and the selection's if the stage's first layer shares it."""
        shapes = super().boundary_shapes(ctx)
        if indexer := self._shared_at(self.stage.start):
            shapes += selection_shapes(ctx, indexer.topk)
        return shapes

    def stand_in(self, ctx: ForwardContext) -> list[Tensor]:
        """A random state, and the newest entries in place of selected ones."""
        values = super().stand_in(ctx)
        if indexer := self._shared_at(self.stage.start):
            values += select_newest(ctx, indexer.topk).tensors()
        return values

    def logits(self, state: Tensor) -> Tensor:
        """[S, hidden] -> [S, V] float32."""
        y: Tensor = self.head(state)
        return y

    def draft(self, ctx: ForwardContext, state: Tensor, next_ids: Tensor) -> Tensor:
        """The MTP head's state [T, hidden] at the step's positions.

        Args:
            ctx: of the step that made `state`, or of a later draft step.
            state: [T, hidden] from `forward`, or from the draft before.
            next_ids: [T] int64, the token after each position.
        """
        assert self.mtp is not None, "built without the MTP head"
        y: Tensor = self.mtp(state, self.embed(next_ids), ctx)
        return y

    def draft_logits(self, state: Tensor) -> Tensor:
        """What `draft` returned, rows [S, hidden] -> logits [S, V] of the token after next."""
        return self.logits(state)
