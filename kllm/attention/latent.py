"""Attention to latents (MLA): what makes keys and values of them, and a softmax that goes on.

The two forms are described in `kllm.attention.mla`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kllm import kernels
from kllm.attention.chunks import Chunk
from kllm.kernels import SoftmaxState, Span

EXPANDED_BYTES = 1 << 29  # bounds the keys and values that a block of latents is expanded to


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """What makes the keys and values of a rank's heads from latents."""

    keys: Tensor  # [H, N, R], of the channels without rotary embedding
    values: Tensor  # [H, V, R]
    rope: int  # rotary channels
    scale: float  # of the scores

    def absorb(self, q: Tensor) -> Tensor:
        """Queries [T, H, N + rope] -> [T, H, R + rope], to be compared with entries."""
        plain = self.keys.shape[1]
        absorbed = (q[..., :plain].transpose(0, 1) @ self.keys).transpose(0, 1)
        return torch.cat((absorbed, q[..., plain:]), dim=2)

    def project(self, o: Tensor) -> Tensor:
        """Weighted sums of latents [T, H, R] -> outputs [T, H, V]."""
        return (o.transpose(0, 1) @ self.values.transpose(1, 2)).transpose(0, 1)

    def attend(self, q: Tensor, entries: Tensor, idx: Tensor) -> Tensor:
        """Absorbed attention of q [T, H, N + rope] to the rows idx [T, n] of `entries`."""
        latent = self.keys.shape[2]
        segments = [(entries, idx)]
        return self.project(
            kernels.sparse_attention(self.absorb(q), segments, self.scale, value_dim=latent)
        )

    def expand(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [S, H, N + rope] and values [S, H, V] of entries [S, R + rope]."""
        heads, plain, rank = self.keys.shape
        latent, rotary = entries[:, :rank], entries[:, rank:]
        key = entries.new_empty(len(entries), heads, plain + self.rope)
        key[..., :plain] = (latent @ self.keys.flatten(0, 1).t()).view(-1, heads, plain)
        key[..., plain:] = rotary.unsqueeze(1)
        return key, (latent @ self.values.flatten(0, 1).t()).view(len(entries), heads, -1)

    def add_expanded(
        self, state: SoftmaxState, q: Tensor, entries: Tensor, spans: Sequence[Span]
    ) -> None:
        """Add entries to the softmax of queries, expanded so many at a time as memory allows.

        Args:
            state: of the n queries, with values of V channels.
            q: [n, H, N + rope].
            entries: [S, R + rope].
            spans: which of the entries which queries see.
        """
        width = self.keys.shape[1] + self.rope + self.values.shape[1]
        row_bytes = self.keys.shape[0] * width * entries.element_size()
        size = max(1, EXPANDED_BYTES // row_bytes)
        for start in range(0, len(entries), size):
            stop = min(start + size, len(entries))
            seen = [
                Span(s.rows, s.first - start * s.step, min(s.keys, stop) - start, s.step)
                for s in spans
                if s.keys > start
            ]
            if seen:
                key, value = self.expand(entries[start:stop])
                kernels.block_attention(state, q, key, value, seen, self.scale)


class LatentSoftmax:
    """The softmax of some queries over latents that come in blocks, in one of the two forms.

    Args:
        q: [n, H, N + rope].
        expanded: whether keys and values are made of every block.
    """

    def __init__(self, heads: LatentHeads, q: Tensor, expanded: bool) -> None:
        self.heads = heads
        self.expanded = expanded
        self.q = q if expanded else heads.absorb(q)
        width = heads.values.shape[1] if expanded else heads.keys.shape[2]
        self.state = SoftmaxState.empty(q.shape[0], q.shape[1], width, q.device)

    def add(self, entries: Tensor, spans: Sequence[Span]) -> None:
        """Take in entries [S, R + rope], of which the queries see what `spans` say."""
        if self.expanded:
            self.heads.add_expanded(self.state, self.q, entries, spans)
        elif spans:
            key = entries.unsqueeze(1)
            value = key[..., : self.heads.keys.shape[2]]
            kernels.block_attention(self.state, self.q, key, value, spans, self.heads.scale)

    def add_selected(
        self, rows: slice, entries: Tensor, idx: Tensor, bounds: tuple[Tensor, Tensor]
    ) -> None:
        """Take in listed `entries` for some queries; see `kernels.sparse_block_attention`."""
        assert not self.expanded, "selected entries are attended to as they are"
        state, width = self.state.rows(rows), self.heads.keys.shape[2]
        kernels.sparse_block_attention(
            state, self.q[rows], entries, idx, self.heads.scale, width, bounds
        )

    def finish(self) -> Tensor:
        """[n, H, V], when all blocks have been taken in."""
        o = kernels.finish_softmax(self.state, self.q.dtype)
        return o if self.expanded else self.heads.project(o)


def expanding_pays(
    heads: LatentHeads, runs: Sequence[Chunk], entries: int, topk: int | None = None
) -> bool:
    """Whether the expanded form costs fewer FLOPs than the absorbed one.

    For n queries that see `pairs` entries, `chosen` of them selected, with head widths N, V,
    rope and latents of R channels, in units of 2 H FLOPs:

        expanded: entries R (N + V) + (N + rope + V) pairs
        absorbed: n R (N + V) + (2 R + rope) chosen

    The expanded form masks what is not selected, so that a selection does not make it cheaper.

    Args:
        runs: the queries, stretches of one request.
        entries: that keys and values would be made of.
        topk: entries that a query selects; None: all it sees.
    """
    count = pairs = chosen = 0
    for run in runs:
        length = run.end - run.start
        # Queries that see no more than `topk` entries, before those that select.
        rising = length if topk is None else max(0, min(run.end, topk) - run.start)
        count += length
        pairs += _causal_pairs(run.start, run.end)
        chosen += _causal_pairs(run.start, run.start + rising) + (length - rising) * (topk or 0)
    latent, plain, value = heads.keys.shape[2], heads.keys.shape[1], heads.values.shape[1]
    projections = latent * (plain + value)
    expanded = entries * projections + (plain + heads.rope + value) * pairs
    return expanded < count * projections + (2 * latent + heads.rope) * chosen


def _causal_pairs(start: int, end: int) -> int:
    """Pairs of a token at start..end - 1 and one that it sees, itself included."""
    return (end - start) * (start + end + 1) // 2
