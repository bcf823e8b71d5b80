"""What a model family stores per token and per request; every cache shape derives from this.

Two kinds of state:

* `PagedState` grows with the sequence. All paged states of a model share one block table: a
  page covers `page_size` tokens and holds `page_size / tokens_per_entry` entries of each state.
* `RingState` is constant per request: the newest `window` rows, at position mod ring size.
  It is rewindable by construction: a ring longer than its window by r rows keeps everything
  that is needed after the newest r tokens are taken back, so speculation only lowers a length.
  A copy of a request's rings at a page boundary is all that a prefix hit has to restore.
"""

from dataclasses import dataclass
from math import lcm

from kllm.quant.entry import EntryFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedState:
    """State that grows with the sequence, in pages."""

    name: str
    layers: tuple[int, ...]  # model layers that store it
    entry: EntryFormat
    heads: int = 1  # vectors an entry (2 * KV heads for separate keys and values)
    tokens_per_entry: int = 1
    head_shards: bool = False  # whether tensor parallelism splits `heads`

    def bytes_per_token(self, kv_dtype: str) -> float:
        """Bytes a context token costs over all layers."""
        per_entry = self.heads * self.entry.nbytes(kv_dtype)
        return len(self.layers) * per_entry / self.tokens_per_entry


@dataclass(frozen=True, slots=True, kw_only=True)
class RingState:
    """State of constant size per request: the newest rows by position."""

    name: str
    layers: tuple[int, ...]
    window: int  # newest rows that later tokens may still need
    width: int  # channels a row
    entry: EntryFormat | None = None  # follows the KV dtype; None: always float32

    def rows(self, rewind_tokens: int) -> int:
        """Ring length when the newest `rewind_tokens` tokens may be taken back."""
        return self.window + rewind_tokens

    def bytes_per_request(self, kv_dtype: str, rewind_tokens: int = 0) -> int:
        """Bytes a running request costs over all layers."""
        row = self.entry.nbytes(kv_dtype) if self.entry else self.width * 4
        return len(self.layers) * self.rows(rewind_tokens) * row


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """The whole per-request state of a model on one rank."""

    paged: tuple[PagedState, ...]
    rings: tuple[RingState, ...] = ()
    page_multiple: int = 1  # page sizes a backend can use are multiples of this

    @property
    def page_granule(self) -> int:
        """Smallest page size: every state has a whole number of entries in a page."""
        return lcm(self.page_multiple, *(state.tokens_per_entry for state in self.paged))

    def bytes_per_token(self, kv_dtype: str) -> float:
        """Bytes of growing state a context token."""
        return sum(state.bytes_per_token(kv_dtype) for state in self.paged)

    def bytes_per_request(self, kv_dtype: str, rewind_tokens: int = 0) -> int:
        """Bytes of constant state a running request."""
        return sum(ring.bytes_per_request(kv_dtype, rewind_tokens) for ring in self.rings)
