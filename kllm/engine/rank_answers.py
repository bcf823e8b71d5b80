"""Steps of a layout's ranks, from a rank's side: what it keeps from one to the next."""

from kllm.core import Request
from kllm.engine.rank_protocol import Runner, Sampled, Step
from kllm.engine.step_codec import StepCodec


class StepAnswers:
    """Answers the steps that `RankSteps` tells one rank, from the first one on.

    Args:
        runner: who runs them: the rank, or who stands in for it.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._codec = StepCodec()
        self._known: dict[str, Request] = {}
        self._requests: tuple[Request, ...] = ()  # sampled here in the last step

    def answer(self, message: Step) -> Sampled:
        """Run a step; what was sampled here."""
        if message.requests is not None:
            self._requests = tuple(
                self._known[item] if isinstance(item, str) else item for item in message.requests
            )
            self._known = {request.id: request for request in self._requests}
        outcome = self._runner.run(self._codec.unpack(message.plan), self._requests)
        if len(outcome.token_ids):
            for request, token in zip(self._requests, outcome.token_ids.tolist(), strict=True):
                request.output_ids.append(token)
        return Sampled(outcome.token_ids.tobytes(), outcome.logprobs, outcome.run_s)
