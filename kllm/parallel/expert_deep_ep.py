"""Expert exchange through DeepEP's `Buffer`: an optional library for NVLink and RDMA.

Its normal kernels for steps with prompts, its low-latency kernels for decodes. Ranks of a group
that entered different kernels would hang: the choice rests on what all of them know alike.
Source: deep_ep 1.2 (github.com/deepseek-ai/DeepEP), whose limits are the tables here.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kllm.errors import one_line
from kllm.parallel.communicator import Communicator
from kllm.parallel.expert_dispatch import (
    DispatchStep,
    Routed,
    check_conservation,
    checks_counts,
)

GROUP_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # of the low-latency kernels
MOST_CHOICES = 11  # experts a token

# Tokens of a rank that a low-latency exchange has room for, from every rank for each expert. The
# next exchange may have another size in the same memory (`LowLatencyLayout` in DeepEP's
# csrc/config.hpp): the flags come first, where the number of experts says, and each call leaves
# zeros for the next. Behind them lie, in units of the size, [0, 1) and [1, 2) to send from, [2, 3)
# and [3, 4) to receive in; a dispatch has the first of each pair, a combine the second. A rank may
# be one call ahead of another. Its dispatch of size n writes to [2 n, 3 n) of one that, in a
# combine of size m, still reads [3 m, 4 m) and sends [m, 2 m): apart where n = m, or n and m differ
# by a factor of 3 at least. At home it writes the tokens it sends to [0, n / experts), while a
# network card may still read what the combine sends, from m on: where there are network cards
# there are 16 experts at least.
LOW_LATENCY_SIZES = (16, 64, 256)
LOW_LATENCY_TOKENS = LOW_LATENCY_SIZES[-1]


@cache
def installed() -> bool:
    """Whether there is a deep_ep to import."""
    return find_spec("deep_ep") is not None


def unusable() -> str | None:
    """Why no layout can use the deep_ep that is here; None: there is one, and of the right age."""
    if not installed():
        return "deep_ep is not installed; install DeepEP"
    try:
        found = import_module("deep_ep")
    except Exception as error:  # noqa: BLE001 - whatever a foreign library fails with on its way
        return (
            f"deep_ep cannot be imported ({one_line(error)}); install a DeepEP built for this "
            "machine"
        )
    if not hasattr(found, "topk_idx_t"):
        return "deep_ep is older than 1.2; install a newer DeepEP"
    return None


def problem(
    comm: Communicator, dim: int, top_k: int, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why DeepEP cannot exchange these tokens, in one sentence; None: it can."""
    instead = "use ep_backend all_to_all or all_gather"
    # Asked in this order so that no machine without a GPU imports it.
    if installed() and device.type != "cuda":
        return f"deep_ep moves tokens between GPUs and this rank runs on {device.type}; {instead}"
    if (why := unusable()) is not None:
        return f"{why}, or {instead}"
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


_buffers: dict[tuple[Any, ...], Any] = {}  # all layers share one


