"""`kllm tune-quality`: how good the search of `kllm tune` is, on a recorded exhaustive grid."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kllm.cli.console import err, out, say
from kllm.cli.options import AsJson

if TYPE_CHECKING:
    from kllm.tuners.quality import Quality


def tune_quality(
    grid: Annotated[Path, typer.Argument(help="Recorded grid, .jsonl or .jsonl.gz.")],
    record: Annotated[
        str, typer.Option(help="Record the grid first, of this model; continues a partial one.")
    ] = "",
    fix: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Pin a recorded parameter.")
    ] = None,
    scale: Annotated[str, typer.Option(help="Scale of the recorded model.")] = "auto",
    workload: Annotated[str, typer.Option(help="Workload preset that is recorded.")] = "chat",
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests of a recorded run; default: about 5 s.")
    ] = None,
    objective: Annotated[str, typer.Option(help="goodput, throughput or latency.")] = "goodput",
    slo: Annotated[
        str | None, typer.Option(help="Limits that the replayed searches work under.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Searches to replay.")] = 5,
    trials: Annotated[int, typer.Option(min=1, help="Trials of a search.")] = 25,
    time_share: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of the grid's run time of a search.")
    ] = 0.2,
    as_json: AsJson = False,
) -> None:
    """Replay searches on a recorded grid, against the grid's best and random search."""
    import json
    from dataclasses import asdict

    import optuna

    from kllm.tuners.grid import load
    from kllm.tuners.objective import Goal
    from kllm.tuners.quality import evaluate

    goal = Goal.of([objective], slo)
    if record:
        _record(grid, record, scale, workload, requests, fix or [])
    recorded = load(grid)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    quality = evaluate(recorded, goal, seeds=range(seeds), trials=trials, time_share=time_share)
    if as_json:
        document: dict[str, Any] = asdict(quality) | {"reached": quality.reached()}
        typer.echo(json.dumps(document | {"identity": recorded.header.identity}))
        return
    _print(quality, recorded.header.identity)


def _record(
    path: Path, model: str, scale: str, workload: str, requests: int | None, fix: list[str]
) -> None:
    from kllm.config import EngineConfig
    from kllm.tuners.outcome import Outcome
    from kllm.tuners.record_grid import record_grid
    from kllm.tuners.setup import Request

    def progress(done: int, total: int, outcome: Outcome) -> None:
        say(err, f"{done}/{total}: {outcome.state}, {outcome.total_s:.1f} s")

    request = Request(
        config=EngineConfig(model=model, scale=scale),
        workload=workload,
        num_requests=requests,
        fixed=tuple(fix),
    )
    record_grid(path, request, progress=progress)


def _print(quality: "Quality", identity: dict[str, Any]) -> None:
    import math

    import numpy as np
    from rich.table import Table

    table = Table("seed", "best within the budgets", "s to 95 %", "s to 95 %, random search")
    rows = zip(
        quality.reached(),
        quality.near_s(quality.tuned),
        quality.near_s(quality.random),
        strict=True,
    )
    columns = list(zip(*rows, strict=True))
    medians = [float(np.median(column)) for column in columns]
    for name, cells in [*enumerate(zip(*columns, strict=True)), ("median", medians)]:
        share, tuned, random = cells
        times = [f"{t:.1f}" if math.isfinite(t) else "never" for t in (tuned, random)]
        table.add_row(str(name), f"{share:.1%}", *times)
    say(
        out,
        f"{identity.get('model')} ({identity.get('scale')}) on {identity.get('device')}: "
        f"{quality.points} points in {quality.grid_s:.0f} s; budgets {quality.trials} trials and "
        f"{quality.time_share:.0%} of that time",
    )
    out.print(table)
