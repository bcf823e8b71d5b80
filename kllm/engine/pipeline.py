"""Pipeline parallelism: a stage's part of a step, micro-batch by micro-batch.

Each stage receives a micro-batch's state from the stage before, runs its layers, and sends the
result on while it turns to the next micro-batch.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

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


class SlicedStage:
    """A stage whose neighbours are not there, and the time that a step spends on them.

    M micro-batches that take t on each of P stages are done after (M + P - 1) t: the pipeline fills
    and drains once a step (Huang et al. 2019, GPipe, section 2.3). The M t of this stage run; the
    (P - 1) t of the others are waited for.

    t is the time of the device, this stage's transfers included, once the host has queued a
    micro-batch. The hosts of all stages queue at the same time: where that takes longer than the
    device, as in small steps, it counts for one stage only. To see t there, the device is held up
    for as long as the host needs. The device begins a captured step, though, only once all of it
    is queued: there the host's time comes on top.

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
        # Steps of one micro-batch, by whether they are captured, and the time of queueing one: the
        # least, as the host may have to wait for the device it holds up.
        self._steps: Counter[bool] = Counter()
        self._queue_s = {False: float("inf"), True: float("inf")}

    def run(self, model: StageModel, contexts: Sequence[ForwardContext]) -> list[Tensor] | None:
        """Run this stage of a step, on made-up input; ends when all stages would have."""
        micro, alone = len(contexts), len(contexts) == 1
        captured = contexts[0].static
        begin = self._clock()
        # Before the time that counts: no stage of a layout makes up its input.
        made_up = [] if model.stage.first else [model.stand_in(ctx) for ctx in contexts]
        received = iter(made_up)
        if alone and self._steps[captured] >= WARM_UP_STEPS:
            self._pp.pause(self._queue_s[captured])
        queueing = self._clock()
        first = self._pp.mark()
        states = run_stages(model, contexts, self._pp, lambda ctx: next(received))
        last = self._pp.mark()
        queue_s = (self._clock() - queueing) / micro
        if alone:
            self._steps[captured] += 1
            self._queue_s[captured] = queue_s = min(self._queue_s[captured], queue_s)
        stage_s = self._pp.between(first, last) / micro
        own_s = queue_s + stage_s if captured else micro * max(queue_s, stage_s)
        whole_s = own_s + (self._pp.size - 1) * stage_s
        self._sleep(max(0.0, begin + whole_s - self._clock()))
        return states
