"""The tensors behind a cache spec: pages, rings, and moving entries in and out of them."""

import torch
from torch import Tensor

from kllm.cache.spec import CacheSpec, PagedState, RingState
from kllm.quant import kv_fp8

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
FILLED_AT_ONCE = 1 << 16  # entries: bounds what packing them takes


class KVPool:
    """KV memory of one rank.

    `pages(name, layer)` is [P, entries a page, heads, channels] (last dimension packed bytes
    when the KV dtype is fp8); `rings(name, layer)` is [max_batch, ring rows, channels].
    Slots of paged states count entries: page * entries a page + offset.

    Raises:
        torch.OutOfMemoryError: when the device cannot hold `num_pages` and `max_batch`.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        num_pages: int,
        page_size: int,
        max_batch: int,
        kv_dtype: str,
        compute_dtype: torch.dtype,
        device: torch.device,
        rewind_tokens: int = 0,
    ) -> None:
        self.spec = spec
        self.num_pages = num_pages
        self.page_size = page_size
        self.kv_dtype = kv_dtype
        self.compute_dtype = compute_dtype
        self._states: dict[str, PagedState | RingState] = {}
        self._tensors: dict[tuple[str, int], Tensor] = {}

        def allocate(state: PagedState | RingState, *shape: int) -> None:
            self._states[state.name] = state
            dtype, width = self._storage(state)
            for layer in state.layers:
                # Zeros: a masked lane may read a slot nobody wrote, and NaN would survive masking.
                tensor = torch.zeros(*shape, width, dtype=dtype, device=device)
                self._tensors[state.name, layer] = tensor

        for paged in spec.paged:
            allocate(paged, num_pages, page_size // paged.tokens_per_entry, paged.heads)
        for ring in spec.rings:
            allocate(ring, max_batch, ring.rows(rewind_tokens))

    def _storage(self, state: PagedState | RingState) -> tuple[torch.dtype, int]:
        if state.entry is None:
            assert isinstance(state, RingState)
            return torch.float32, state.width
        if self.kv_dtype == "fp8":
            return torch.uint8, state.entry.nbytes("fp8")
        return TORCH_DTYPES[self.kv_dtype], state.entry.width

    def pages(self, name: str, layer: int) -> Tensor:
        """[P, entries a page, heads, channels or bytes]."""
        return self._tensors[name, layer]

    def rings(self, name: str, layer: int) -> Tensor:
        """[max_batch, ring rows, channels or bytes]."""
        return self._tensors[name, layer]

    def write(self, name: str, layer: int, slots: Tensor, values: Tensor) -> None:
        """Store entries in place.

        Args:
            slots: [N] int64 flat entry slots; of rings, row * ring rows + position mod ring rows.
            values: [N, heads, channels] (rings: [N, channels]) in the compute dtype.
        """
        store = self._tensors[name, layer]
        flat = store.view(-1, *store.shape[2:])
        flat.index_copy_(0, slots, self.pack(name, values))

    def read(self, name: str, layer: int, slots: Tensor) -> Tensor:
        """Entries of `slots` [...] -> [..., heads, channels] (rings: [..., channels])."""
        store = self._tensors[name, layer]
        flat = store.view(-1, *store.shape[2:])
        return self.unpack(name, flat[slots])

    def pack(self, name: str, values: Tensor) -> Tensor:
        """Values as they are stored: cast, or quantised and packed."""
        entry = self._states[name].entry
        if entry is not None and self.kv_dtype == "fp8":
            return kv_fp8.pack(values, entry)
        return values.to(torch.float32 if entry is None else TORCH_DTYPES[self.kv_dtype])

    def unpack(self, name: str, stored: Tensor) -> Tensor:
        """Stored entries back in the compute dtype (state that is always float32 stays so)."""
        entry = self._states[name].entry
        if entry is None:
            return stored
        if self.kv_dtype == "fp8":
            return kv_fp8.unpack(stored, entry, self.compute_dtype)
        return stored.to(self.compute_dtype)

    @torch.inference_mode()
    def fill_random(self, seed: int) -> None:
        """Entries ~ N(0, 1) everywhere: for timing, where selections need scores that differ."""
        generator = torch.Generator(next(iter(self._tensors.values())).device).manual_seed(seed)
        for (name, _), tensor in self._tensors.items():
            state = self._states[name]
            entry = state.entry
            if entry is None or self.kv_dtype != "fp8":
                tensor.normal_(generator=generator)
                continue
            rows = tensor.view(-1, *tensor.shape[2:])
            for part in torch.split(rows, FILLED_AT_ONCE):
                values = torch.empty(
                    *part.shape[:-1], entry.width, dtype=self.compute_dtype, device=part.device
                )
                part.copy_(self.pack(name, values.normal_(generator=generator)))

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in self._tensors.values())
