"""Tokenizers and chat templates of model folders."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kllm.config import EngineConfig
from kllm.errors import ConfigError, DataError
from kllm.models import presets
from kllm.models.load import ResolvedModel, resolve
from kllm.models.tokenizer import Tokenizer, load_tokenizer

# Llama 3 style: after a begin token, turns without a default system turn.
BOS = "{{ bos_token }}"
TURNS = (
    "{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Qwen style: a default system turn when none is given.
DEFAULT_TURN = "{% if messages[0].role != 'system' %}<system>hi{{ eos_token }}{% endif %}"
# Llama 2 style: the system message is a part of the first user turn.
FOLDED = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}[{{ messages[0].content }}]"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
REFUSING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "{{ messages[0].content }}"
)
USER = [{"role": "user", "content": "ab"}]


def byte_level_backend() -> Backend:
    """Single bytes as tokens, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return backend


def chat(template: str | None, **options: object) -> Tokenizer:
    return Tokenizer(
        byte_level_backend(), chat_template=template, bos_token="<s>", eos_token="</s>", **options
    )


def rendered(template: str, messages: list[dict[str, str]], **options: bool) -> str:
    tokenizer = chat(template)
    ids = tokenizer.apply_chat_template(messages, **options)
    return "".join(tokenizer.token_bytes(i).decode() or {256: "<s>", 257: "</s>"}[i] for i in ids)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (BOS + TURNS, "<s><user>ab</s><assistant>"),
        (BOS + DEFAULT_TURN + TURNS, "<s><user>ab</s><assistant>"),
        (DEFAULT_TURN + TURNS, "<user>ab</s><assistant>"),
        (FOLDED, "<s>ab"),
        (REFUSING, "ab"),
    ],
    ids=["no default", "begin and default", "default", "folded", "refusing"],
)
def test_a_system_turn_nobody_wrote_is_left_out(template: str, text: str) -> None:
    assert rendered(template, USER) == text


def test_the_default_system_turn_can_be_asked_for() -> None:
    template = DEFAULT_TURN + TURNS
    want = "<system>hi</s><user>ab</s><assistant>"
    assert rendered(template, USER, default_system=True) == want


def test_a_conversation_is_kept_whole() -> None:
    messages = [
        {"role": "system", "content": "S"},
        *USER,
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    want = "<s><system>S</s><user>ab</s><assistant>c</s><user>d</s><assistant>"
    assert rendered(BOS + TURNS, messages) == want


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('no such turn') }}", "refuses the messages: no such turn"),
        ("{% for %}", "refuses the messages"),
        ("{{ messages.append(1) }}", "refuses the messages"),
        ("{{ messages.__class__.__mro__ }}", "refuses the messages"),
    ],
)
def test_a_template_that_cannot_be_used_is_an_error(template: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chat(template).apply_chat_template(USER)


def test_sentencepiece_tokens_give_spaces_and_bytes() -> None:
    vocab = {"<unk>": 0, "▁hello": 1, "<0xF0>": 2, "<0x9F>": 3, "<0x99>": 4, "<0x82>": 5}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    tokenizer = Tokenizer(backend)
    assert b"".join(tokenizer.token_bytes(i) for i in range(1, 6)).decode() == " hello🙂"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(presets.load("llama-3-8b")))
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": BOS + TURNS}
        )
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 3]}))
    return tmp_path


def resolved(folder: Path) -> ResolvedModel:
    config = EngineConfig(model=str(folder), device="cpu", load="random", scale="layers:1")
    return replace(resolve(config), tokenizer=folder)


def test_a_folder_gives_tokenizer_template_and_end_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(resolved(folder))
    assert tokenizer is not None
    assert tokenizer.eos_token_ids == (257, 3)
    assert tokenizer.apply_chat_template(USER)[0] == 256
    assert tokenizer.decode(tokenizer.encode("héy")) == "héy"


def test_a_template_file_wins_and_named_templates_have_a_default(folder: Path) -> None:
    settings = {"chat_template": [{"name": "default", "template": "x"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(resolved(folder)).chat_template == "x"
    (folder / "chat_template.jinja").write_text("y")
    assert load_tokenizer(resolved(folder)).chat_template == "y"


def test_without_generation_config_the_end_tokens_are_the_models(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert load_tokenizer(resolved(folder)).eos_token_ids == (128001,)


def test_a_folder_without_a_tokenizer_has_none(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert load_tokenizer(resolved(folder)) is None


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(folder: Path, file: str) -> None:
    (folder / file).write_text("{")
    with pytest.raises(DataError, match=file):
        load_tokenizer(resolved(folder))
