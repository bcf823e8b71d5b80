"""`kllm bench`: one command a bench; results on stdout, progress on stderr."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kllm.cli.console import err, out
from kllm.cli.options import (
    DEFAULT_OUTPUT,
    AsJson,
    Device,
    Dtype,
    Fidelity,
    Layout,
    LinkName,
    Load,
    Model,
    Scale,
)

if TYPE_CHECKING:
    from kllm.bench.base import Bench, ProgressHook
    from kllm.config import EngineConfig
    from kllm.results.schema import RunResult, Series

INTERRUPTED = 130
LINE_S = 4.0  # between two lines of progress in a pipe
DETAILS = ("requests", "pairs")  # series that are stored and not printed
# Ends of intervals, and what a table of a load is too narrow for; all are in the result file.
NOT_SHOWN = (
    *("_lo", "_hi", "_p90_ms", "_mean_ms", "e2e_p50_ms", "e2e_p99_ms"),
    *("isl", "osl", "concurrency", "rate_per_s", "total_tokens_per_s", "limit_percent"),
    # Gathering exposes all that it transfers: one of three columns says it.
    *("gather_transfer_s", "replicated_transfer_s"),
    *("gather_exposed_share", "replicated_exposed_share"),
)

TEXTS = (  # columns of words
    *("state", "reason", "load", "layout", "quantity", "estimate", "against", "what", "way"),
    *("backend", "fidelity", "model", "attention", "link", "kind", "entries", "auto", "claim"),
    "status",
)

NAMES = ("link", "auto")  # columns of single words
RAN = ("model", "attention", "cp", "chunk", "link", "state")

bench_app = typer.Typer(no_args_is_help=True, help="Measure the engine on this machine.")

KvDtype = Annotated[str, typer.Option(help="Dtype of the KV cache: auto, a dtype, or fp8.")]
Repeats = Annotated[int, typer.Option(min=1, help="Measurements of each point.")]
Seed = Annotated[int, typer.Option(help="Seed of weights, lengths and prompts.")]
Output = Annotated[Path, typer.Option(help="Result file (.json), or the folder for it.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The options that all benches share."""

    model: str
    scale: str
    device: str
    dtype: str
    kv_dtype: str
    repeats: int
    seed: int
    output: Path
    as_json: bool
    load: str = "auto"
    token_budget: int = 2048
    layout: str = ""
    fidelity: str = "real"
    link: str = "nvlink4"
    kv_mib: int = 0

    def config(self) -> "EngineConfig":
        from kllm.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
        from kllm.parallel.layout import parse

        return EngineConfig(
            model=self.model,
            scale=self.scale,
            load=self.load,  # type: ignore[arg-type]  # EngineConfig checks it
            device=self.device,
            dtype=self.dtype,
            seed=self.seed,
            cache=CacheConfig(dtype=self.kv_dtype, memory_bytes=self.kv_mib << 20),
            scheduler=SchedulerConfig(token_budget=self.token_budget),
            parallel=parse(self.layout) if self.layout else ParallelConfig(),
            fidelity=self.fidelity,  # type: ignore[arg-type]  # EngineConfig checks it
            link=self.link,
        )


@bench_app.command("list")
def list_benches(as_json: AsJson = False) -> None:
    """List the benches and what each sweeps."""
    import json

    from rich.table import Table

    from kllm.bench.base import BENCHES

    if as_json:
        rows = {n: {"summary": e.summary, "sweeps": e.sweeps} for n, e in BENCHES.items()}
        typer.echo(json.dumps(rows, indent=1))
        return
    table = Table("bench", "measures", "boundary along")
    for name, entry in BENCHES.items():
        table.add_row(name, entry.summary, entry.sweeps)
    out.print(table)


