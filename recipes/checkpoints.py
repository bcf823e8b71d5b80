"""What another engine is given as the model, and how that differs from what kLLM ran."""

from pathlib import Path

from kllm.config import EngineConfig
from kllm.models import presets
from kllm.recipes.translation import SAME, Translation

REPOSITORIES = {  # on Hugging Face, by preset: the released weights that it is the config of
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "deepseek-v3.2": "deepseek-ai/DeepSeek-V3.2",
    "deepseek-v4-flash": "deepseek-ai/DeepSeek-V4-Flash",
    "deepseek-v4-flash-0731": "deepseek-ai/DeepSeek-V4-Flash-0731",
    "deepseek-v4-pro": "deepseek-ai/DeepSeek-V4-Pro",
    "deepseek-v4-pro-0813": "deepseek-ai/DeepSeek-V4-Pro-0813",
    "glm-5.2": "zai-org/GLM-5.2-FP8",
    "glm-5.2-bf16": "zai-org/GLM-5.2",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
}
BUNDLED = ("smollm2-135m",)  # presets that run with real weights
PLACEHOLDER = "PATH_OF_MODEL"


def preset(model: str) -> str:
    """The preset that a recipe's model names; "" where it is a folder or a file."""
    name = presets.ALIASES.get(model.lower(), model.lower())
    return "" if Path(model).expanduser().exists() or name not in presets.names() else name


def served(model: str) -> tuple[str, Translation]:
    """The model's name on a command line, and what is to be said of it."""
    name = preset(model)
    if name in REPOSITORIES:
        return REPOSITORIES[name], SAME
    if not name and (model.endswith(".gguf") or "/" in model or Path(model).exists()):
        return model, SAME
    what = "the preset has no released weights" if name else "it is no preset, folder or file here"
    return PLACEHOLDER, Translation(
        missing=f"{model}: {what}; write the folder or Hugging Face name of its weights in place "
        f"of {PLACEHOLDER}"
    )


def dtype(value: str, config: EngineConfig) -> Translation:
    """The rule for the model's dtype, whose flag every engine has."""
    flags = () if value == "auto" else (("--dtype", value),)
    name = preset(config.model)
    stored = presets.load(name).get("quantization_config") if name else None
    if stored is None:
        return Translation(flags=flags)
    return Translation(
        flags=flags,
        approximate=f"kLLM holds weights in this dtype; the checkpoint's are quantised "
        f"({stored['quant_method']}) and the engine multiplies them as they are stored, with less "
        "memory and at another speed",
    )


def load(value: str, config: EngineConfig) -> Translation:
    """The rule for where weights come from, but for the file formats that an engine reads."""
    if value == "random":
        return Translation(flags=(("--load-format", "dummy"),))
    name = preset(config.model)
    if not name or name in BUNDLED:
        return SAME
    return Translation(
        approximate="the recipe ran with random weights, the command loads the released ones: "
        "the text differs, and in an MoE model which experts are chosen, and how evenly"
    )
