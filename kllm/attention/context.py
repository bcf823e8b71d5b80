"""What a step's layers know of the batch: the plan as tensors on the model's device."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kllm.cache.pool import KVPool
from kllm.core import Plan
from kllm.parallel.communicator import Communicator
from kllm.parallel.sequence import SequenceStep

Asked = ParamSpec("Asked")
Found = TypeVar("Found")
ALIGNMENT = 16  # bytes; kernels read tensors that begin there in wider words


def once_a_step(
    work: "Callable[Concatenate[ForwardContext, Asked], Found]",
) -> "Callable[Concatenate[ForwardContext, Asked], Found]":
    """Work out once what all layers of a step may share: what is found is kept in its context.

    Other arguments than the context must be hashable; equal ones have the same result.
    """

    @wraps(work)
    def shared(ctx: "ForwardContext", /, *args: Asked.args, **options: Asked.kwargs) -> Found:
        key = (work, *args, *options.items())
        if key not in ctx.shared:
            ctx.shared[key] = work(ctx, *args, **options)
        found: Found = ctx.shared[key]
        return found

    return shared


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor; to a GPU it is copied without waiting for the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def all_to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The same for several arrays, in one copy: small ones cost their calls, not their bytes.

    The tensors are parts of one allocation, which lives as long as any of them.
    """
    spans, size = [], 0
    for array in arrays:
        spans.append(slice(size, size + array.nbytes))
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for array, span in zip(arrays, spans, strict=True):
        host.numpy()[span] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return [
        there[span].view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)
        for array, span in zip(arrays, spans, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class SequenceContext:
    """A context-parallel step: the chunks that this rank runs together with its group."""

    comm: Communicator
    step: SequenceStep
    rows: Tensor  # [pieces] int64 state rows
    block_tables: Tensor  # [pieces, max pages] int32, this rank's


@dataclass(slots=True)
class ForwardContext:
    """One step's batch.

    Host copies of the lengths are numpy arrays, so that no layer has to synchronise with the
    device to learn a shape.
    """

    pool: KVPool
    num_decodes: int  # leading requests with exactly one query token
    query_lens_host: NDArray[np.int32]  # [B]
    context_lens_host: NDArray[np.int32]  # [B]
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    request_index: Tensor  # [T] int64, which request of the step a token belongs to
    cu_seqlens: Tensor  # [B + 1] int32, where each request's tokens start
    context_lens: Tensor  # [B] int32, including this step's tokens
    block_tables: Tensor  # [B, max pages] int32
    rows: Tensor  # [B] int64, state slot of each request
    places: Tensor  # [T] int64, where tokens lie in their request's pages: their positions,
    # except on ranks that hold only some stripes of a prompt (`SequenceStep`)
    sequence: SequenceContext | None = None  # with context parallelism, in steps with prompts
    peer_tokens: tuple[int, ...] = ()  # [ep] tokens that each rank of the expert group runs
    decode_only: bool = False  # no rank of any group runs a prompt in this step
    static: bool = False  # the tensors are a captured graph's inputs and stay where they are
    shared: dict[Hashable, Any] = field(default_factory=dict)  # values that layers share in a step

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        pool: KVPool,
        device: torch.device,
        *,
        places: NDArray[np.int64] | None = None,
        sequence: tuple[Communicator, SequenceStep] | None = None,
        peer_tokens: tuple[int, ...] = (),
        decode_only: bool = False,
    ) -> "ForwardContext":
        """The plan's arrays as tensors; on a GPU the copy is asynchronous.

        Args:
            places: [T] where tokens lie in their request's pages; None: at their positions.
            sequence: the context-parallel group and its step, when it runs prompts.
            peer_tokens: [ep] tokens that each rank of the expert group runs.
            decode_only: no rank of any group runs a prompt in this step.
        """

        batch = len(plan.query_lens)
        cu_seqlens = np.zeros(batch + 1, np.int32)
        np.cumsum(plan.query_lens, out=cu_seqlens[1:])
        arrays: dict[str, NDArray[Any]] = {
            "token_ids": plan.token_ids,
            "positions": plan.positions,
            "request_index": np.repeat(np.arange(batch, dtype=np.int64), plan.query_lens),
            "cu_seqlens": cu_seqlens,
            "context_lens": plan.context_lens,
            "block_tables": plan.block_tables,
            "rows": plan.rows.astype(np.int64),
        }
        if places is not None:
            arrays["places"] = places
        if sequence is not None:
            arrays["piece rows"] = sequence[1].rows.astype(np.int64)
            arrays["piece tables"] = sequence[1].block_tables
        put = dict(zip(arrays, all_to_device(list(arrays.values()), device), strict=True))
        shared = None
        if sequence is not None and sequence[1].pieces:
            shared = SequenceContext(*sequence, put["piece rows"], put["piece tables"])
        return cls(
            pool=pool,
            num_decodes=plan.num_decodes,
            query_lens_host=plan.query_lens,
            context_lens_host=plan.context_lens,
            token_ids=put["token_ids"],
            positions=put["positions"],
            request_index=put["request_index"],
            cu_seqlens=put["cu_seqlens"],
            context_lens=put["context_lens"],
            block_tables=put["block_tables"],
            rows=put["rows"],
            places=put["positions" if places is None else "places"],
            sequence=shared,
            peer_tokens=peer_tokens,
            decode_only=decode_only,
        )

    @property
    def num_tokens(self) -> int:
        """T: query tokens of the step."""
        return self.token_ids.shape[0]

    @once_a_step
    def entry_slots(self, tokens_per_entry: int) -> Tensor:
        """[T] int64: the slot of the entry that each token belongs to, in a paged state."""
        per_page = self.pool.page_size // tokens_per_entry
        entry = self.places // tokens_per_entry
        pages = self.block_tables[self.request_index, entry // per_page].long()
        return pages * per_page + entry % per_page

    @once_a_step
    def ring_slots(self, ring_rows: int) -> Tensor:
        """[T] int64: each token's slot in a ring state of `ring_rows` rows a request."""
        return self.rows[self.request_index] * ring_rows + self.positions % ring_rows
