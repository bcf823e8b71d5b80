"""The layers of DeepSeek-V4: compressors, indexer, attention, and the decoder layer.

Heads carry their rotary channels last, in interleaved pairs. The KV vector is key and value in
one, so attention's output is rotated back by the query's position to make it relative.
"""

import torch
from torch import Tensor, nn

from kllm import kernels
from kllm.attention.compressed import attend
from kllm.attention.compressor import Compression, finished_groups, pool_step
from kllm.attention.context import ForwardContext, once_a_step
from kllm.attention.gathered import store_entries
from kllm.attention.indexing import IndexQuery
from kllm.layers.experts import ExpertRanks, RoutedExperts
from kllm.layers.hyper_connection import HyperConnection
from kllm.layers.linear import ColumnLinear, Linear, RowLinear, shard_size
from kllm.layers.mlp import GatedMLP
from kllm.layers.moe import HashRouter, MoE, ScoreRouter
from kllm.layers.norm import RMSNorm
from kllm.layers.rotary import Rotary
from kllm.models.base import Groups
from kllm.models.deepseek_v4_config import DeepseekV4Config


def rotate_last(x: Tensor, tables: tuple[Tensor, Tensor], inverse: bool = False) -> Tensor:
    """Rotate the last channels of [T, ..., D] in place; the tables say how many."""
    cos, sin = tables
    rotated = x[..., -2 * cos.shape[1] :]
    kernels.rope(rotated, cos, sin, inverse=inverse, out=rotated)
    return x


class Compressor(nn.Module):
    """Keeps one kind of compressed state up to date."""

    def __init__(
        self, config: DeepseekV4Config, kind: Compression, dim: int, rotary: Rotary
    ) -> None:
        super().__init__()
        width = kind.span // kind.ratio * dim
        self.kind = kind
        self.rotary = rotary
        self.wkv_gate = Linear(config.hidden_size, 2 * width)
        ape = torch.empty(kind.ratio, width, dtype=torch.float32)
        self.ape = nn.Parameter(ape, requires_grad=False)
        self.norm = RMSNorm(dim, config.rms_norm_eps)

    def forward(self, x: Tensor, ctx: ForwardContext, layer: int) -> None:
        """Take in the tokens' inputs [T, hidden] and store the entries that they complete."""
        ratio, width = self.ape.shape
        rows = kernels.linear_fp32(x, self.wkv_gate.weight)  # [T, 2 width]: values, gates
        rows[:, width:] += self.ape[ctx.positions % ratio]
        pooled = pool_step(ctx, layer, self.kind, rows)
        entries = pooled.unsqueeze(1)  # [G, 1, dim]
        if len(pooled):  # some token ends a group
            tables = _group_tables(ctx, self.rotary, ratio)
            entries = rotate_last(self.norm(pooled), tables).unsqueeze(1)
        slots = finished_groups(ctx, ratio).slots
        store_entries(ctx, self.kind.state, layer, slots, entries, ratio)