@bench_app.command("latency")
def latency(
    model: Model = "smollm2-135m",
    batch: Annotated[
        str, typer.Option(help="Batch sizes, as in 1,4,16; default: doubling by machine.")
    ] = "",
    isl: Annotated[int, typer.Option(help="Prompt tokens; 0: by machine.")] = 0,
    osl: Annotated[int, typer.Option(help="Output tokens; 0: by machine.")] = 0,
    token_budget: Annotated[int, typer.Option(min=1, help="Tokens a step may hold.")] = 2048,
    scale: Scale = "auto",
    load: Load = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    layout: Layout = "",
    fidelity: Fidelity = "real",
    link: LinkName = "nvlink4",
    repeats: Repeats = 5,
    seed: Seed = 0,
    output: Output = DEFAULT_OUTPUT,
    as_json: AsJson = False,
) -> None:
    """Sweep the batch size: TTFT, TPOT and step time against its floor."""
    from kllm.bench.base import BENCHES, doubling

    shared = _options(locals())
    small = _small(shared.config())
    bench = BENCHES["latency"].load()(
        batches=_integers("--batch", batch) if batch else doubling(16 if small else 256),
        isl=isl or (64 if small else 512),
        osl=osl or (16 if small else 128),
    )
    _run(bench, shared)


@bench_app.command("throughput")
def throughput(
    model: Model = "smollm2-135m",
    concurrency: Annotated[
        str, typer.Option(help="Requests in flight, as in 1,8,64; default: by machine.")
    ] = "",
    isl: Annotated[str, typer.Option(help="Prompt tokens, 512 or 256-768; by machine.")] = "",
    osl: Annotated[str, typer.Option(help="Output tokens, 128 or 64-192; by machine.")] = "",
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="Instead of the three above: chat, long-context, agent, batch, ISL:OSL:C, "
            "ISL:OSL:R/s or a trace file; repeatable."
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=0, help="Requests of each load; 0: four for each in flight.")
    ] = 0,
    token_budget: Annotated[int, typer.Option(min=1, help="Tokens a step may hold.")] = 2048,
    scale: Scale = "auto",
    load: Load = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    layout: Layout = "",
    fidelity: Fidelity = "real",
    link: LinkName = "nvlink4",
    repeats: Repeats = 3,
    seed: Seed = 0,
    output: Output = DEFAULT_OUTPUT,
    as_json: AsJson = False,
) -> None:
    """Sweep the load: tokens and requests a second, and what users wait."""
    from kllm.bench import workloads
    from kllm.bench.base import BENCHES, doubling
    from kllm.errors import ConfigError

    shared = _options(locals())
    config = shared.config()
    small = _small(config)
    count = requests or None
    if workload and (concurrency or isl or osl):
        raise ConfigError("--workload replaces --concurrency, --isl and --osl; give one or other")
    if workload:
        most = _max_model_len(config)
        loads = [
            workloads.choose(text, max_model_len=most, small=small, num_requests=count, seed=seed)
            for text in workload
        ]
    else:
        lengths = f"{isl or (64 if small else 1024)}:{osl or (16 if small else 128)}"
        sizes = _integers("--concurrency", concurrency) if concurrency else None
        loads = [
            workloads.parse(f"{lengths}:{size}", num_requests=count, seed=seed)
            for size in sizes or doubling(16 if small else 256)
        ]
    _run(BENCHES["throughput"].load()(loads=loads), shared)


@bench_app.command("overhead")
def overhead(
    model: Model = "deepseek-v4",
    scale: Scale = "tiny",
    running: Annotated[int, typer.Option(min=1, help="Running requests, no model.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Running requests, with the model.")] = 64,
    load: Load = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    repeats: Repeats = 5,
    seed: Seed = 0,
    output: Output = DEFAULT_OUTPUT,
    as_json: AsJson = False,
) -> None:
    """Measure the part of a step that is not the model."""
    from kllm.bench.base import BENCHES

    shared = _options(locals())
    _run(BENCHES["overhead"].load()(running=running, batch=batch), shared)


