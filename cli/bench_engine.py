"""Benches of one engine: `kllm bench latency`, `throughput`, `overhead` and their like."""

from typing import Annotated

import typer

from kllm.cli.bench_run import BenchOptions, chosen_workload, run_and_show, sizes_are_small
from kllm.cli.options import (
    DEFAULT_OUTPUT,
    AsJson,
    Device,
    Dtype,
    ExpertPlacement,
    Fidelity,
    KvDtype,
    Layout,
    LinkName,
    Load,
    Model,
    Output,
    Repeats,
    Scale,
    Seed,
    integers,
)


def latency(
    model: Model = "smollm2-135m",
    batch: Annotated[str, typer.Option(help="Batch sizes, as in 1,4,16; default: automatic.")] = "",
    isl: Annotated[int, typer.Option(help="Prompt tokens; 0: automatic.")] = 0,
    osl: Annotated[int, typer.Option(help="Output tokens; 0: automatic.")] = 0,
    token_budget: Annotated[int, typer.Option(min=1, help="Tokens a step may hold.")] = 2048,
    scale: Scale = "auto",
    load: Load = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    layout: Layout = "",
    expert_placement: ExpertPlacement = "",
    fidelity: Fidelity = "real",
    link: LinkName = "nvlink4",
    repeats: Repeats = 5,
    seed: Seed = 0,
    output: Output = DEFAULT_OUTPUT,
    as_json: AsJson = False,
) -> None:
    """Sweep the batch size: TTFT, TPOT and step time against its floor."""
    from kllm.bench.base import BENCHES, doubling

    options = BenchOptions.of(locals())
    small = sizes_are_small(options.config())
    bench = BENCHES["latency"].load()(
        batches=integers("--batch", batch) if batch else doubling(16 if small else 256),
        isl=isl or (64 if small else 512),
        osl=osl or (16 if small else 128),
    )
    run_and_show(bench, options)


def throughput(
    model: Model = "smollm2-135m",
    concurrency: Annotated[
        str, typer.Option(help="Requests in flight, as in 1,8,64; default: automatic.")
    ] = "",
    isl: Annotated[
        str, typer.Option(help="Prompt tokens, 512 or 256-768; default: automatic.")
    ] = "",
    osl: Annotated[
        str, typer.Option(help="Output tokens, 128 or 64-192; default: automatic.")
    ] = "",
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
    expert_placement: ExpertPlacement = "",
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

    options = BenchOptions.of(locals())
    config, count = options.config(), requests or None
    if workload and (concurrency or isl or osl):
        raise ConfigError(
            "--workload replaces --concurrency, --isl and --osl; give one or the other"
        )
    if workload:
        loads = [chosen_workload(config, text, num_requests=count) for text in workload]
    else:
        small = sizes_are_small(config)
        tokens = f"{isl or (64 if small else 1024)}:{osl or (16 if small else 128)}"
        sizes = integers("--concurrency", concurrency) if concurrency else None
        loads = [
            workloads.parse(f"{tokens}:{size}", num_requests=count, seed=seed)
            for size in sizes or doubling(16 if small else 256)
        ]
    run_and_show(BENCHES["throughput"].load()(loads=loads), options)


def overhead(
    model: Model = "deepseek-v4",
    scale: Scale = "tiny",
    running: Annotated[
        int, typer.Option(min=1, help="Running requests of steps without the model.")
    ] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Running requests of steps with it.")] = 64,
    layout: Layout = "",
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

    options = BenchOptions.of(locals())
    run_and_show(BENCHES["overhead"].load()(running=running, batch=batch), options)


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

    options = BenchOptions.of({**locals(), "scale": "full"})
    run_and_show(BENCHES["vs-transformers"].load()(osl=osl), options)


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

    options = BenchOptions.of(locals())
    bench = BENCHES["compare-power"].load()(
        pairs=pairs, tries=tries, slowdown=slowdown, interleaved=interleaved
    )
    run_and_show(bench, options)