@once_a_step
def _group_tables(ctx: ForwardContext, rotary: Rotary, ratio: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the finished groups of `ratio`."""
    return rotary.cos_sin(finished_groups(ctx, ratio).positions)


class Indexer(nn.Module):
    """The lightning indexer: its keys are compressed like the entries it selects.

    Not split by tensor parallelism: splitting its heads would cost an all-reduce of scores.
    """

    def __init__(self, config: DeepseekV4Config, rotary: Rotary) -> None:
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.topk = config.index_topk
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.dim)
        self.weights = Linear(config.hidden_size, self.heads)
        self.compressor = Compressor(config, config.index_compression, self.dim, rotary)

    def forward(
        self,
        x: Tensor,
        q_low: Tensor,
        tables: tuple[Tensor, Tensor],
        ctx: ForwardContext,
        layer: int,
    ) -> IndexQuery:
        """Store the keys that the tokens complete, and make their queries.

        Args:
            x: [T, hidden].
            q_low: [T, q_lora_rank], the normed low-rank query of the attention.
            tables: cosines and sines of the tokens' positions.
        """
        self.compressor(x, ctx, layer)
        q = rotate_last(self.wq_b(q_low).view(-1, self.heads, self.dim), tables)
        weights = kernels.linear_fp32(x, self.weights.weight) * (self.heads * self.dim) ** -0.5
        return IndexQuery(self.compressor.kind.state, q, weights, self.topk)


class DeepseekV4Attention(nn.Module):
    """Low-rank queries, one shared KV head, attention sinks and a grouped low-rank output."""

    def __init__(self, config: DeepseekV4Config, kind: str, layer: int, groups: Groups) -> None:
        super().__init__()
        c, tp = config, groups.attn.size
        self.comm = groups.attn  # splits heads and groups of heads
        self.layer, self.window = layer, c.sliding_window
        self.rank, self.dim = c.q_lora_rank, c.head_dim
        self.heads = shard_size("num_attention_heads", c.num_attention_heads, tp)
        self.out_groups = shard_size("o_groups", c.o_groups, tp)
        self.rotary = c.rotary(kind)
        width, low = c.num_attention_heads * c.head_dim, c.o_groups * c.o_lora_rank
        self.wqkv_a = Linear(c.hidden_size, self.rank + self.dim)
        self.q_norm = RMSNorm(self.rank, c.rms_norm_eps)
        self.kv_norm = RMSNorm(self.dim, c.rms_norm_eps)
        self.wq_b = ColumnLinear(self.rank, width, groups.attn)
        self.unit: Tensor  # the norm of each head has no weight
        self.register_buffer("unit", torch.ones(self.dim), persistent=False)
        self.wo_a = nn.Parameter(torch.empty(low // tp, width // c.o_groups), requires_grad=False)
        self.wo_b = RowLinear(low, c.hidden_size, groups.attn)
        sink = torch.empty(self.heads, dtype=torch.float32)
        self.sink = nn.Parameter(sink, requires_grad=False)
        compression = c.compression(kind)
        self.compressor = (
            Compressor(c, compression, c.head_dim, self.rotary) if compression else None
        )
        self.indexer = Indexer(c, self.rotary) if kind == "csa" else None

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        tables = self.rotary.tables(ctx)
        low, kv = self.wqkv_a(x).split((self.rank, self.dim), dim=1)
        low = self.q_norm(low)
        q = self.wq_b(low).view(-1, self.heads, self.dim)
        q = kernels.rmsnorm(q, self.unit, self.q_norm.eps)
        q, kv = rotate_last(q, tables), rotate_last(self.kv_norm(kv), tables)
        kind = index = None
        if self.compressor is not None:
            kind = self.compressor.kind
            self.compressor(x, ctx, self.layer)
        if self.indexer is not None:
            index = self.indexer(x, low, tables, ctx, self.layer)
        o = attend(ctx, self.layer, q, kv, self.sink, self.window, kind, index)
        y: Tensor = self.wo_b(self._grouped_out(rotate_last(o, tables, inverse=True)))
        return y

    def _grouped_out(self, o: Tensor) -> Tensor:
        """[T, H, D] -> [T, groups * rank]: each group of heads has a projection of its own."""
        count = self.out_groups
        o = o.reshape(o.shape[0], count, -1).transpose(0, 1)  # [G, T, H / G * D]
        weight = self.wo_a.view(count, -1, o.shape[2]).transpose(1, 2)
        return (o @ weight).transpose(0, 1).flatten(1)


def build_moe(config: DeepseekV4Config, hashed: bool, layer: int, groups: Groups) -> MoE:
    """The feed-forward block of a layer."""
    c, d, routing = config, config.hidden_size, config.routing
    router = HashRouter(d, routing, c.vocab_size) if hashed else ScoreRouter(d, routing)
    ranks = ExpertRanks(groups.ffn, groups.ep, groups.experts.backend)
    placement = groups.experts.placement(layer, c.n_routed_experts, groups.ep.size)
    experts = RoutedExperts(d, c.moe_intermediate_size, placement, ranks, c.swiglu_limit)
    limit = c.swiglu_limit if c.clamp_shared_expert else None
    shared = GatedMLP(d, c.shared_intermediate_size, groups.ffn, limit)
    return MoE(router, experts, shared, ranks)


class DeepseekV4Layer(nn.Module):
    """Attention and experts, each between the two halves of a hyper-connection."""

    def __init__(
        self, config: DeepseekV4Config, kind: str, hashed: bool, layer: int, groups: Groups
    ) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.hc_attn = HyperConnection(config.streams)
        self.attn_norm = RMSNorm(d, eps)
        self.attn = DeepseekV4Attention(config, kind, layer, groups)
        self.hc_ffn = HyperConnection(config.streams)
        self.ffn_norm = RMSNorm(d, eps)
        self.ffn = build_moe(config, hashed, layer, groups)

    def forward(self, streams: Tensor, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, N, hidden] -> [T, N, hidden]."""
        x, *weights = self.hc_attn.collapse(streams)
        x = self.attn(self.attn_norm(x), ctx)
        streams = self.hc_attn.expand(x, streams, *weights)
        x, *weights = self.hc_ffn.collapse(streams)
        x = self.ffn(self.ffn_norm(x), token_ids, ctx)
        return self.hc_ffn.expand(x, streams, *weights)