@bench_app.command("vs-transformers")
def vs_transformers(
    model: Model = "smollm2-135m",
    osl: Annotated[int, typer.Option(min=2, help="Output tokens of each request.")] = 64,
    device: Device = "auto",
    dtype: Dtype = "float32",
    kv_dtype: KvDtype = "auto",
    repeats: Repeats = 7,
    seed: Seed = 0,
    output: Output = DEFAULT_OUTPUT,
    as_json: AsJson = False,
) -> None:
    """Compare decode speed with transformers' generate, taking turns in one process."""
    from kllm.bench.base import BENCHES

    shared = _options({**locals(), "scale": "full"})
    _run(BENCHES["vs-transformers"].load()(osl=osl), shared)


@bench_app.command("compare-power")
def compare_power(
    model: Model = "llama-3-8b",
    scale: Scale = "tiny",
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of equal sides.")] = 50,
    tries: Annotated[int, typer.Option(min=1, help="Pairs with a slowed second side.")] = 20,
    slowdown: Annotated[float, typer.Option(help="Share of a step's time added to it.")] = 0.1,
    interleaved: Annotated[bool, typer.Option(help="Let the sides of a pair take turns.")] = True,
    load: Load = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    repeats: Repeats = 24,
    seed: Seed = 0,
    output: Output = DEFAULT_OUTPUT,
    as_json: AsJson = False,
) -> None:
    """Count false alarms and detections of `kllm compare` on this machine."""
    from kllm.bench.base import BENCHES

    shared = _options(locals())
    bench = BENCHES["compare-power"].load()(
        pairs=pairs, tries=tries, slowdown=slowdown, interleaved=interleaved
    )
    _run(bench, shared)


@bench_app.command("fidelity")
def fidelity(
    model: Model = "deepseek-v4",
    world: Annotated[int, typer.Option(min=2, help="Ranks of the layouts.")] = 2,
    layout: Annotated[
        str, typer.Option(help="One layout as tp=2 or dp=2,ep=2; empty: one of each kind.")
    ] = "",
    scale: Annotated[
        str, typer.Option(help="Model scale; auto: whole weights fit a GPU twice, tiny on a CPU.")
    ] = "auto",
    isl: Annotated[int, typer.Option(min=0, help="Prompt tokens; 0: by machine.")] = 0,
    osl: Annotated[int, typer.Option(min=0, help="Output tokens; 0: by machine.")] = 0,
    requests: Annotated[int, typer.Option(min=0, help="Requests at once; 0: by machine.")] = 0,
    token_budget: Annotated[
        int, typer.Option(min=0, help="Tokens a step may hold; 0: by machine.")
    ] = 0,
    limit_s: Annotated[
        float, typer.Option(min=0, help="Seconds after which no layout is begun; 0: no limit.")
    ] = 240.0,
    link: LinkName = "nvlink4",
    load: Load = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    repeats: Repeats = 3,
    seed: Seed = 0,
    output: Output = DEFAULT_OUTPUT,
    as_json: AsJson = False,
) -> None:
    """Compare a rank-slice with all ranks on the same link, or the cost model with a slice."""
    from dataclasses import replace

    from kllm.bench.base import BENCHES
    from kllm.bench.fidelity import default_load, pairs_for, scale_for_both
    from kllm.models.load import resolve
    from kllm.models.shape import model_shape
    from kllm.parallel.layout import check, parse

    shared = _options({**locals(), "layout": "", "token_budget": token_budget or 1})
    shared = replace(shared, scale=scale_for_both(shared.config()))
    small = _small(shared.config())
    sizes, budget = default_load(small)
    given = {"isl": isl, "osl": osl, "requests": requests}
    sizes = replace(sizes, **{name: value for name, value in given.items() if value})
    shared = replace(shared, token_budget=token_budget or budget)
    resolved = resolve(shared.config())
    layouts = (parse(layout),) if layout else ()
    for one in layouts:
        check(model_shape(resolved.family, resolved.config).dims, one)
    world = layouts[0].world if layouts else world
    bench = BENCHES["fidelity"].load()(
        world=world,
        layouts=layouts,
        pairs=pairs_for(resolved.device, world),
        load=sizes,
        limit_s=limit_s,
    )
    _run(bench, shared)


