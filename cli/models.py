"""`kllm models`: what can be run, how large it is, and what of it fits here."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kllm.cli.console import out
from kllm.cli.options import AsJson

if TYPE_CHECKING:
    from kllm.models.catalog import ModelFacts


def models(
    model: Annotated[
        str | None,
        typer.Argument(help="Preset, model folder or GGUF file; default: all presets."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show model sizes, KV cost, and the largest scale that fits this machine."""
    import json
    from dataclasses import asdict

    from kllm.models import catalog, presets

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
        out.print(f"{alias} is short for {name}.", highlight=False)


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
            f"{per_token:,.2f} bytes a token, {m.bytes_per_request[dtype]:,} bytes a request",
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
    return _scaled(number, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")), "")


def size(nbytes: float) -> str:
    """Bytes in decimal units, as checkpoints are published."""
    return _scaled(nbytes, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")), "B")


def _scaled(number: float, units: tuple[tuple[float, str], ...], plain: str) -> str:
    for unit, name in units:
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f} {plain}".rstrip()
