"""What makes keys and values of latents (MLA), and which form of attention costs less."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kllm import kernels
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

    def expanding_is_cheaper(self, entries: int, count: int, pairs: int, chosen: int) -> bool:
        """Whether the expanded form costs fewer FLOPs than the absorbed one.

        In units of 2 H FLOPs, with head widths N, V, rope and latents of R channels:

            expanded: entries R (N + V) + (N + rope + V) pairs
            absorbed: count R (N + V) + (2 R + rope) chosen

        Args:
            entries: that keys and values would be made of.
            count: queries.
            pairs: of a query and an entry that it sees.
            chosen: pairs that are left where attention is sparse.
        """
        latent, plain, value = self.keys.shape[2], self.keys.shape[1], self.values.shape[1]
        projections = latent * (plain + value)
        expanded = entries * projections + (plain + self.rope + value) * pairs
        return expanded < count * projections + (2 * latent + self.rope) * chosen


def causal_pairs(start: int, end: int) -> int:
    """Pairs of a token at start..end - 1 and one that it sees, itself included."""
    return (end - start) * (start + end + 1) // 2
