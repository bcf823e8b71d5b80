"""Networks that are nothing but one attention, with naive float64 answers.

A token's id is its row in the tables of queries, keys and values, so that the logits of a step
are its tokens' attention results.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kllm.attention import mla
from kllm.attention.base import ATTENTION
from kllm.attention.context import ForwardContext
from kllm.attention.gathered import store_entries
from kllm.attention.indexing import IndexQuery
from kllm.attention.latent import LatentHeads
from kllm.attention.sequence_parallel import SequenceAttention
from kllm.cache.pool import KVPool
from kllm.cache.spec import CacheSpec, PagedState
from kllm.models.base import CausalLM
from kllm.quant.entry import EntryFormat

VOCAB = 1100  # tokens with rows of their own
PAGE = 4


def _table(seed: int, *shape: int) -> nn.Parameter:
    values = torch.randn(VOCAB, *shape, generator=torch.Generator().manual_seed(seed))
    return nn.Parameter(values, requires_grad=False)


def _entry(width: int) -> EntryFormat:
    return EntryFormat(width=width, fp8_channels=width, group=width)


def _softmax(scores: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)


class GroupedQueries(CausalLM):
    """Four query heads on two KV heads."""

    def __init__(self) -> None:
        super().__init__()
        state = PagedState(name="kv", layers=(0,), entry=_entry(8), heads=4)
        self.cache_spec = CacheSpec(paged=(state,), page_multiple=PAGE)
        self.q, self.k, self.v = _table(0, 4, 8), _table(1, 2, 8), _table(2, 2, 8)
        self.attention = SequenceAttention(ATTENTION["torch"](4))

    def prepare(self, ctx: ForwardContext) -> None:
        self.attention.prepare(ctx)

    def forward(self, ctx: ForwardContext, received: Sequence[Tensor] = ()) -> Tensor:
        ids = ctx.token_ids
        return self.attention.attend(ctx, 0, self.q[ids], self.k[ids], self.v[ids]).flatten(1)

    def logits(self, state: Tensor) -> Tensor:
        return state

    def naive(self, ids: Tensor, pool: KVPool) -> Tensor:
        """[n, channels] float64 of a request with these tokens, rounded as in `pool`."""
        stored = pool.pack("kv", torch.cat((self.k[ids], self.v[ids]), dim=1))
        k, v = pool.unpack("kv", stored).double().repeat_interleave(2, dim=1).chunk(2, dim=1)
        q = self.q[ids].double()
        scores = torch.einsum("qhd,khd->hqk", q, k) * 8**-0.5
        seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        return torch.einsum("hqk,khd->qhd", _softmax(scores, seen), v).flatten(1)


class Latents(CausalLM):
    """Three heads on latents of 10 channels and 4 rotary ones; sparse with `topk`.

    Index queries, keys and weights are small whole numbers: scores are exact and often tie.
    """

    def __init__(self, topk: int | None) -> None:
        super().__init__()
        paged = [PagedState(name=mla.LATENT, layers=(0,), entry=_entry(14))]
        if topk:
            paged.append(PagedState(name=mla.INDEX_KEY, layers=(0,), entry=_entry(3)))
        self.cache_spec = CacheSpec(paged=tuple(paged), page_multiple=PAGE)
        self.topk = topk
        self.q, self.entries = _table(0, 3, 10), _table(1, 14)
        heads = torch.randn(2, 3, 6, 10, generator=torch.Generator().manual_seed(2)) * 0.5
        self.heads = LatentHeads(heads[0], heads[1, :, :5], rope=4, scale=10**-0.5)
        self.index_q, self.index_key = _table(3, 2, 3), _table(4, 3)
        self.index_weights = _table(5, 2)
        for table in (self.index_q, self.index_key, self.index_weights):
            table.round_()

    def forward(self, ctx: ForwardContext, received: Sequence[Tensor] = ()) -> Tensor:
        ids, selection = ctx.token_ids, None
        if self.topk:
            keys = self.index_key[ids].unsqueeze(1)
            store_entries(ctx, mla.INDEX_KEY, 0, ctx.entry_slots(1), keys)
            selection = mla.select_all(ctx, self.topk)
            if mla.must_select(ctx, self.topk):
                q, weights = self.index_q[ids], self.index_weights[ids]
                selection = mla.select(ctx, 0, IndexQuery(mla.INDEX_KEY, q, weights, self.topk))
        out = mla.attend(ctx, 0, self.q[ids], self.entries[ids], self.heads, selection)
        return out.flatten(1)

    def logits(self, state: Tensor) -> Tensor:
        return state

    def naive(self, ids: Tensor, pool: KVPool) -> Tensor:
        """[n, channels] float64 of a request with these tokens, rounded as in `pool`."""
        stored = pool.pack(mla.LATENT, self.entries[ids])
        q, entries = self.q[ids].double(), pool.unpack(mla.LATENT, stored).double()
        latent, rotary = entries.split((10, 4), dim=1)
        keys = torch.einsum("kr,hnr->khn", latent, self.heads.keys.double())
        keys = torch.cat((keys, rotary.unsqueeze(1).expand(-1, 3, -1)), dim=2)
        values = torch.einsum("kr,hvr->khv", latent, self.heads.values.double())
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self.heads.scale
        return torch.einsum("hqk,khv->qhv", _softmax(scores, self._seen(ids)), values).flatten(1)

    def _seen(self, ids: Tensor) -> Tensor:
        """[n, n] bool; of entries with the same index score the earlier ones are selected."""
        seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        if not self.topk:
            return seen
        products = torch.einsum("qhd,kd->qhk", self.index_q[ids], self.index_key[ids])
        scores = torch.einsum("qh,qhk->qk", self.index_weights[ids], products.relu())
        for row in range(self.topk, len(ids)):
            order = scores[row, : row + 1].neg().argsort(stable=True)
            seen[row, order[self.topk :]] = False
        return seen
