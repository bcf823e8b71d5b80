"""Attention one block of keys at a time: the softmax state that ring attention carries.

A query's softmax over keys that come in blocks needs three numbers a head: the running maximum
m of the scores, the sum l of exp(score - m), and the sum o of exp(score - m) times the values
(Milakov and Gimelshein 2018; Liu et al. 2023, ring attention). The state is float32 whatever
the inputs are: with partial results in 16 bits the error grows with the number of blocks.

These are the plain torch twins, as in `kllm.kernels.reference`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kllm.kernels import reference

INFINITY = float("inf")
WIDE = 4096  # keys a product takes at once


@dataclass(frozen=True, slots=True, eq=False)
class SoftmaxState:
    """What is known of n queries' softmax after some blocks; its tensors are updated in place."""

    m: Tensor  # [n, H] float32, running maximum of the scaled scores; -inf: no key seen yet
    l: Tensor  # noqa: E741  [n, H] float32, sum of exp(score - m)
    o: Tensor  # [n, H, Dv] float32, sum of exp(score - m) v: not normalised; no kernel of a GPU
    # reads the rows whose l is 0

    @classmethod
    def empty(
        cls, queries: int, heads: int, value_dim: int, device: torch.device | str
    ) -> "SoftmaxState":
        """The state before the first block."""
        make = torch.zeros if torch.device(device).type == "cpu" else torch.empty
        return cls(
            torch.full((queries, heads), -INFINITY, device=device),
            torch.zeros(queries, heads, device=device),
            make(queries, heads, value_dim, dtype=torch.float32, device=device),
        )

    def rows(self, rows: slice) -> "SoftmaxState":
        """A view of some queries' state."""
        return SoftmaxState(self.m[rows], self.l[rows], self.o[rows])


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring queries that each see a prefix of a block's keys.

    Row i of the span, from 0, sees the first min(keys, (first + i) // step) keys; a negative
    number counts as none. `step` is the number of tokens that an entry stands for.
    """

    rows: slice  # of the queries, with start and stop and without a stride
    first: int
    keys: int
    step: int = 1

    @property
    def count(self) -> int:
        """Query rows of the span."""
        return max(0, int(self.rows.stop) - int(self.rows.start))

    def seen(self, row: int) -> int:
        """How many keys row `row` of the span sees."""
        return max(0, min(self.keys, (self.first + row) // self.step))

    @property
    def full(self) -> bool:
        """Whether every row sees all `keys` keys."""
        return self.seen(0) == self.keys


def joined(spans: Sequence[Span]) -> list[Span]:
    """The spans, with neighbours that see all of the same keys made one: fewer, larger calls.

    Stretches of a prompt that lie apart see the same prefix of most blocks.
    """
    found = list(spans[:1])
    for span in spans[1:]:
        before = found[-1]
        alike = before.full and span.full and before.keys == span.keys
        if alike and before.rows.stop == span.rows.start:
            rows = slice(before.rows.start, span.rows.stop)
            found[-1] = Span(rows, span.keys, span.keys)
        else:
            found.append(span)
    return found


def block_attention(
    state: SoftmaxState, q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], scale: float
) -> None:
    """Add one block of keys to the softmax of the queries, in place.

    Args:
        state: of the n queries.
        q: [n, H, D].
        k: [s, K, D]; each of the K heads serves H / K neighbouring query heads.
        v: [s, K, Dv], possibly a view of `k`.
        spans: which keys which queries see; a query outside of all spans stays as it is.
        scale: multiplies the scores.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    group = heads // kv_heads
    for span in spans:
        height = max(1, reference.WORKSPACE_BYTES // (8 * heads * max(1, min(span.keys, WIDE))))
        for start in range(0, span.count, height):
            count = min(height, span.count - start)
            top = span.seen(start + count - 1)
            if top == 0:
                continue
            where = slice(span.rows.start + start, span.rows.start + start + count)
            part = q[where].view(count, kv_heads, group, -1).transpose(0, 1)  # [K, c, G, D]
            part = part.reshape(kv_heads, count * group, -1).float() * scale
            for begin in range(0, top, WIDE):
                end = min(begin + WIDE, top)
                keys = k[begin:end].permute(1, 2, 0).float()  # [K, D, w]
                scores = (part @ keys).view(kv_heads, count, group, end - begin)
                if span.seen(start) < end:
                    row = torch.arange(start, start + count, device=q.device)
                    limit = ((span.first + row) // span.step).view(1, count, 1, 1)
                    key = torch.arange(begin, end, device=q.device)
                    scores.masked_fill_(key >= limit, -INFINITY)
                values = v[begin:end].transpose(0, 1).float()  # [K, w, Dv]
                _add(state.rows(where), scores, values)


def _add(state: SoftmaxState, scores: Tensor, values: Tensor) -> None:
    """Add keys with `scores` [K, c, G, w], overwritten, and `values` [K, w, Dv] to c queries."""
    kv_heads, count, group, _ = scores.shape
    heads = kv_heads * group
    peak = scores.amax(dim=-1).transpose(0, 1).reshape(count, heads)
    new = torch.maximum(state.m, peak)
    # A query that has seen no key yet keeps m = -inf; 0 stands in to avoid inf - inf.
    base = new.masked_fill(new == -INFINITY, 0.0)
    scores.sub_(base.view(count, kv_heads, group).transpose(0, 1).unsqueeze(3)).exp_()
    fade = (state.m - base).exp_()
    total = scores.sum(dim=-1).transpose(0, 1).reshape(count, heads)
    mixed = scores.view(kv_heads, count * group, -1) @ values
    mixed = mixed.view(kv_heads, count, group, -1).transpose(0, 1).reshape(count, heads, -1)
    state.m.copy_(new)
    state.l.mul_(fade).add_(total)
    state.o.mul_(fade.unsqueeze(2)).add_(mixed)


def sparse_block_attention(
    state: SoftmaxState,
    q: Tensor,
    kv: Tensor,
    idx: Tensor,
    scale: float,
    value_dim: int | None = None,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Add the listed keys of one block to the softmax of multi-query attention, in place.

    Args:
        state: of the n queries.
        q: [n, H, D].
        kv: [s, D], the block's entries.
        idx: [n, c] int32 or int64, rows of `kv` that each query attends to; -1: no row.
        scale: multiplies the scores.
        value_dim: values are the first so many channels of the keys; None: all.
        bounds: (begin, end), [n] int32 each: the part of its list that a query attends to; None:
            all of it. The work grows with its length, and a query without any costs nothing.
    """
    if bounds is not None:
        place = torch.arange(idx.shape[1], device=idx.device)
        begin, end = (x.unsqueeze(1) for x in bounds)
        idx = idx.masked_fill((place < begin) | (place >= end), -1)
    counts = (idx >= 0).sum(dim=1)
    width = int(counts.max()) if counts.numel() else 0
    if width == 0:
        return
    some = counts.nonzero().squeeze(1)
    idx = idx[some].sort(dim=1, descending=True).values[:, :width]  # -1 goes last
    heads, dim = q.shape[1:]
    height = max(1, reference.WORKSPACE_BYTES // (4 * width * (dim + 2 * heads)))
    for start in range(0, len(some), height):
        rows, lists = some[start : start + height], idx[start : start + height]
        keys = kv[lists.clamp_min(0)].float()  # [c, w, D]
        scores = (q[rows].float() * scale) @ keys.transpose(1, 2)  # [c, H, w]
        scores.masked_fill_((lists < 0).unsqueeze(1), -INFINITY)
        # Each of these rows has a key, so every maximum is finite.
        new = torch.maximum(state.m[rows], scores.amax(dim=-1))
        scores.sub_(new.unsqueeze(2)).exp_()
        fade = (state.m[rows] - new).exp_()
        state.m[rows] = new
        state.l[rows] = state.l[rows] * fade + scores.sum(dim=-1)
        mixed = scores @ keys[..., :value_dim]
        state.o[rows] = state.o[rows] * fade.unsqueeze(2) + mixed


def merge_softmax(state: SoftmaxState, other: SoftmaxState) -> None:
    """Add what `other` has seen of disjoint keys to `state`, in place; both of the same shape.

    What adding a library's finished result comes to (`softmax_state_triton.add_result`).
    """
    new = torch.maximum(state.m, other.m)
    base = new.masked_fill(new == -INFINITY, 0.0)
    mine, theirs = (state.m - base).exp_(), (other.m - base).exp_()
    state.m.copy_(new)
    state.l.mul_(mine).addcmul_(other.l, theirs)
    state.o.mul_(mine.unsqueeze(2)).addcmul_(other.o, theirs.unsqueeze(2))


def finish_softmax(state: SoftmaxState, dtype: torch.dtype, sink: Tensor | None = None) -> Tensor:
    """The attention result of a state that has seen all keys.

    Args:
        sink: [H] logits that only enter the softmax's denominator; None: no sink.

    Returns:
        [n, H, Dv] in `dtype`; zeros for a query without keys.
    """
    if sink is None:
        return (state.o / state.l.masked_fill(state.l == 0, 1.0).unsqueeze(2)).to(dtype)
    sink = sink.float()
    base = torch.maximum(state.m, sink)
    weight = (state.m - base).exp_()
    total = torch.addcmul((sink - base).exp_(), state.l, weight)
    return (state.o * (weight / total).unsqueeze(2)).to(dtype)


def top_entries(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest scores of each row of [n, s]: these and their indices, [n, min(k, s)] int64.

    On the CPU the lower of two indices with the same score wins, so that layouts select alike;
    a caller who merges candidates of several blocks lists them in the order of their positions.
    On a GPU it is whichever comes first: the order of summation differs there anyway. There they
    are in no order either.
    """
    k = min(k, scores.shape[1])
    if scores.is_cuda:
        best, indices = scores.topk(k, dim=1, sorted=False)
    else:
        best, indices = scores.sort(dim=1, descending=True, stable=True)
    return best[:, :k], indices[:, :k]