@bench_app.command("ring-vs-allgather")
def ring_vs_allgather(
    model: Annotated[str, typer.Option(help="Models, as in glm-5.2,llama-3-8b.")] = "glm-5.2",
    attention: Annotated[
        str,
        typer.Option(help="model, or dense: without its indexer; or both, as in model,dense."),
    ] = "model",
    isl: Annotated[
        str, typer.Option(help="Prompt tokens, as in 32K,128K,1M; default: by machine.")
    ] = "",
    cp: Annotated[
        str, typer.Option(help="Context-parallel ranks, as in 2,8; default: by machine.")
    ] = "",
    link: Annotated[
        str, typer.Option(help="Links of rank-slices, by name or as SECONDS:BYTES/S.")
    ] = "nvlink4,nvlink5,pcie5,ib400",
    chunk: Annotated[
        str, typer.Option(help="Tokens of a step, as in 8K,32K; default: by machine.")
    ] = "",
    fidelity: Annotated[
        str, typer.Option(help="real, rank-slice, or auto: real where there is a device a rank.")
    ] = "auto",
    scale: Annotated[
        str, typer.Option(help="full, layers:N or tiny; auto: full if it fits, else layers:4.")
    ] = "auto",
    load: Load = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    limit: Annotated[
        float, typer.Option(min=0, help="Seconds for the rounds of a layout; 0: by machine.")
    ] = 0.0,
    repeats: Repeats = 3,
    seed: Seed = 0,
    output: Output = DEFAULT_OUTPUT,
    as_json: AsJson = False,
) -> None:
    """Sweep prompt length and link: prefill as a ring of ranks against all-gather."""
    from kllm.bench.base import BENCHES, is_small
    from kllm.bench.ring_setup import choose
    from kllm.models.devices import choose_device

    small = is_small(scale, str(choose_device(device)))
    models, links = _names(model), _names(link)
    ranks = _integers("--cp", cp or ("2" if small else "8"))
    chunks = _lengths("--chunk", chunk or ("256" if small else "8K,64K"))
    made: Any = BENCHES["ring-vs-allgather"].load()(
        models=models,
        attentions=_names(attention),
        isls=_lengths("--isl", isl or ("512,2K" if small else "32K,128K,512K,1M")),
        cps=ranks,
        links=links,
        chunks=chunks,
        limit_s=limit or (60.0 if small else 20.0),
    )
    # Fidelity is chosen below; the rest is that of the first layout.
    first = {"model": models[0], "link": links[0], "token_budget": chunks[0], "fidelity": "real"}
    shared = _options({**locals(), **first})
    config = choose(shared.config(), fidelity, max(ranks))
    seconds = made.estimate_s(config, repeats)
    err.print(f"{made.name}: about {seconds:.0f} s, by a rough estimate", highlight=False)
    _run(made, shared, config)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _lengths(option: str, text: str) -> tuple[int, ...]:
    """Numbers of tokens, of which K and M are powers of 1024."""
    from kllm.errors import ConfigError

    units = {"K": 1 << 10, "M": 1 << 20}
    try:
        return tuple(
            int(part[:-1]) * units[part[-1]] if part[-1] in units else int(part)
            for part in _names(text.upper())
        )
    except ValueError:
        raise ConfigError(f"{option} takes tokens as in 512,32K,1M, got '{text}'") from None


