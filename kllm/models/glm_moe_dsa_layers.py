"""The layers of GLM-5, DeepSeek-V3 and V3.2: indexer, latent attention, decoder layer.

Heads carry their rotary channels last; the indexer's heads and keys carry them first.
"""

import torch
from torch import Tensor, nn

from kllm import kernels
from kllm.attention.context import ForwardContext
from kllm.attention.gathered import store_entries
from kllm.attention.indexing import IndexQuery
from kllm.attention.latent import LatentHeads
from kllm.attention.mla import (
    INDEX_KEY,
    Selection,
    attend,
    must_select,
    select,
    select_all,
)
from kllm.layers.experts import ExpertRanks, RoutedExperts
from kllm.layers.linear import ColumnLinear, Linear, RowLinear, shard_size
from kllm.layers.mlp import GatedMLP
from kllm.layers.moe import MoE, ScoreRouter
from kllm.layers.norm import LayerNorm, RMSNorm
from kllm.models.base import Groups
from kllm.models.glm_moe_dsa_config import DENSE, FULL, GlmMoeDsaConfig, IndexerConfig

# Not in the configs: the reference builds these norms with its defaults, whatever
# `rms_norm_eps` is.
LOW_RANK_NORM_EPS = 1e-6
INDEX_NORM_EPS = 1e-6
SELECTION = "selection"  # in a step's shared values: what the newest indexer selected


def rotate(channels: Tensor, tables: tuple[Tensor, Tensor], interleaved: bool) -> None:
    """Rotate [T, ..., rope], a view of the rotary channels, in place."""
    kernels.rope(channels, *tables, interleaved=interleaved, out=channels)


class Indexer(nn.Module):
    """The lightning indexer: scores all cached tokens to select those attended to.

    Not split by tensor parallelism: splitting its heads would cost an all-reduce of scores.
    """

    def __init__(self, config: GlmMoeDsaConfig, indexer: IndexerConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = indexer, layer
        self.rope = config.qk_rope_head_dim
        self.wq_b = Linear(config.q_lora_rank, indexer.heads * indexer.head_dim)
        self.wk = Linear(config.hidden_size, indexer.head_dim)
        self.k_norm = LayerNorm(indexer.head_dim, INDEX_NORM_EPS)
        self.weights = Linear(config.hidden_size, indexer.heads)

    def forward(
        self, x: Tensor, q_low: Tensor, tables: tuple[Tensor, Tensor], ctx: ForwardContext
    ) -> Selection:
        """Store the tokens' index keys and select what they attend to.

        Args:
            x: [T, hidden].
            q_low: [T, q_lora_rank], the normed low-rank query of the attention.
            tables: cosines and sines of the tokens' positions.
        """
        c = self.config
        key = self.k_norm(self.wk(x))
        rotate(key[:, : self.rope], tables, c.interleaved)
        store_entries(ctx, INDEX_KEY, self.layer, ctx.entry_slots(1), key.unsqueeze(1))
        if not must_select(ctx, c.topk):
            return select_all(ctx, c.topk)
        q = self.wq_b(q_low).view(-1, c.heads, c.head_dim)
        rotate(q[..., : self.rope], tables, c.interleaved)
        weights = kernels.linear_fp32(x, self.weights.weight) * (c.heads * c.head_dim) ** -0.5
        return select(ctx, self.layer, IndexQuery(INDEX_KEY, q, weights, c.topk))


class LatentAttention(nn.Module):
    """Multi-head latent attention; heads are split over `groups.attn`, latents are not."""

    def __init__(
        self, config: GlmMoeDsaConfig, indexer_type: str, layer: int, groups: Groups
    ) -> None:
        super().__init__()
        c = config
        self.layer, self.interleaved = layer, c.rope_interleaved
        self.heads = shard_size("num_attention_heads", c.num_attention_heads, groups.attn.size)
        self.plain, self.rope, self.value = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        self.q_rank, self.rank = c.q_lora_rank, c.kv_lora_rank
        self.scale, self.rotary = c.softmax_scale, c.rotary
        total = c.num_attention_heads
        self.qkv_a = Linear(c.hidden_size, self.q_rank + c.entry_width)
        self.q_norm = RMSNorm(self.q_rank, LOW_RANK_NORM_EPS)
        self.kv_norm = RMSNorm(self.rank, LOW_RANK_NORM_EPS)
        self.q_b = ColumnLinear(self.q_rank, total * c.qk_head_dim, groups.attn)
        self.kv_b = ColumnLinear(self.rank, total * (self.plain + self.value), groups.attn)
        self.out = RowLinear(total * self.value, c.hidden_size, groups.attn)
        self.dense = indexer_type == DENSE
        self.indexer = Indexer(c, c.indexer, layer) if indexer_type == FULL and c.indexer else None

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        tables = self.rotary.tables(ctx)
        q_low, latent, k_rope = self.qkv_a(x).split((self.q_rank, self.rank, self.rope), dim=1)
        q_low = self.q_norm(q_low)
        q = self.q_b(q_low).view(-1, self.heads, self.plain + self.rope)
        rotate(q[..., self.plain :], tables, self.interleaved)
        rotate(k_rope, tables, self.interleaved)
        entries = torch.cat((self.kv_norm(latent), k_rope), dim=1)
        if self.indexer is not None:
            ctx.shared[SELECTION] = self.indexer(x, q_low, tables, ctx)
        selection: Selection | None = None if self.dense else ctx.shared[SELECTION]
        o = attend(ctx, self.layer, q, entries, self._latent_heads(), selection)
        y: Tensor = self.out(o.flatten(1))
        return y

    def _latent_heads(self) -> LatentHeads:
        weight = self.kv_b.weight.view(self.heads, -1, self.rank)  # [H, N + V, R]
        keys, values = weight[:, : self.plain], weight[:, self.plain :]
        return LatentHeads(keys, values, self.rope, self.scale)


def build_ffn(config: GlmMoeDsaConfig, sparse: bool, layer: int, groups: Groups) -> MoE | GatedMLP:
    """The feed-forward block of a layer."""
    c, d = config, config.hidden_size
    if not sparse:
        return GatedMLP(d, c.intermediate_size, groups.ffn)
    ranks = ExpertRanks(groups.ffn, groups.ep, groups.experts.backend)
    placement = groups.experts.placement(layer, c.n_routed_experts, groups.ep.size)
    experts = RoutedExperts(d, c.moe_intermediate_size, placement, ranks, None)
    shared = GatedMLP(d, c.shared_intermediate_size, groups.ffn)
    return MoE(ScoreRouter(d, c.routing), experts, shared, ranks)


class GlmMoeDsaLayer(nn.Module):
    """One decoder layer: attention, then experts or a dense block."""

    def __init__(
        self, config: GlmMoeDsaConfig, indexer_type: str, sparse: bool, layer: int, groups: Groups
    ) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.sparse = sparse
        self.attn_norm = RMSNorm(d, eps)
        self.attn = LatentAttention(config, indexer_type, layer, groups)
        self.ffn_norm = RMSNorm(d, eps)
        self.ffn = build_ffn(config, sparse, layer, groups)

    def forward(
        self, x: Tensor, delta: Tensor | None, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """(residual stream, what the layer still has to add to it), both [T, hidden].

        `delta` is what the layer before left to add, so that its sum and the next norm are one
        pass over memory.
        """
        if delta is None:
            h = self.attn_norm(x)
        else:
            h, x = self.attn_norm.add(delta, x)
        h, x = self.ffn_norm.add(self.attn(h, ctx), x)
        return x, self.ffn(h, ctx.token_ids, ctx) if self.sparse else self.ffn(h)
