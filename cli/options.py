"""Option types that several commands share, so that they read the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_OUTPUT = Path("kllm-results")

Model = Annotated[str, typer.Option(help="Preset name, model folder or GGUF file.")]
Scale = Annotated[str, typer.Option(help="Model scale: auto, full, layers:N or tiny.")]
Load = Annotated[str, typer.Option(help="Weights: auto (real ones if any), weights or random.")]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="Dtype of weights: auto, float32, bfloat16, float16.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
