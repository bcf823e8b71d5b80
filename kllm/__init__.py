"""kLLM: benchmark and tune deployments of large MoE language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kllm.config import EngineConfig
    from kllm.core import SamplingParams
    from kllm.engine.llm import LLM
    from kllm.errors import KllmError

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "KllmError", "SamplingParams", "__version__"]

# Loaded when first used: torch takes seconds, and the command line's help must not wait for it.
_HOMES = {
    "LLM": "kllm.engine.llm",
    "EngineConfig": "kllm.config",
    "KllmError": "kllm.errors",
    "SamplingParams": "kllm.core",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kllm' has no attribute '{name}'")
