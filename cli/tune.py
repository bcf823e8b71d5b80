"""`kllm tune`: find the best engine settings for a model, a workload and this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kllm.cli.console import err, interrupted
from kllm.cli.options import (
    DEFAULT_OUTPUT,
    AsJson,
    Device,
    Dtype,
    LinkName,
    Scale,
    given_options,
)
from kllm.cli.tune_output import end

if TYPE_CHECKING:
    from kllm.tuners.setup import Request
    from kllm.tuners.tune import Options


def tune(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Preset name, model folder or GGUF file; not with --resume.")
    ] = None,
    scale: Scale = "auto",
    workload: Annotated[
        str | None,
        typer.Option(help="Load: chat (default), long-context, agent or batch."),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks of a layout; default: the GPUs present, or 1."),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="The only layout, as tp=2,dp=4,ep=8; default: all of --world.")
    ] = "",
    fidelity: Annotated[
        str | None,
        typer.Option(
            help="real: all ranks run; rank-slice: one of them; default: real if GPUs suffice."
        ),
    ] = None,
    link: LinkName = "nvlink4",
    isl: Annotated[str, typer.Option(help="Prompt tokens, as 512 or 256-768.")] = "",
    osl: Annotated[str, typer.Option(help="Output tokens, as 128 or 64-192.")] = "",
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests in flight, with --isl and --osl.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests of a trial; default: as many as take 5 s.")
    ] = None,
    objective: Annotated[
        list[str] | None,
        typer.Option(help="goodput (default), throughput or latency; several give a Pareto front."),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(help="Limits, as ttft=2s,tpot=50ms (the default of goodput)."),
    ] = None,
    trials: Annotated[
        int, typer.Option(min=1, help="Trials of the study, over all its runs.")
    ] = 24,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which no trial is begun.")
    ] = None,
    trial_timeout: Annotated[
        float | None, typer.Option(min=1, help="Seconds of one trial; default: by a pilot run.")
    ] = None,
    storage: Annotated[
        str,
        typer.Option(
            help="journal:PATH or the URL of a database, which several processes may share; "
            "default: a journal in --output."
        ),
    ] = "",
    study: Annotated[str, typer.Option(help="Study name; default: a new one.")] = "",
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue --study, or the newest, with its own options."),
    ] = False,
    fix: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Pin a parameter.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for results.")] = DEFAULT_OUTPUT,
    seed: Annotated[int, typer.Option(help="Seed of weights, load and search.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Find the best engine settings for a model, a load and this machine."""
    asked = locals()  # before any other name is bound
    from kllm.cli.tune_view import view
    from kllm.tuners.tune import tune as run

    request, options = _request(asked), _options(asked)
    try:
        with view(err) as watcher:
            tuned = run(request, options, watcher=watcher)
    except KeyboardInterrupt:
        raise interrupted("interrupted before a trial was begun") from None
    end(tuned, _where(storage, output), as_json=as_json)


def _request(asked: dict[str, Any]) -> "Request":
    """What to search.

    Args:
        asked: the parameters of `tune`.

    Raises:
        ConfigError: no model, two loads, or what the engine's config refuses.
    """
    from kllm.config import EngineConfig
    from kllm.errors import ConfigError
    from kllm.tuners.resume import STORED
    from kllm.tuners.setup import Request, default_world

    lengths = asked["isl"] or asked["osl"] or asked["concurrency"] is not None
    if asked["model"] is None and not asked["resume"]:
        raise ConfigError("there is nothing to tune; name a model with --model, or use --resume")
    if asked["workload"] is not None and lengths:
        raise ConfigError(
            "--workload and --isl/--osl/--concurrency both say what the load is; give one of them"
        )
    engine = {name: asked[name] for name in ("scale", "device", "dtype", "seed", "link")}
    same = {name: asked[name] for name in ("isl", "osl", "concurrency", "slo", "seed", "layout")}
    return Request(
        config=EngineConfig(model=asked["model"] or STORED, **engine),
        workload=asked["workload"] or "chat",
        num_requests=asked["requests"],
        objectives=tuple(asked["objective"] or ()),
        fixed=tuple(asked["fix"] or ()),
        world=asked["world"] or (1 if asked["layout"] else default_world(asked["device"])),
        fidelity=asked["fidelity"] or "",
        **same,
    )


def _options(asked: dict[str, Any]) -> "Options":
    """How to search it, from the parameters of `tune`."""
    from kllm.tuners.resume import OPTIONS
    from kllm.tuners.tune import Options

    same = {name: asked[name] for name in ("output", "trials", "storage", "study", "resume")}
    return Options(
        timeout_s=asked["timeout"],
        trial_timeout_s=asked["trial_timeout"],
        given=given_options(asked["ctx"]) & OPTIONS.keys(),
        **same,
    )


def _where(storage: str, output: Path) -> str:
    """The options without which --resume would not find the study."""
    parts = [f" --storage {storage}"] if storage else []
    if output != DEFAULT_OUTPUT:
        parts.append(f" --output {output}")
    return "".join(parts)
