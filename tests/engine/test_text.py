"""Text, token ids, log probabilities and usage tell the same story, whole or streamed.

The network is replaced by an executor that says what each request's prompt spells, byte by byte.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kllm.config import EngineConfig, SchedulerConfig
from kllm.core import FinishReason, Outcome, Plan, Request, SamplingParams, TokenLogprobs
from kllm.engine.engine import Engine
from kllm.engine.executor import Sharing
from kllm.engine.memory import KVBudget
from kllm.errors import WorkerError

SMILE = "\U0001f600"
CONFIG = EngineConfig(
    model="llama-3-8b",
    scale="tiny",
    device="cpu",
    scheduler=SchedulerConfig(max_batch=4, token_budget=16),
)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class Script:
    """Says the text of each prompt id, one byte a token."""

    run_s = 0.0

    def __init__(self, *texts: str) -> None:
        self.texts = [text.encode() for text in texts]
        self.broken = False
        budget = KVBudget(
            num_pages=64,
            page_size=4,
            max_batch=4,
            max_model_len=64,
            kv_dtype="float32",
            rewind_tokens=0,
        )
        self.sharing = Sharing(budget, groups=1, stripes=None, cp_kind="auto")

    def execute(self, plans: Sequence[Plan | None]) -> list[Outcome | None]:
        if self.broken:
            raise WorkerError("a rank died")
        (plan,) = plans
        assert plan is not None
        asked = [r for r, yes in zip(plan.requests, plan.samples, strict=True) if yes]
        tokens = [self.texts[r.prompt_ids[0]][len(r.output_ids)] for r in asked]
        logprobs = [TokenLogprobs(token, -float(token)) for token in tokens]
        return [Outcome(np.array(tokens, np.int64), list(logprobs))]

    def close(self) -> None:
        """There is nothing to free."""


@pytest.fixture(autouse=True)
def byte_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kllm.engine.engine.load_tokenizer", lambda resolved: Bytes())


def params(**options: object) -> SamplingParams:
    values = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, "logprobs": 0, **options}
    return SamplingParams(**values)  # type: ignore[arg-type]


def answer(text: str, **options: object) -> Request:
    engine = Engine(CONFIG, executor=Script(text))
    request = engine.add([0], params(**options), detokenize=True)
    while engine.has_work:
        engine.step()
    assert engine.free_pages == engine.budget.num_pages
    assert [entry.token_id for entry in request.logprobs] == request.output_ids
    return request


def pieces(text: str, **options: object) -> Iterator[str]:
    engine = Engine(CONFIG, executor=Script(text))
    return engine.stream(engine.add([0], params(**options), detokenize=True))


def test_stop_string_ends_text_ids_and_logprobs_at_the_same_token() -> None:
    request = answer("one two three", stop=("thr", "wo t"))
    assert request.text == "one t"
    assert bytes(request.output_ids).decode() == "one t"
    assert request.finish_reason is FinishReason.STOP


def test_stop_string_at_the_last_allowed_token_is_a_stop() -> None:
    request = answer("abcdef", stop=("cd",), max_tokens=4)
    assert (request.text, request.finish_reason) == ("ab", FinishReason.STOP)


def test_text_held_for_a_stop_string_comes_when_the_output_ends() -> None:
    request = answer("abcdef", stop=("def",), max_tokens=5)
    assert (request.text, request.finish_reason) == ("abcde", FinishReason.LENGTH)


def test_stop_token_is_counted_and_has_no_text() -> None:
    request = answer("ab.cd", stop_token_ids=(ord("."),))
    assert (request.text, bytes(request.output_ids)) == ("ab", b"ab.")
    assert request.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_output_that_ends_inside_a_character_loses_it_streamed_or_not(max_tokens: int) -> None:
    text = f"a{SMILE}b{SMILE}"
    want = text.encode()[:max_tokens].decode(errors="ignore")
    assert answer(text, max_tokens=max_tokens).text == want
    assert "".join(pieces(text, max_tokens=max_tokens)) == want


@pytest.mark.parametrize("stop", [(), ("d e",), ("abc",), (f"{SMILE}",), ("z",)])
def test_streamed_text_equals_the_whole(stop: tuple[str, ...]) -> None:
    text = f"abc d ef {SMILE} gh"
    size = len(text.encode())
    whole = answer(text, stop=stop, max_tokens=size).text
    assert "".join(pieces(text, stop=stop, max_tokens=size)) == whole


def test_closing_a_stream_aborts_its_request_and_no_other() -> None:
    engine = Engine(CONFIG, executor=Script("x" * 40, "y" * 40))
    other = engine.add([1], params(max_tokens=9), detokenize=True)
    request = engine.add([0], params(), detokenize=True)
    stream = engine.stream(request)
    assert next(stream) == "x"
    stream.close()  # type: ignore[attr-defined]
    assert request.finish_reason is FinishReason.ABORT
    while engine.has_work:
        engine.step()
    assert other.text == "y" * 9


def test_a_failed_step_loses_no_request_and_no_token() -> None:
    script = Script("steady on", "all well.")
    engine = Engine(CONFIG, executor=script)
    requests = [engine.add([i], params(max_tokens=9), detokenize=True) for i in range(2)]
    for step in range(4):
        script.broken = step % 2 == 1
        if script.broken:
            with pytest.raises(WorkerError):
                engine.step()
        else:
            engine.step()
    script.broken = False
    while engine.has_work:
        engine.step()
    assert [r.text for r in requests] == ["steady on", "all well."]
