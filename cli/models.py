"""`kllm models`: what can be run, how large it is, and what of it fits here."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kllm.cli.console import out, say
from kllm.cli.models_layout import exact, print_deployment, scaled, size
from kllm.cli.options import AsJson, given_options

if TYPE_CHECKING:
    from kllm.models.catalog import ModelFacts


def models(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Preset, model folder or GGUF file; default: all presets."),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="Layout to compute, as in tp=8 or dp=8,ep=8."),
    ] = None,
    gpu: Annotated[str, typer.Option(help="GPU of a layout: h100, h200, b200 or b300.")] = "h200",
    memory_gb: Annotated[
        float,
        typer.Option(min=0, max=1e6, help="Memory of that GPU in GB (1e9 bytes); 0: as made."),
    ] = 0,
    memory_fraction: Annotated[
        float, typer.Option(min=0, max=1, help="Share of that memory for weights and KV.")
    ] = 0.9,
    link: Annotated[
        str, typer.Option(help="Link between ranks: a name or LATENCY_S:BYTES_PER_S.")
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(help="Weights of a layout: stored (as released) or a dtype.")
    ] = "stored",
    kv_dtype: Annotated[str, typer.Option(help="KV dtype of a layout, fp8 or a dtype.")] = "fp8",
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of a prefill step.")] = 8192,
    cached: Annotated[int, typer.Option(min=0, help="Tokens of the prompt before them.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Requests of a decode step.")] = 64,
    as_json: AsJson = False,
) -> None:
    """Show model sizes and what fits here; with --layout what each rank holds and sends."""
    import json
    from dataclasses import asdict

    from kllm.errors import ConfigError
    from kllm.models import catalog, presets

    if layout is not None:
        from kllm.models.deployment import Device, Load, deployment
        from kllm.parallel.gpus import GPUS
        from kllm.parallel.layout import parse
        from kllm.parallel.link import parse_link

        if model is None:
            raise ConfigError("--layout needs a model; name one, as in `kllm models glm-5.2 ...`")
        preset = GPUS[gpu]
        device = Device(
            name=gpu,
            memory_bytes=memory_gb * 1e9 or preset.memory_bytes,
            memory_bytes_per_s=preset.memory_bytes_per_s,
            matmul_flops=preset.matmul_flops,
            link=preset.peers if link == "auto" else parse_link(link),
        )
        computed = deployment(
            model,
            parse(layout),
            device,
            Load(tokens=tokens, cached=cached, batch=batch),
            memory_fraction=memory_fraction,
            dtype=dtype,
            kv_dtype=kv_dtype,
        )
        if as_json:
            typer.echo(json.dumps(asdict(computed), indent=1))
        else:
            print_deployment(computed, memory_fraction)
        return
    if unused := given_options(ctx) - {"model", "--json"}:
        options = ", ".join(sorted(unused))
        raise ConfigError(f"{options}: for layouts only; add one, as in `--layout dp=8,ep=8`")
    found = catalog.all_presets() if model is None else [catalog.facts(model)]
    if as_json:
        document = {"models": [asdict(facts) for facts in found], "aliases": presets.ALIASES}
        typer.echo(json.dumps(document, indent=1))
        return
    if model is not None:
        out.print(_details(found[0]))
        return
    out.print(_table(found))
    for alias, name in presets.ALIASES.items():
        say(out, f"{alias} is short for {name}.")


def _table(found: "list[ModelFacts]") -> Any:
    from rich import box
    from rich.table import Table

    table = Table(caption=_caption(found[0]), caption_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    for column in ("params", "active", "disk", "KV/token"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for m in found:
        table.add_row(
            m.name,
            count(m.parameters),
            count(m.active_parameters),
            size(m.checkpoint_bytes),
            size(m.kv_bytes_per_token["bfloat16"]),
            m.fit.scale,
        )
    return table


def _caption(facts: "ModelFacts") -> str:
    fit = facts.fit
    return (
        f"active: parameters a token uses. KV/token in bfloat16. fits: the largest scale on this "
        f"{fit.device} in {fit.dtype}. More of one model: `kllm models MODEL`."
    )


def _details(m: "ModelFacts") -> Any:
    from rich.table import Table

    table = Table(m.name, "")
    table.add_row("layers", f"{m.layers}")
    table.add_row("parameters", f"{m.parameters:,}")
    if m.mtp_parameters:
        table.add_row("parameters of the MTP head", f"{m.mtp_parameters:,}")
    table.add_row("active a token", f"{m.active_parameters:,}")
    table.add_row("checkpoint", f"{m.tensors:,} tensors, {m.checkpoint_bytes:,} bytes")
    table.add_row("positions", f"{m.max_position:,}")
    for dtype, per_token in m.kv_bytes_per_token.items():
        table.add_row(
            f"KV in {dtype}",
            f"{exact(per_token)} bytes a token, {m.bytes_per_request[dtype]:,} bytes a request",
        )
    fit = m.fit
    table.add_row(
        "fits here",
        f"scale {fit.scale} in {fit.dtype} on {fit.device}: {size(fit.weight_bytes)} of weights "
        f"and {fit.context_tokens:,} tokens of KV",
    )
    return table


def count(number: int) -> str:
    """A large count in the units of the field: 135 M, 284 B."""
    return scaled(number, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")), "")
