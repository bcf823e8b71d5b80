"""Pipeline parallelism: a stage's part of a step, micro-batch by micro-batch.

Each stage receives a micro-batch's state from the stage before, runs its layers, and sends the
result on while it turns to the next micro-batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kllm.attention.context import ForwardContext
from kllm.models.base import CausalLM
from kllm.parallel.communicator import Communicator, Handle
from kllm.parallel.emulated import EmulatedComm


def run_stages(
    model: CausalLM, contexts: Sequence[ForwardContext], pp: Communicator
) -> list[Tensor] | None:
    """Run this rank's stage of a step.

    Args:
        contexts: of the micro-batches, in the same order on all stages.
        pp: the ranks that pass this batch on, in order of their stages.

    Returns:
        On the last stage [T, ...] of each micro-batch, what `model.logits` reads; else None.
    """
    states = []
    # A buffer must not be used again before it is sent: all are kept until the end of the step,
    # together no more than the state of the whole step.
    sent: list[tuple[Handle, Tensor]] = []
    for ctx in contexts:
        # Not posted any earlier: on links that work in order, sending would wait behind it.
        received = [] if model.stage.first else _receive(model, ctx, pp)
        model.prepare(ctx)
        state = model(ctx, received)
        if model.stage.last:
            states.append(state)
        else:
            leaving = model.boundary(ctx, state)
            sent += [(pp.send(tensor, pp.rank + 1), tensor) for tensor in leaving]
    for handle, _ in sent:
        handle.wait()
    return states if model.stage.last else None


def _receive(model: CausalLM, ctx: ForwardContext, pp: Communicator) -> list[Tensor]:
    if isinstance(pp, EmulatedComm):  # which leaves the buffers as they are
        buffers = model.stand_in(ctx)
    else:
        device = ctx.token_ids.device
        shapes = model.boundary_shapes(ctx)
        buffers = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
    for handle in [pp.receive(buffer, pp.rank - 1) for buffer in buffers]:
        handle.wait()
    return buffers


def bubble_share(stages: int, micro_batches: int) -> float:
    """Share of a step in which a stage has nothing to do, stages being equally fast.

    (S - 1) / (M + S - 1) for S stages and M equal micro-batches: the pipeline fills once and
    drains once a step (Huang et al. 2019, GPipe, section 2.3).
    """
    return (stages - 1) / (micro_batches + stages - 1)
