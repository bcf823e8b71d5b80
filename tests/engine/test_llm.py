"""`kllm.LLM`: answers in the order of the prompts, and nothing left behind."""

from collections.abc import Iterator

import pytest

import kllm
from kllm import LLM, EngineConfig, SamplingParams
from kllm.core import Status
from kllm.errors import ConfigError

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = EngineConfig(model="llama-3-8b", scale="tiny", device="cpu", max_model_len=64)
    with LLM(config) as made:
        yield made


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[5, 6, 7], [8], [9] * 20]
    together = llm.generate(prompts, GREEDY)
    assert [list(r.prompt_ids) for r in together] == prompts
    for prompt, request in zip(prompts, together, strict=True):
        assert llm.generate([prompt], GREEDY)[0].output_ids == request.output_ids
        assert len(request.output_ids) == 4


def test_a_bad_prompt_leaves_nothing_of_the_others_behind(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="prompt is empty"):
        llm.generate([[5], []], GREEDY)
    assert not llm.engine.has_work


def test_text_prompts_need_a_tokenizer(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer; give token ids"):
        llm.generate(["hello"], GREEDY)


def test_closing_aborts_what_is_unfinished() -> None:
    with LLM("llama-3-8b", scale="tiny", device="cpu", max_model_len=64) as llm:
        request = llm.engine.add([5, 6], GREEDY)
    assert request.status is Status.FINISHED


def test_public_names_are_there() -> None:
    for name in kllm.__all__:
        assert getattr(kllm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kllm.nothing
