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
Layout = Annotated[
    str,
    typer.Option(help="Parallel layout: tp=2,dp=4,ep=8 or cp=4,cp_kind=ring; empty: 1 rank."),
]
Fidelity = Annotated[
    str,
    typer.Option(help="real: all ranks run; rank-slice: one rank of the layout on one device."),
]
LinkName = Annotated[
    str,
    typer.Option(
        "--link", help="Link of a rank-slice: nvlink4, pcie5, ..., measured, or SECONDS:BYTES/S."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
