"""Expert exchange through DeepEP's `Buffer`: an optional library for NVLink and RDMA.

Its normal kernels for steps with prompts, its low-latency kernels for decodes. Ranks of a group
that entered different kernels would hang: the choice rests on what all of them know alike.
Source: deep_ep 1.x (github.com/deepseek-ai/DeepEP), whose limits are the tables here.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kllm import env
from kllm.parallel.communicator import Communicator
from kllm.parallel.expert_dispatch import DispatchStep, Routed, check_conservation

GROUP_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # of the low-latency kernels
MOST_CHOICES = 11  # experts a token
LOW_LATENCY_TOKENS = 256  # of a rank; its buffers hold this many from every rank for each expert


def installed() -> bool:
    """Whether there is a deep_ep to import."""
    return find_spec("deep_ep") is not None


def problem(
    comm: Communicator, dim: int, top_k: int, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why DeepEP cannot exchange these tokens, in one sentence; None: it can."""
    instead = "use ep_backend all_to_all or all_gather"
    if not installed():
        return f"deep_ep is not installed; install DeepEP, or {instead}"
    if device.type != "cuda":
        return f"deep_ep moves tokens between GPUs and this rank runs on {device.type}; {instead}"
    if dtype != torch.bfloat16:
        return f"deep_ep moves bfloat16 tokens and the model runs in {dtype}; {instead}"
    if getattr(comm, "group", None) is None:
        return f"deep_ep needs all ranks of the layout and here one stands for them; {instead}"
    for what, found, known in (
        ("groups", comm.size, GROUP_SIZES),
        ("hidden sizes", dim, HIDDEN_SIZES),
        ("experts a token", top_k, range(1, MOST_CHOICES + 1)),
    ):
        if found not in known:
            return f"deep_ep has {what} of {', '.join(map(str, known))} and not {found}; {instead}"
    return None


@cache  # all layers share one buffer
def _buffer(group: Any, ranks: int, dim: int, num_slots: int) -> Any:
    """A buffer for both kinds of kernels: each size is the larger of the two."""
    from deep_ep import Buffer

    row = dim * torch.bfloat16.itemsize
    configs = (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks))
    nvlink = max(config.get_nvl_buffer_size_hint(row, ranks) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(row, ranks) for config in configs)
    low = Buffer.get_low_latency_rdma_size_hint(LOW_LATENCY_TOKENS, dim, ranks, num_slots)
    return Buffer(
        group,
        nvlink,
        max(rdma, low),
        low_latency_mode=True,
        num_qps_per_rank=max(Buffer.num_sms, num_slots // ranks),
    )


class DeepEP:
    """Sends through DeepEP, where `problem` finds none.

    Args:
        per_rank: slots of each rank.
        dim: width of a token.
    """

    def __init__(self, comm: Communicator, per_rank: int, dim: int) -> None:
        self._comm = comm
        self._num_slots = per_rank * comm.size
        self._buffer = _buffer(getattr(comm, "group", None), comm.size, dim, self._num_slots)

    def send(self, tokens: Routed, step: DispatchStep) -> "_NormalTrip | _LowLatencyTrip":
        """See `Dispatcher.send`."""
        if step.decode_only and step.most <= LOW_LATENCY_TOKENS:
            return self._send_low_latency(tokens)
        return self._send_normal(tokens)

    def _send_normal(self, tokens: Routed) -> "_NormalTrip":
        buffer = self._buffer
        to_rank, to_node, in_rank, to_slot, _ = buffer.get_dispatch_layout(
            tokens.slots, self._num_slots
        )
        x, slots, weights, arrived, handle, _ = buffer.dispatch(
            tokens.x.contiguous(),
            num_tokens_per_rank=to_rank,
            num_tokens_per_rdma_rank=to_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=to_slot,
            topk_idx=tokens.slots,
            topk_weights=tokens.weights,
        )
        if env.debug():
            check_conservation(self._comm, int(in_rank.sum()), x.shape[0], x.device)
        clean = (LOW_LATENCY_TOKENS, x.shape[1], self._num_slots)
        return _NormalTrip(buffer, Routed(x, slots, weights, pairs=sum(arrived)), handle, clean)

    def _send_low_latency(self, tokens: Routed) -> "_LowLatencyTrip":
        x, counts, handle, _, _ = self._buffer.low_latency_dispatch(
            tokens.x.contiguous(), tokens.slots, LOW_LATENCY_TOKENS, self._num_slots, use_fp8=False
        )
        if env.debug():
            sent = tokens.slots.numel()
            check_conservation(self._comm, sent, int(counts.sum()), x.device)
        return _LowLatencyTrip(self._buffer, tokens, x, counts, handle)


@dataclass(frozen=True, slots=True)
class _NormalTrip:
    buffer: Any
    arrived: Routed
    handle: Any
    clean: tuple[int, int, int]

    def arrive(self) -> Routed:
        """See `Trip.arrive`."""
        return self.arrived

    def combine(self, y: Tensor) -> Tensor:
        """See `Trip.combine`."""
        out: Tensor = self.buffer.combine(y, self.handle)[0]
        # The low-latency kernels expect zeros where these left their counters, and a replayed
        # graph could not clean up before it begins.
        self.buffer.clean_low_latency_buffer(*self.clean)
        return out


@dataclass(frozen=True, slots=True)
class _LowLatencyTrip:
    buffer: Any
    tokens: Routed
    x: Tensor  # [S, rows, d]: the tokens of each expert, the first `counts` rows of it
    counts: Tensor  # [S] int32
    handle: Any

    def arrive(self) -> Routed:
        """See `Trip.arrive`. Each row is for one expert; its weight is applied on the way back."""
        slots, rows = self.x.shape[:2]
        slot = torch.arange(slots, device=self.x.device).unsqueeze(1)
        live = torch.arange(rows, device=self.x.device) < self.counts.unsqueeze(1)
        where = torch.where(live, slot, -1).view(-1, 1)  # [S * rows, 1]
        ones = torch.ones_like(where, dtype=torch.float32)
        return Routed(self.x.flatten(0, 1), where, ones)

    def combine(self, y: Tensor) -> Tensor:
        """See `Trip.combine`."""
        out: Tensor = self.buffer.low_latency_combine(
            y.view(self.x.shape), self.tokens.slots, self.tokens.weights, self.handle
        )[0]
        return out
