"""kLLM: benchmark and tune deployments of large MoE language models."""

from typing import Any

from kllm.config import EngineConfig
from kllm.core import SamplingParams
from kllm.errors import KllmError

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "KllmError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # The engine imports torch, which takes seconds; the command line's help must not wait for it.
    if name == "LLM":
        from kllm.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'kllm' has no attribute '{name}'")
