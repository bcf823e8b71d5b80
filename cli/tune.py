"""`kllm tune`: find the best engine settings for a model, a workload and this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kllm.cli.console import err, out
from kllm.cli.options import DEFAULT_OUTPUT, AsJson, Device, Dtype, LinkName, Scale

if TYPE_CHECKING:
    from kllm.tuners.tune import Tuned

INTERRUPTED = 130


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
        int | None, typer.Option(min=1, help="Requests of a trial; default: about 5 s of them.")
    ] = None,
    objective: Annotated[
        list[str] | None,
        typer.Option(help="goodput (default), throughput or latency; several give a Pareto front."),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(help="Limits, as ttft=2s,tpot=50ms (the default of goodput)."),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Trials of the study, all runs of it.")] = 24,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which no trial is begun.")
    ] = None,
    trial_timeout: Annotated[
        float | None, typer.Option(min=1, help="Seconds of one trial; default: by a pilot run.")
    ] = None,
    storage: Annotated[
        str,
        typer.Option(
            help="journal:PATH, or an Optuna URL as postgresql+psycopg2://user:pw@host/db; several "
            "processes may share it. Default: a journal in --output."
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
    from kllm.cli.tune_view import view
    from kllm.config import EngineConfig
    from kllm.errors import ConfigError
    from kllm.tuners.resume import OPTIONS, STORED
    from kllm.tuners.setup import Request, default_world
    from kllm.tuners.tune import Options
    from kllm.tuners.tune import tune as run

    if model is None and not resume:
        raise ConfigError("there is nothing to tune; name a model with --model, or use --resume")
    if workload is not None and (isl or osl or concurrency is not None):
        raise ConfigError(
            "--workload and --isl/--osl/--concurrency both say what the load is; give one of them"
        )
    request = Request(
        config=EngineConfig(
            model=model or STORED,
            scale=scale,
            device=device,
            dtype=dtype,
            seed=seed,
            link=link,
        ),
        workload=workload or "chat",
        isl=isl,
        osl=osl,
        concurrency=concurrency,
        num_requests=requests,
        objectives=tuple(objective or ()),
        slo=slo,
        fixed=tuple(fix or ()),
        seed=seed,
        world=world or (1 if layout else default_world(device)),
        layout=layout,
        fidelity=fidelity or "",
    )
    options = Options(
        output=output,
        trials=trials,
        timeout_s=timeout,
        trial_timeout_s=trial_timeout,
        storage=storage,
        study=study,
        resume=resume,
        given=_given(ctx) & OPTIONS.keys(),
    )
    with view(err) as watcher:
        tuned = run(request, options, watcher=watcher)
    where = f" --storage {storage}" if storage else ""
    if output != DEFAULT_OUTPUT:
        where += f" --output {output}"
    _report(tuned, where, as_json=as_json)


def _given(ctx: typer.Context) -> frozenset[str]:
    """The options on the command line, as in "--model"."""
    named = {param.name: param.opts[0] for param in ctx.command.params if param.name}
    sources = {option: ctx.get_parameter_source(name) for name, option in named.items()}
    return frozenset(o for o, source in sources.items() if source and source.name == "COMMANDLINE")


def _report(tuned: "Tuned", where: str, *, as_json: bool) -> None:
    from kllm.errors import KllmError
    from kllm.results.schema import encode

    if tuned.result is None:
        _print_interrupted(tuned, where)
        raise typer.Exit(INTERRUPTED)
    if as_json:
        typer.echo(encode(tuned.result).decode(), nl=False)
    else:
        _print_result(tuned)
    if tuned.sentence:
        raise KllmError(tuned.sentence)
    if tuned.interrupted:
        raise typer.Exit(INTERRUPTED)


def _print_interrupted(tuned: "Tuned", where: str) -> None:
    from kllm.tuners.setup import describe

    space, goal = tuned.setup.space, tuned.setup.goal
    if tuned.best is not None:
        first = goal.objectives[0]
        words = describe(tuned.best.settings, space.default, space.free)
        value = f"{tuned.best.metrics[first.metric]:.4g} {first.unit}"
        _line(f"best so far: {words}: {first.name} {value} (trial {tuned.best.number})")
    else:
        _line("best so far: nothing that meets the SLO")
    err.print(
        f"interrupted; everything is stored. Continue with --resume --study {tuned.study}{where}",
        highlight=False,
        soft_wrap=True,
    )


def _print_result(tuned: "Tuned") -> None:
    from rich.table import Table

    assert tuned.result is not None
    assert tuned.files is not None
    result = tuned.result
    if tuned.comparison is not None:
        rivalled = any(name.startswith("default.") for name in result.metrics)
        table = Table("", "recommended", "95 % interval", *(["default"] if rivalled else []))
        for name, metric in result.metrics.items():
            if "." in name or metric.median is None:
                continue
            default = result.metrics.get(f"default.{name}")
            unit = f" ({metric.unit})" if metric.unit else ""
            ends = f"{metric.ci95[0]:.4g} to {metric.ci95[1]:.4g}" if metric.ci95 else ""
            other = f"{default.median:.4g}" if default and default.median is not None else ""
            value = f"{metric.median:.4g}"
            if name == "attainment" and tuned.misses_slo:
                value += f" (misses {tuned.setup.goal.slo.attainment:g})"
            cells = [f"{name}{unit}", value, ends, *([other] if rivalled else [])]
            table.add_row(*cells)
        out.print(table)
        _line(f"{result.model} ({result.scale}), fidelity {result.fidelity}: {result.verdict}")
        if result.boundary:
            _line(f"boundary: {result.boundary}")
    importance = result.find_series("importance")
    if importance is not None and importance.rows:
        shares = ", ".join(f"{name} {_share(share)}" for name, share in importance.rows)
        _line(f"what mattered: {shares}")
    if tuned.files.recipe is not None:
        _line(f"recipe: {tuned.files.recipe}")
    _line(f"result: {tuned.files.result}")
    _line(f"report: {tuned.files.report}")


def _share(value: Any) -> str:
    return f"{value:.0%}"


def _line(text: str) -> None:
    out.print(text, highlight=False, soft_wrap=True, markup=False)