@bench_app.command("tp-vs-dp-attention")
def tp_vs_dp_attention(
    model: Model = "deepseek-v4",
    world: Annotated[int, typer.Option(min=0, help="Ranks of a layout; 0: by machine.")] = 0,
    in_flight: Annotated[
        str, typer.Option(help="Requests that arrive at once, as in 8,64; default: by machine.")
    ] = "",
    isl: Annotated[str, typer.Option(help="Prompt tokens, as in 512,2048; by machine.")] = "",
    osl: Annotated[int, typer.Option(min=0, help="Output tokens; 0: by machine.")] = 0,
    skewed: Annotated[
        int, typer.Option(min=0, help="Requests of the skewed loads; 0: by machine.")
    ] = 0,
    step_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of a step over all ranks; 0: by machine.")
    ] = 0,
    limit: Annotated[
        float, typer.Option(min=0, help="Seconds for the sweep of a layout; 0: by machine.")
    ] = 0.0,
    kv_mib: Annotated[
        int, typer.Option("--kv-memory", min=0, help="KV memory of a rank, MiB; 0: by machine.")
    ] = 0,
    capacity_only: Annotated[
        bool, typer.Option("--capacity-only", help="Only compute the published KV capacities.")
    ] = False,
    scale: Scale = "auto",
    load: Load = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    fidelity: Annotated[
        str, typer.Option(help="real, rank-slice, or auto: real if there is a device a rank.")
    ] = "auto",
    link: LinkName = "nvlink4",
    repeats: Annotated[
        int, typer.Option(min=0, help="Measurements of each point; 0: by machine.")
    ] = 0,
    seed: Seed = 0,
    output: Output = DEFAULT_OUTPUT,
    as_json: AsJson = False,
) -> None:
    """Compare attention cut by heads with attention by request: KV capacity, TTFT, TPOT, output."""
    import sys
    from dataclasses import replace

    from kllm.bench.base import BENCHES
    from kllm.bench.tp_vs_dp_capacity import CapacityBench
    from kllm.bench.tp_vs_dp_defaults import bench_for, setup_for

    if capacity_only:
        result, path = CapacityBench().run(output, ("kllm", *sys.argv[1:]))
        _show(result, path, as_json)
        return
    plain = _options({**locals(), "fidelity": "real", "repeats": 1})
    setup = setup_for(plain.config(), world=world, fidelity=fidelity, repeats=repeats)
    shared = replace(
        plain,
        scale=setup.scale,
        fidelity=setup.fidelity,
        repeats=setup.repeats,
        layout=f"dp={setup.world},ep={setup.world}",
    )
    bench = bench_for(
        BENCHES["tp-vs-dp-attention"].load(),
        setup,
        in_flight=_integers("--in-flight", in_flight) if in_flight else (),
        isls=_integers("--isl", isl) if isl else (),
        osl=osl,
        skewed=skewed,
        step_tokens=step_tokens,
        limit_s=limit,
    )
    _run(bench, shared)


def _options(given: dict[str, Any]) -> _Options:
    return _Options(**{name: given[name] for name in _Options.__slots__ if name in given})


def _small(config: "EngineConfig") -> bool:
    from kllm.bench.base import is_small
    from kllm.models.load import resolve

    resolved = resolve(config)
    return is_small(resolved.scale, resolved.device)


def _max_model_len(config: "EngineConfig") -> int:
    from kllm.models.load import resolve

    return int(resolve(config).config.max_position_embeddings)


def _integers(option: str, text: str) -> tuple[int, ...]:
    from kllm.errors import ConfigError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} takes whole numbers as in 1,4,16, got '{text}'") from None


def _run(bench: "Bench", shared: _Options, config: "EngineConfig | None" = None) -> None:
    import sys

    from kllm.bench.base import Context
    from kllm.bench.run import run_bench

    with _progress(bench.name) as hook:
        context = Context(
            config=config or shared.config(),
            repeats=shared.repeats,
            seed=shared.seed,
            progress=hook,
        )
        command = ("kllm", *sys.argv[1:])
        try:
            result, path = run_bench(bench, context, shared.output, command)
        except KeyboardInterrupt:  # the command-line library would end without a word
            err.print("interrupted before anything was measured", highlight=False)
            raise typer.Exit(INTERRUPTED) from None
    _show(result, path, shared.as_json)
    if result.extra.get("interrupted"):
        raise typer.Exit(INTERRUPTED)


