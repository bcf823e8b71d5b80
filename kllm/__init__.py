"""kLLM: benchmark and tune deployments of large MoE language models."""

from kllm.errors import KllmError

__version__ = "0.1.0"
__all__ = ["KllmError", "__version__"]
