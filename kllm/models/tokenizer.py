"""Text to token ids and back, and chat prompts, from a model folder or a GGUF file."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from kllm.errors import ConfigError, DataError
from kllm.models.gguf import GGUFFile
from kllm.models.load import ResolvedModel

_CONTROL = 3  # GGUF token type of tokens that are never text
_PROBE = "kllm-system-probe"


class Tokenizer:
    """A vocabulary, its chat template and the tokens that end a text.

    Args:
        backend: a `tokenizers.Tokenizer`.
        chat_template: Jinja source; None for models that were not trained to chat.
        bos_token, eos_token: their texts, which templates may refer to.
        eos_token_ids: tokens that end an answer.
    """

    def __init__(
        self,
        backend: Any,
        *,
        chat_template: str | None = None,
        bos_token: str = "",
        eos_token: str = "",
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._backend = backend
        self.chat_template = chat_template
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.eos_token_ids = eos_token_ids

    @property
    def vocab_size(self) -> int:
        """Tokens known, added ones included."""
        return int(self._backend.get_vocab_size())

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text, after what the model wants before it (if `add_special`)."""
        return list(self._backend.encode(text, add_special_tokens=add_special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; special tokens give no text, broken UTF-8 gives U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that mark structure and give no text."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; a character may be spread over several tokens."""
        if token_id in self.special_ids:
            return b""
        token = self._backend.id_to_token(token_id)
        if token is None:  # padding rows of the embedding
            return b""
        if token_id in self._backend.get_added_tokens_decoder():
            return str(token).encode()
        if self._byte_level:
            return bytes(_BYTE_OF[c] for c in token)
        if len(token) == 6 and token.startswith("<0x"):
            return bytes([int(token[3:5], 16)])
        return str(token).replace("\u2581", " ").encode()

    @cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self._backend.to_str())["decoder"])

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, default_system: bool = False
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Some templates add a system turn of their own when the conversation has none. It is left
        out unless `default_system`: the model sees what the user wrote and nothing else.

        Raises:
            ConfigError: when the model has no chat template, or it refuses the messages.
        """
        text = self._render(messages)
        if not default_system and messages and messages[0]["role"] != "system":
            text = self._without_default_system(text, messages)
        return self.encode(text, add_special=False)

    def _without_default_system(self, text: str, messages: Sequence[Mapping[str, str]]) -> str:
        """`text` less the system turn that nobody wrote, where the template works that way.

        The turns as they follow an explicit system turn are what has to remain.
        """
        probe = {"role": "system", "content": _PROBE}
        try:
            turn = self._render([probe], generate=False)
            whole = self._render([probe, *messages])
        except ConfigError:  # a template without system turns cannot have added one
            return text
        rest = whole.removeprefix(turn)
        if rest == whole or not text.endswith(rest):
            return text
        starts = text.startswith(self.bos_token) and not rest.startswith(self.bos_token)
        return (self.bos_token if starts else "") + rest

    def _render(self, messages: Sequence[Mapping[str, str]], generate: bool = True) -> str:
        import jinja2

        if self.chat_template is None:
            raise ConfigError("this model has no chat template; give the prompt as raw text")
        try:
            text = self._template.render(
                messages=list(messages),
                add_generation_prompt=generate,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
            )
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template refuses the messages: {error}") from None
        return str(text)

    @cached_property
    def _template(self) -> Any:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        # A template is a program from the model's author: it runs sandboxed. The settings are
        # the ones that published templates are written for.
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        env.globals["raise_exception"] = refuse
        return env.from_string(self.chat_template or "")


def load_tokenizer(resolved: ResolvedModel) -> Tokenizer | None:
    """The model's tokenizer; None for models without one (presets with random weights).

    Raises:
        DataError: when its files cannot be read.
        ConfigError: when a GGUF file has a kind of tokenizer that is not supported.
    """
    path = resolved.tokenizer
    if path is None:
        return None
    if path.is_file():
        return _from_gguf(GGUFFile(path))
    if not (path / "tokenizer.json").exists():
        return None
    return _from_folder(path, resolved.config.eos_token_ids)


def _from_folder(folder: Path, eos_token_ids: tuple[int, ...]) -> Tokenizer:
    import tokenizers

    file = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise DataError(f"{file} cannot be read as a tokenizer: {error}") from None
    settings = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    template = settings.get("chat_template")
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text("utf-8")
    if isinstance(template, list):  # several named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    eos = generation.get("eos_token_id", eos_token_ids)
    return Tokenizer(
        backend,
        chat_template=template,
        bos_token=_token_text(settings.get("bos_token")),
        eos_token=_token_text(settings.get("eos_token")),
        eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else (eos,),
    )


def _token_text(token: Any) -> str:
    """A token of tokenizer_config.json: its text, or an object with `content`, or null."""
    return str(token.get("content", "")) if isinstance(token, dict) else token or ""


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        data = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON: {error}") from None
    return data if isinstance(data, dict) else {}


def _from_gguf(file: GGUFFile) -> Tokenizer:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    kind = (file.metadata("tokenizer.ggml.model"), file.metadata("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ConfigError(f"{file.path}: tokenizer {kind} is not supported; only gpt2, smollm")
    tokens = file.metadata("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in file.metadata("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    types = file.metadata("tokenizer.ggml.token_type")
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])

    def text(key: str) -> str:
        token_id = file.metadata(f"tokenizer.ggml.{key}_token_id")
        return "" if token_id is None else str(tokens[token_id])

    eos = file.metadata("tokenizer.ggml.eos_token_id")
    return Tokenizer(
        backend,
        chat_template=file.metadata("tokenizer.chat_template"),
        bos_token=text("bos"),
        eos_token=text("eos"),
        eos_token_ids=() if eos is None else (eos,),
    )


def _byte_table() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE (Radford et al. 2019): character to byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    table = {chr(b): b for b in printable}
    return table | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_table()
