"""`kllm.LLM`: the engine as a Python call, for scripts and notebooks."""

from collections.abc import Iterator, Sequence
from typing import Any

from kllm.config import EngineConfig
from kllm.core import Request, SamplingParams
from kllm.engine.engine import Engine

Prompt = str | Sequence[int]


class LLM:
    """A model that answers prompts.

    Args:
        model: preset name, model folder or GGUF file, or a whole `EngineConfig`.
        options: other fields of `EngineConfig`.

    Raises:
        KllmError: when the engine cannot be set up; the message says what to change.
    """

    def __init__(self, model: str | EngineConfig, **options: Any) -> None:
        config = model if isinstance(model, EngineConfig) else EngineConfig(model=model, **options)
        self.engine = Engine(config)

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Request]:
        """Answer all prompts together; requests in their order, with `text` and `output_ids`.

        Texts are taken as they are (no chat template). Text prompts give text; token ids give
        token ids only, so that models without a tokenizer can run.

        Raises:
            ConfigError: a prompt that cannot be run; none of them is then.
        """
        requests: list[Request] = []
        try:
            for prompt in prompts:
                # One by one: those before a bad prompt must be known when it raises.
                requests.append(self._add(prompt, params or SamplingParams()))  # noqa: PERF401
            while self.engine.has_work:
                self.engine.step()
        finally:  # after an error or Ctrl-C nothing of this call may linger in the engine
            for request in requests:
                self.engine.abort(request.id)
        return requests

    def stream(self, prompt: str, params: SamplingParams | None = None) -> Iterator[str]:
        """The answer to one prompt, piece by piece as it is made."""
        return self.engine.stream(self._add(prompt, params or SamplingParams()))

    def close(self) -> None:
        """Free the engine's memory."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _add(self, prompt: Prompt, params: SamplingParams) -> Request:
        if isinstance(prompt, str):
            ids = self.engine.tokenizer.encode(prompt)
            return self.engine.add(ids, params, detokenize=True)
        return self.engine.add(prompt, params)
