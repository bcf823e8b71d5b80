"""What `deep_ep.Buffer` (1.2) promises, over a communicator of threads in place of a process group.

Written from the library's documentation, for the data flow of the adapter only. It takes tensors
of the documented dtypes and shapes and no others, as the library does.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kllm.parallel.communicator import Communicator

topk_idx_t = torch.int64


def expect(x: Tensor, dtype: torch.dtype, *shape: int) -> None:
    assert x.dtype == dtype
    assert x.shape == shape
    assert x.is_contiguous()


def exchange(comm: Communicator, parts: list[Tensor]) -> list[Tensor]:
    """Send `parts[r]` to rank r; what came from each."""
    counts = torch.tensor([[len(part)] for part in parts])
    coming = torch.empty_like(counts)
    ones = [1] * comm.size
    comm.all_to_all(coming, counts, ones, ones).wait()
    received = coming.flatten().tolist()
    out = parts[0].new_empty(sum(received), *parts[0].shape[1:])
    comm.all_to_all(out, torch.cat(parts), received, counts.flatten().tolist()).wait()
    return list(out.split(received))


class Buffer:
    num_sms = 20

    def __init__(
        self,
        group: Communicator,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        explicitly_destroy: bool = False,
    ) -> None:
        self.comm = group
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.num_qps_per_rank = num_qps_per_rank
        self.explicitly_destroy = explicitly_destroy
        self.dirty = False  # whether low-latency counters are not zero
        self.destroyed = False

    def destroy(self) -> None:
        assert self.explicitly_destroy
        assert not self.destroyed
        self.destroyed = True

    @staticmethod
    def get_dispatch_config(ranks: int) -> Any:
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda hidden_bytes, n: hidden_bytes * n,
            get_rdma_buffer_size_hint=lambda hidden_bytes, n: 0,
        )

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(tokens: int, hidden: int, ranks: int, experts: int) -> int:
        return tokens * hidden * ranks * experts

    def clean_low_latency_buffer(self, tokens: int, hidden: int, experts: int) -> None:
        self._check_room(tokens, hidden, experts)
        self.dirty = False

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert not self.destroyed
        n, ranks = len(topk_idx), self.comm.size
        expect(topk_idx, topk_idx_t, n, topk_idx.shape[1])
        home = topk_idx.long() // (num_experts // ranks)
        in_rank = torch.zeros(n, ranks, dtype=torch.bool).scatter_(1, home, True)
        per_expert = topk_idx.flatten().bincount(minlength=num_experts)
        return in_rank.sum(0).int(), None, per_expert.int(), in_rank, None

    def dispatch(
        self,
        x: Tensor,
        *,
        num_tokens_per_rank: Tensor,
        num_tokens_per_rdma_rank: None,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
    ) -> tuple[Any, ...]:
        (n, hidden), k = x.shape, topk_idx.shape[1]
        expect(x, torch.bfloat16, n, hidden)
        expect(num_tokens_per_rank, torch.int32, self.comm.size)
        assert num_tokens_per_rdma_rank is None
        expect(is_token_in_rank, torch.bool, n, self.comm.size)
        expect(num_tokens_per_expert, torch.int32, len(num_tokens_per_expert))
        expect(topk_idx, topk_idx_t, n, k)
        expect(topk_weights, torch.float32, n, k)
        experts = len(num_tokens_per_expert)
        layout = self.get_dispatch_layout(topk_idx, experts)
        assert torch.equal(num_tokens_per_rank, layout[0])
        assert torch.equal(num_tokens_per_expert, layout[2])
        assert torch.equal(is_token_in_rank, layout[3])
        self.dirty = True
        each = experts // self.comm.size
        rows = [column.nonzero().flatten() for column in is_token_in_rank.t()]
        local = [topk_idx[row] - rank * each for rank, row in enumerate(rows)]
        local = [ids.masked_fill((ids < 0) | (ids >= each), -1) for ids in local]
        from_ranks = exchange(self.comm, [x[row] for row in rows])
        ids = torch.cat(exchange(self.comm, local))
        weights = torch.cat(exchange(self.comm, [topk_weights[row] for row in rows]))
        counts = ids[ids >= 0].bincount(minlength=each).tolist()
        handle = (rows, [len(part) for part in from_ranks], x)
        return torch.cat(from_ranks), ids, weights, counts, handle, None

    def combine(self, x: Tensor, handle: Any) -> tuple[Any, ...]:
        rows, received, sent = handle
        expect(x, torch.bfloat16, sum(received), sent.shape[1])
        out = torch.zeros_like(sent)
        for row, part in zip(rows, exchange(self.comm, list(x.split(received))), strict=True):
            out[row] += part
        return out, None, None

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        use_fp8: bool = True,
    ) -> tuple[Any, ...]:
        size, ranks, each = (
            num_max_dispatch_tokens_per_rank,
            self.comm.size,
            num_experts // self.comm.size,
        )
        assert not use_fp8
        assert self.low_latency_mode
        assert self.num_qps_per_rank >= each
        assert not self.dirty, "the buffer was not cleaned after normal kernels"
        self._check_room(size, x.shape[1], num_experts)
        expect(x, torch.bfloat16, len(x), x.shape[1])
        expect(topk_idx, topk_idx_t, len(x), topk_idx.shape[1])
        assert len(x) <= size
        sizes = torch.cat(exchange(self.comm, [torch.tensor([size])] * ranks))
        assert (sizes == size).all(), "the ranks disagree on the size"
        assert ranks * size % 4 == 0
        out = x.new_full((each, size * ranks, x.shape[1]), torch.nan)
        counts = torch.zeros(each, dtype=torch.int32)
        sources: list[list[int]] = []
        for e in range(each):
            wanted = [(topk_idx == rank * each + e).any(dim=1) for rank in range(ranks)]
            parts = exchange(self.comm, [x[mask] for mask in wanted])
            counts[e] = sum(map(len, parts))
            out[e, : counts[e]] = torch.cat(parts)
            sources.append([len(part) for part in parts])
        return out, counts, (sources, out.shape), None, None

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any
    ) -> tuple[Any, ...]:
        sources, shape = handle
        expect(x, torch.bfloat16, *shape)
        expect(topk_idx, topk_idx_t, *topk_idx.shape)
        expect(topk_weights, torch.float32, *topk_idx.shape)
        each = x.shape[0]
        out = x.new_zeros(len(topk_idx), x.shape[2], dtype=torch.float32)
        for e, received in enumerate(sources):
            parts = exchange(self.comm, list(x[e, : sum(received)].split(received)))
            for rank, part in enumerate(parts):
                token, choice = (topk_idx == rank * each + e).nonzero(as_tuple=True)
                out[token] += part * topk_weights[token, choice].unsqueeze(1)
        return out.bfloat16(), None, None

    def _check_room(self, tokens: int, hidden: int, experts: int) -> None:
        assert not self.destroyed
        need = self.get_low_latency_rdma_size_hint(tokens, hidden, self.comm.size, experts)
        assert need <= self.num_rdma_bytes
