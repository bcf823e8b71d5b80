"""Model families, their presets, and reading or making their weights."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kllm.registry import Registry

if TYPE_CHECKING:  # importing a family imports torch, which listing the names must not
    from kllm.models.base import Family


def _llama() -> "Family":
    import kllm.models.llama as family

    return family


def _deepseek_v4() -> "Family":
    import kllm.models.deepseek_v4 as family

    return family


def _glm_moe_dsa() -> "Family":
    import kllm.models.glm_moe_dsa as family

    return family


MODELS: "Registry[Callable[[], Family]]" = Registry(
    "model type",
    {
        "llama": _llama,
        "deepseek_v4": _deepseek_v4,
        "glm_moe_dsa": _glm_moe_dsa,
        "deepseek_v3": _glm_moe_dsa,  # the same layers without the indexer
        "deepseek_v32": _glm_moe_dsa,  # the same layers, an indexer in each
    },
)
