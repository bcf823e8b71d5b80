"""What `deep_ep.Buffer` (V1) promises, over a communicator of threads in place of a process group.

Written from the library's documentation, for the data flow of the adapter only.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kllm.parallel.communicator import Communicator


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
        num_nvl_bytes: int,
        num_rdma_bytes: int,
        low_latency_mode: bool,
        num_qps_per_rank: int,
    ) -> None:
        assert num_rdma_bytes > 0
        assert low_latency_mode
        self.comm = group
        self.dirty = False  # whether low-latency counters are not zero

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
        self.dirty = False

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        n, ranks = len(topk_idx), self.comm.size
        home = topk_idx // (num_experts // ranks)
        in_rank = torch.zeros(n, ranks, dtype=torch.bool).scatter_(1, home, True)
        per_expert = topk_idx.flatten().bincount(minlength=num_experts)
        return in_rank.sum(0), None, in_rank, per_expert, None

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
        self.dirty = True
        each = len(num_tokens_per_expert) // self.comm.size
        rows = [column.nonzero().flatten() for column in is_token_in_rank.t()]
        assert [len(row) for row in rows] == num_tokens_per_rank.tolist()
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
        out = torch.zeros_like(sent)
        for row, part in zip(rows, exchange(self.comm, list(x.split(received))), strict=True):
            out[row] += part
        return out, None, None

    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, tokens: int, num_experts: int, use_fp8: bool
    ) -> tuple[Any, ...]:
        assert not use_fp8
        assert not self.dirty, "the buffer was not cleaned after normal kernels"
        assert len(x) <= tokens
        ranks, each = self.comm.size, num_experts // self.comm.size
        out = x.new_full((each, tokens * ranks, x.shape[1]), torch.nan)
        counts = torch.zeros(each, dtype=torch.int32)
        handle: list[list[int]] = []
        for e in range(each):
            wanted = [(topk_idx == rank * each + e).any(dim=1) for rank in range(ranks)]
            parts = exchange(self.comm, [x[mask] for mask in wanted])
            counts[e] = sum(map(len, parts))
            out[e, : counts[e]] = torch.cat(parts)
            handle.append([len(part) for part in parts])
        return out, counts, handle, None, None

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any
    ) -> tuple[Any, ...]:
        each = x.shape[0]
        out = x.new_zeros(len(topk_idx), x.shape[2])
        for e, received in enumerate(handle):
            parts = exchange(self.comm, list(x[e, : sum(received)].split(received)))
            for rank, part in enumerate(parts):
                token, choice = (topk_idx == rank * each + e).nonzero(as_tuple=True)
                out[token] += part * topk_weights[token, choice].unsqueeze(1)
        return out, None, None
