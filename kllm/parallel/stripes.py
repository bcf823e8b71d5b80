"""Which context-parallel rank holds which tokens of a prompt. Plain numbers, no torch.

A prompt is cut into stripes of equal length, and each run of 2 N stripes is dealt to N ranks in
zigzag order: rank r takes the r-th and the (2 N - 1 - r)-th. Under a causal mask every rank then
has the same work, whatever the prompt's length and however it is cut into chunks, because the
place of a token depends on its position only.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Stripes:
    """The deal of tokens to ranks."""

    ranks: int  # N
    tokens: int  # a stripe

    def scaled(self, tokens_per_entry: int) -> "Stripes":
        """The same deal in entries of so many tokens; an entry never lies across two stripes."""
        assert self.tokens % tokens_per_entry == 0
        return Stripes(self.ranks, self.tokens // tokens_per_entry)

    def rank_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rank that holds each position."""
        stripe = positions // self.tokens % (2 * self.ranks)
        return np.minimum(stripe, 2 * self.ranks - 1 - stripe)

    def local(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The index of each position among those that its rank holds, in order."""
        stripe, offset = np.divmod(positions, self.tokens)
        deal, place = np.divmod(stripe, 2 * self.ranks)
        return (2 * deal + (place >= self.ranks)) * self.tokens + offset

    def count(self, rank: int, length: int) -> int:
        """How many of the first `length` positions a rank holds."""
        deals, rest = divmod(length, 2 * self.ranks * self.tokens)
        held = 2 * deals * self.tokens
        for stripe in (rank, 2 * self.ranks - 1 - rank):
            held += min(max(rest - stripe * self.tokens, 0), self.tokens)
        return held

    def runs(self, rank: int, start: int, end: int) -> list[tuple[int, int]]:
        """The stretches [a, b) of the positions start..end - 1 that a rank holds, in order."""
        found = []
        deal = 2 * self.ranks * self.tokens
        for base in range(start // deal * deal, end, deal):
            for stripe in (rank, 2 * self.ranks - 1 - rank):
                first = base + stripe * self.tokens
                a, b = max(first, start), min(first + self.tokens, end)
                if a < b:
                    found.append((a, b))
        return found


def stripe_tokens(ranks: int, token_budget: int, granule: int, longest: int = 512) -> int:
    """The length of a stripe: one deal to a full chunk if that is not too coarse.

    Args:
        granule: page size; stripes are whole pages, so that no compressed entry is cut.
        longest: tokens; longer stripes would leave ranks idle at the end of a prompt.
    """
    return max(1, min(token_budget // (2 * ranks), longest) // granule) * granule
