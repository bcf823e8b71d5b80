"""Token embedding and language-model head, split over the vocabulary."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kllm.kernels.packed_linear import PackedWeight, can_pack
from kllm.layers.linear import shard_size
from kllm.parallel.communicator import Communicator


class VocabEmbedding(nn.Module):
    """Embedding whose rows are split over the ranks of `comm`."""

    def __init__(self, vocab_size: int, dim: int, comm: Communicator) -> None:
        super().__init__()
        rows = shard_size("vocabulary", vocab_size, comm.size)
        self.weight = nn.Parameter(torch.empty(rows, dim), requires_grad=False)
        self.comm = comm

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, dim]."""
        if self.comm.size == 1:
            return F.embedding(token_ids, self.weight)
        rows = self.weight.shape[0]
        local = token_ids - self.comm.rank * rows
        foreign = (local < 0) | (local >= rows)
        x = F.embedding(local.masked_fill(foreign, 0), self.weight)
        x = x.masked_fill(foreign.unsqueeze(-1), 0)
        self.comm.all_reduce(x).wait()
        return x


class VocabHead(nn.Module):
    """Logits over the whole vocabulary from a head whose rows are split over `comm`.

    The matrix product runs in the weights' dtype; its result is widened to float32.
    """

    def __init__(self, dim: int, vocab_size: int, comm: Communicator) -> None:
        super().__init__()
        rows = shard_size("vocabulary", vocab_size, comm.size)
        self.weight = nn.Parameter(torch.empty(rows, dim), requires_grad=False)
        self.comm = comm
        self._packed: PackedWeight | None = None

    def pack(self) -> None:
        """Make a reordered copy where that is faster. The weight stays: it may be tied."""
        if can_pack(self.weight):
            self._packed = PackedWeight(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[S, dim] -> [S, V] float32, the same on every rank."""
        y = self._packed.linear(x) if self._packed is not None else F.linear(x, self.weight)
        y = y.float()  # [S, V / size]
        if self.comm.size == 1:
            return y
        parts = y.new_empty(self.comm.size * y.shape[0], y.shape[1])
        self.comm.all_gather(parts, y.contiguous()).wait()
        return torch.cat(parts.chunk(self.comm.size), dim=1)
