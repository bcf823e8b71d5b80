"""Options that several commands share, so that they read the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

from kllm.errors import ConfigError

DEFAULT_OUTPUT = Path("kllm-results")
MOST = 1 << 24  # of what an option counts; more is a slip of the keys

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
KvDtype = Annotated[str, typer.Option(help="Dtype of the KV cache: auto, a dtype, or fp8.")]
Repeats = Annotated[int, typer.Option(min=1, help="Measurements of each point.")]
Seed = Annotated[int, typer.Option(help="Seed of weights, lengths and prompts.")]
Output = Annotated[Path, typer.Option(help="Result file (.json), or the folder for it.")]
ExpertPlacement = Annotated[
    str,
    typer.Option(
        help="Result file of `bench expert-balance`, by whose routing experts are placed; "
        "empty: in order."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def given_options(ctx: typer.Context) -> frozenset[str]:
    """The options that stand on the command line, as in "--model"."""
    named = {param.name: param.opts[0] for param in ctx.command.params if param.name}
    sources = {option: ctx.get_parameter_source(name) for name, option in named.items()}
    return frozenset(o for o, source in sources.items() if source and source.name == "COMMANDLINE")


def integers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers as in 1,4,16; what is repeated counts once.

    Raises:
        ConfigError: naming the option, for anything else and for numbers beyond MOST.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} takes whole numbers as in 1,4,16, got '{text}'") from None
    if max(found) > MOST:
        raise ConfigError(f"{option} takes numbers up to {MOST}, got {max(found)}")
    return tuple(dict.fromkeys(found))


def lengths(option: str, text: str) -> tuple[int, ...]:
    """Numbers of tokens as in 512,32K,1M, where K and M are powers of 1024; repeated ones once.

    Raises:
        ConfigError: naming the option, for anything else.
    """
    units = {"K": 1 << 10, "M": 1 << 20}
    try:
        found = [
            int(part[:-1]) * units[part[-1]] if part[-1] in units else int(part)
            for part in names(text.upper())
        ]
    except ValueError:
        raise ConfigError(f"{option} takes tokens as in 512,32K,1M, got '{text}'") from None
    return tuple(dict.fromkeys(found))


def names(text: str) -> tuple[str, ...]:
    """Words as in a,b; repeated ones once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