def _buffer(group: Any, ranks: int, dim: int, num_slots: int) -> Any:
    """A buffer for both kinds of kernels: each size is the larger of the two."""
    from deep_ep import Buffer

    key = (group, ranks, dim, num_slots)
    if key not in _buffers:
        row = dim * torch.bfloat16.itemsize
        configs = (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks))
        nvlink = max(config.get_nvl_buffer_size_hint(row, ranks) for config in configs)
        rdma = max(config.get_rdma_buffer_size_hint(row, ranks) for config in configs)
        low = Buffer.get_low_latency_rdma_size_hint(LOW_LATENCY_TOKENS, dim, ranks, num_slots)
        _buffers[key] = Buffer(
            group,
            nvlink,
            max(rdma, low),
            low_latency_mode=True,
            num_qps_per_rank=max(Buffer.num_sms, num_slots // ranks),
            explicitly_destroy=True,  # a collective, which no destructor can know when to run
        )
    return _buffers[key]


def release() -> None:
    """Give back the memory of all buffers of this process; nothing where there are none.

    All ranks of a layout call it, after their last step and before they leave their groups: it
    waits for each of them. What they had for exchanging, graphs too, cannot be used any more.
    """
    while _buffers:
        _, buffer = _buffers.popitem()
        buffer.destroy()


class DeepEP:
    """Sends through DeepEP, where `problem` finds none.

    Args:
        per_rank: slots of each rank.
        dim: width of a token.
    """

    def __init__(self, comm: Communicator, per_rank: int, dim: int) -> None:
        self._comm = comm
        self._per_rank, self._num_slots = per_rank, per_rank * comm.size
        self._buffer = _buffer(getattr(comm, "group", None), comm.size, dim, self._num_slots)
        self._id_dtype: torch.dtype = import_module("deep_ep").topk_idx_t

    def send(self, tokens: Routed, step: DispatchStep) -> "_NormalTrip | _LowLatencyTrip":
        """See `Dispatcher.send`."""
        ids = tokens.slots.to(self._id_dtype)
        if step.decode_only and step.most <= LOW_LATENCY_TOKENS:
            return self._send_low_latency(tokens, ids, step.most)
        return self._send_normal(tokens, ids)

    def _send_normal(self, tokens: Routed, ids: Tensor) -> "_NormalTrip":
        buffer = self._buffer
        to_rank, to_node, to_slot, in_rank, _ = buffer.get_dispatch_layout(ids, self._num_slots)
        x, slots, weights, arrived, handle, _ = buffer.dispatch(
            tokens.x.contiguous(),
            num_tokens_per_rank=to_rank,
            num_tokens_per_rdma_rank=to_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=to_slot,
            topk_idx=ids,
            topk_weights=tokens.weights,
        )
        if checks_counts(x.device):
            check_conservation(self._comm, int(in_rank.sum()), x.shape[0], x.device)
        clean = (LOW_LATENCY_TOKENS, x.shape[1], self._num_slots)
        routed = Routed(x, slots.long(), weights, pairs=sum(arrived))
        return _NormalTrip(buffer, routed, handle, clean)

    def _send_low_latency(self, tokens: Routed, ids: Tensor, most: int) -> "_LowLatencyTrip":
        size = next(size for size in LOW_LATENCY_SIZES if size >= most)
        x, counts, handle, _, _ = self._buffer.low_latency_dispatch(
            tokens.x.contiguous(), ids, size, self._num_slots, use_fp8=False
        )
        if checks_counts(x.device):
            check_conservation(self._comm, ids.numel(), int(counts.sum()), x.device)
        # As many as can have come: the host does not know how many have.
        rows = self._comm.size * most * min(ids.shape[1], self._per_rank)
        place, slot = _live_rows(counts, rows, x.shape[1])
        return _LowLatencyTrip(self._buffer, ids, tokens.weights, x, place, slot, handle)


def _live_rows(counts: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Where in [S * width] the first `counts` [S] rows of each slot are, as the host cannot know.

    Args:
        rows: at least as many as all `counts`.

    Returns:
        place: [rows] int64; where no row is left, S * width.
        slot: [rows] int64; where no row is left, S.
    """
    slots, device = len(counts), counts.device
    ends = counts.cumsum(0)
    row = torch.arange(rows, device=device)
    slot = torch.searchsorted(ends, row, right=True)
    gaps = torch.arange(0, slots * width, width, device=device) - (ends - counts)
    gaps = F.pad(gaps, (0, 1), value=slots * width)
    return (row + gaps[slot]).clamp(max=slots * width), slot


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
    """Experts are given as many rows as can have come, not all of `x`: few of them are written."""

    buffer: Any
    ids: Tensor  # [n, k] sent
    weights: Tensor  # [n, k] float32
    x: Tensor  # [S, width, d]: the tokens of each expert, and memory that nobody has written
    place: Tensor  # [rows] of the tokens in [S * width]
    slot: Tensor  # [rows]
    handle: Any

    def arrive(self) -> Routed:
        """See `Trip.arrive`. Each row is for one expert; its weight is applied on the way back."""
        x = self.x.flatten(0, 1)
        x = x[self.place.clamp(max=len(x) - 1)]
        ones = torch.ones(len(x), 1, dtype=torch.float32, device=x.device)
        return Routed(x, self.slot.unsqueeze(1), ones)

    def combine(self, y: Tensor) -> Tensor:
        """See `Trip.combine`."""
        slots, width, dim = self.x.shape
        # The last row is for what has no place; only tokens that came are read of the others.
        back = y.new_empty(slots * width + 1, dim).index_copy_(0, self.place, y)
        out: Tensor = self.buffer.low_latency_combine(
            back[:-1].view(slots, width, dim), self.ids, self.weights, self.handle
        )[0]
        return out