def _show(result: "RunResult", path: Path, as_json: bool) -> None:
    from kllm.results.schema import encode

    if as_json:
        typer.echo(encode(result).decode(), nl=False)
    else:
        _print(result)
    err.print(f"result: {path}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _progress(title: str) -> Iterator["ProgressHook"]:
    """A bar on a terminal; in a pipe a line every few seconds."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    if not err.is_terminal:
        with _lines(title) as hook:
            yield hook
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(title, total=None)

        def hook(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{title}: {what}", completed=done, total=total)

        yield hook


@contextmanager
def _lines(title: str) -> Iterator["ProgressHook"]:
    """A line on stderr every LINE_S seconds, whether or not there is news."""
    import threading
    import time

    latest, over, begin = ["starting"], threading.Event(), time.monotonic()

    def hook(what: str, done: int, total: int) -> None:
        latest[0] = f"{what}, {done} of {total}"

    def speak() -> None:
        while not over.wait(LINE_S):
            line = f"{title}: {latest[0]}, {time.monotonic() - begin:.0f} s"
            err.print(line, markup=False, highlight=False, soft_wrap=True)

    speaker = threading.Thread(target=speak, name="progress", daemon=True)
    speaker.start()
    try:
        yield hook
    finally:
        over.set()
        speaker.join()


def _print(result: "RunResult") -> None:
    from rich.markup import escape

    about = f"{result.model} ({result.scale}, {result.dtype}), fidelity: {result.fidelity}"
    out.print(escape(f"{result.name}: {about}"), highlight=False, soft_wrap=True)
    for series in result.series:
        # A gain is what a sweep beside it shows already; reports draw it.
        if series.name not in DETAILS and not series.name.startswith("gain:"):
            heading, table = _table(series)
            out.print(escape(heading), style="bold", highlight=False, soft_wrap=True)
            out.print(table)
    for sentence in (result.verdict, result.boundary, *result.notes):
        if sentence:
            out.print(escape(sentence), highlight=False, soft_wrap=True)


def _table(series: "Series") -> tuple[str, Any]:
    """A heading with what all rows share, and a table of the rest."""
    from rich.markup import escape
    from rich.table import Table

    rows = series.rows or ()
    shown = [c for c in series.columns if not c.name.endswith(NOT_SHOWN)]
    # All is alike in a single row: there the heading says what ran.
    alike = {n: cell for n, cell in _alike(series).items() if len(rows) > 1 or n in RAN}
    columns = [c for c in shown if c.name not in alike] or shown
    kept = [series.columns.index(column) for column in columns]
    said = [f"{_heading(c.name)} {alike[c.name]}" for c in shown if alike.get(c.name)]
    table = Table()
    for column in columns:
        numeric = column.name not in TEXTS
        table.add_column(
            _heading(column.name),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=column.name in NAMES,
        )
    for row in rows:
        table.add_row(*(escape(_cell(row[index])) for index in kept))
    return ", ".join([_heading(series.name), *said]), table


def _alike(series: "Series") -> dict[str, str]:
    """The columns whose cells are the same in all rows, with what these say."""
    found = {}
    for index, column in enumerate(series.columns):
        cells = {_cell(row[index]) for row in series.rows or ()}
        if len(cells) == 1:
            found[column.name] = cells.pop()
    return found


def _heading(name: str) -> str:
    name = name.replace("tokens_per_s", "tok/s").replace("_per_s", "/s")
    return name.replace("prompt_tokens", "ISL").replace("_", " ")


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
