"""Pipeline parallelism: a stage's part of a step, micro-batch by micro-batch.

Each stage receives a micro-batch's state from the stage before, runs its layers, and sends the
result on while it turns to the next micro-batch.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kllm.attention.context import ForwardContext
from kllm.models.base import Stage
from kllm.parallel.communicator import Communicator, Handle
from kllm.parallel.emulated import EmulatedComm, sleep_exactly

WARM_UP_STEPS = 3  # in which kernels may be compiled

Buffers = Callable[[ForwardContext], list[Tensor]]


class StageModel(Protocol):
    """What runs a stage's layers: a network, or captured steps of it. See `CausalLM`."""

    @property
    def stage(self) -> Stage:
        """Which layers."""

    def prepare(self, ctx: ForwardContext) -> None:
        """Plan the step's kernels."""

    def __call__(self, ctx: ForwardContext, received: Sequence[Tensor]) -> Tensor:
        """Run the layers."""

    def boundary(self, ctx: ForwardContext, state: Tensor) -> list[Tensor]:
        """What the next stage has to receive."""

    def receive_buffers(self, ctx: ForwardContext) -> list[Tensor]:
        """Memory for the stage before's `boundary`."""

    def stand_in(self, ctx: ForwardContext) -> list[Tensor]:
        """The same, with plausible values in it."""


def run_stages(
    model: StageModel,
    contexts: Sequence[ForwardContext],
    pp: Communicator,
    buffers: Buffers | None = None,
) -> list[Tensor] | None:
    """Run this rank's stage of a step.

    Args:
        contexts: of the micro-batches, in the same order on all stages.
        pp: the ranks that pass this batch on, in order of their stages.
        buffers: makes what a micro-batch is received in; None: `model.receive_buffers`.

    Returns:
        On the last stage what `model` returned for each micro-batch; else None.
    """
    buffers = buffers or model.receive_buffers
    states = []
    # A buffer must not be used again before it is sent: all are kept until the end of the step,
    # together no more than the state of the whole step.
    sent: list[tuple[Handle, Tensor]] = []
    for ctx in contexts:
        model.prepare(ctx)
        # Not posted any earlier: on links that work in order, sending would wait behind it.
        received = [] if model.stage.first else _receive(pp, buffers(ctx))
        state = model(ctx, received)
        if model.stage.last:
            states.append(state)
        else:
            leaving = model.boundary(ctx, state)
            sent += [(pp.send(tensor, pp.rank + 1), tensor) for tensor in leaving]
    for handle, _ in sent:
        handle.wait()
    return states if model.stage.last else None


def _receive(pp: Communicator, buffers: list[Tensor]) -> list[Tensor]:
    for handle in [pp.receive(buffer, pp.rank - 1) for buffer in buffers]:
        handle.wait()
    return buffers


@dataclass(slots=True)
class _Pace:
    """Times of a micro-batch in steps of one kind."""

    steps: int = 0
    tokens: int = 0  # of the last step
    queue_s: float = float("inf")  # of the host; the least, as it may have to wait for the device
    stage_s: float = 0.0  # of the device, in the last step whose marks were read
    marks: tuple[Any, Any] | None = None  # around the last step


class SlicedStage:
    """A stage whose neighbours are not there, and the time that a step spends on them.

    M micro-batches that take t on each of P stages are done after (M + P - 1) t: the pipeline fills
    and drains once a step (Huang et al. 2019, GPipe, section 2.3). The M t of this stage run; the
    (P - 1) t of the others are waited for.

    t is the time of the device, this stage's transfers included, once the host has queued a
    micro-batch. The hosts of all stages queue at the same time: where that takes longer than the
    device, as in small steps, its M micro-batches count in place of the device's. The device begins
    a captured step, though, only once all of it is queued: there the host's time comes on top.

    A step takes as long as the last one of its kind: of as many micro-batches and, but for a factor
    of two, tokens, captured or not, with prompts or without; t of prompts grows with the tokens. So
    the device waits for the other stages before it begins, and this stage and what follows it are
    queued meanwhile, as on the last stage of a real pipeline. The first steps of a kind are waited
    for by the host.

    The other stages are taken to be like this one, of which t has the layers only. That the first
    embeds and that layers differ is not modelled. Logits and sampling follow where the last stage
    is the one that runs, and are missing where it is another.

    Args:
        clock, sleep: seconds of the host; replaced in tests.
    """

    def __init__(
        self,
        pp: EmulatedComm,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = sleep_exactly,
    ) -> None:
        self._pp, self._clock, self._sleep = pp, clock, sleep
        self._paces: dict[tuple[int, int, bool, bool], _Pace] = {}

    def run(self, model: StageModel, contexts: Sequence[ForwardContext]) -> list[Tensor] | None:
        """Run this stage of a step, on made-up input, so that it ends when all stages would have.

        On the last stage that is the device's end, of work that may still be queued.
        """
        begin, micro, first = self._clock(), len(contexts), contexts[0]
        tokens = sum(len(ctx.token_ids) for ctx in contexts)
        kind = (micro, tokens.bit_length(), first.static, first.decode_only)
        pace = self._paces.setdefault(kind, _Pace())
        known = pace.steps > WARM_UP_STEPS
        # No stage of a layout makes up its input: the time for that is taken off the waiting.
        made_up = [] if model.stage.first else [model.stand_in(ctx) for ctx in contexts]
        received = iter(made_up)
        if pace.marks is not None:
            pace.stage_s = self._pp.between(*pace.marks) / micro
            if not first.decode_only:
                pace.stage_s *= tokens / pace.tokens
        pace.tokens = tokens
        if known:
            others_s = self._others_s(pace, micro, first.static)
            self._pp.pause(max(0.0, others_s - (self._clock() - begin)))
        elif pace.steps == WARM_UP_STEPS:
            # Else the device would wait for the host, and t be too long.
            self._pp.pause(micro * pace.queue_s)
        queueing, marked = self._clock(), self._pp.mark()
        states = run_stages(model, contexts, self._pp, lambda ctx: next(received))
        pace.marks = marked, self._pp.mark()
        pace.steps += 1
        pace.queue_s = min(pace.queue_s, (self._clock() - queueing) / micro)
        if not known:
            pace.stage_s = self._pp.between(*pace.marks) / micro
            end = begin + self._others_s(pace, micro, first.static) + micro * pace.stage_s
            self._sleep(max(0.0, end - self._clock()))
        elif not model.stage.last:
            self._pp.between(*pace.marks)  # nothing else waits for the device
        return states

    def _others_s(self, pace: _Pace, micro: int, captured: bool) -> float:
        """From the step's begin until this stage could begin and never wait, were it the last."""
        host_s = pace.queue_s if captured else micro * max(0.0, pace.queue_s - pace.stage_s)
        return host_s + (self._pp.size - 1) * pace.stage_s
