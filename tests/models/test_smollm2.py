"""The small real model: GGUF loader, tokenizer and attention give its known answer."""

from pathlib import Path

import pytest
import torch

from kllm.config import EngineConfig
from kllm.errors import DataError, DependencyError
from kllm.models.base import Groups
from kllm.models.gguf import packaged_smollm2, undo_rotary_pairs
from kllm.models.load import ResolvedModel, load_model, resolve
from kllm.models.tokenizer import Tokenizer, load_tokenizer
from tests.models.harness import Harness

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT_IDS = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def resolved() -> ResolvedModel:
    try:
        packaged_smollm2()
    except DependencyError as error:
        pytest.skip(str(error))
    return resolve(EngineConfig(model="smollm2-135m", device="cpu", dtype="float32"))


@pytest.fixture(scope="module")
def tokenizer(resolved: ResolvedModel) -> Tokenizer:
    tokenizer = load_tokenizer(resolved)
    assert tokenizer is not None
    return tokenizer


def test_chat_prompt_has_the_known_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.apply_chat_template(QUESTION) == PROMPT_IDS


def test_the_default_system_turn_appears_only_when_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template(QUESTION, default_system=True)
    assert ids[-len(PROMPT_IDS) :] == PROMPT_IDS
    assert tokenizer.decode(ids).startswith(f"system\n{DEFAULT_SYSTEM}\nuser\n")


def test_a_given_system_turn_stays(tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}, *QUESTION])
    assert tokenizer.decode(ids).startswith("system\nBe brief.\nuser\n")
    assert ids[-len(PROMPT_IDS) :] == PROMPT_IDS


def test_greedy_answer_is_the_known_text(resolved: ResolvedModel, tokenizer: Tokenizer) -> None:
    model = load_model(
        resolved, device=torch.device("cpu"), dtype=torch.float32, groups=Groups.single()
    )
    harness = Harness(model, page_size=16, max_len=64)
    answer, fed = [], PROMPT_IDS
    while len(answer) < 12:
        fed = [int(harness.step({0: fed})[0][-1].argmax())]
        if fed[0] in tokenizer.eos_token_ids:
            break
        answer += fed
    assert tokenizer.decode(answer) == "The capital of France is Paris."


TEXTS = ["naïve 1234 café", "日本語 and 🙂🙃", "  two  spaces\n\n\ttab", "a<|im_end|>b"]


@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    joined = b"".join(tokenizer.token_bytes(i) for i in ids).decode()
    assert joined == tokenizer.decode(ids) == text.replace("<|im_end|>", "")


def test_each_digit_is_a_token(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("2026")] == [b"2", b"0", b"2", b"6"]


def test_tokenizer_facts(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.token_bytes(2) == b""
    assert tokenizer.token_bytes(60000) == b""


def test_manifest_counts_what_the_file_holds(resolved: ResolvedModel) -> None:
    tensors = list(resolved.family.manifest(resolved.config))
    assert len(tensors) == 272
    assert sum(t.parameters for t in tensors) == 134_515_008


def test_rotary_pairs_are_put_back() -> None:
    """Two heads of 6 rows, stored as pairs (0, 3), (1, 4), (2, 5) of each head."""
    stored = torch.tensor([0, 3, 1, 4, 2, 5, 10, 13, 11, 14, 12, 15]).unsqueeze(1).numpy()
    rows = undo_rotary_pairs(stored, heads=2)[:, 0].tolist()
    assert rows == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]


def test_a_truncated_file_is_refused(resolved: ResolvedModel, tmp_path: Path) -> None:
    assert resolved.weights is not None
    cut = tmp_path / "cut.gguf"
    with resolved.weights.open("rb") as file:
        cut.write_bytes(file.read(3_000_000))
    with pytest.raises(DataError, match="it may be truncated"):
        resolve(EngineConfig(model=str(cut), device="cpu"))
