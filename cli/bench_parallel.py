"""Benches of layouts: `kllm bench fidelity`, `ring-vs-allgather` and `tp-vs-dp-attention`."""

import sys
from typing import Annotated, Any

import typer

from kllm.cli.bench_run import BenchOptions, run_and_show, show
from kllm.cli.console import err, say
from kllm.cli.options import (
    DEFAULT_OUTPUT,
    MOST,
    AsJson,
    Device,
    Dtype,
    KvDtype,
    LinkName,
    Load,
    Model,
    Output,
    Repeats,
    Scale,
    Seed,
    integers,
    lengths,
    names,
)


def fidelity(
    model: Model = "deepseek-v4",
    world: Annotated[
        int, typer.Option(min=0, help="Ranks of the layouts; 0: those of --layout, or 2.")
    ] = 0,
    layout: Annotated[
        str, typer.Option(help="One layout as tp=2 or dp=2,ep=2; empty: one of each kind.")
    ] = "",
    scale: Annotated[
        str, typer.Option(help="Model scale; auto: whole weights fit a GPU twice, tiny on a CPU.")
    ] = "auto",
    isl: Annotated[int, typer.Option(min=0, help="Prompt tokens; 0: automatic.")] = 0,
    osl: Annotated[int, typer.Option(min=0, help="Output tokens; 0: automatic.")] = 0,
    requests: Annotated[int, typer.Option(min=0, help="Requests at once; 0: automatic.")] = 0,
    token_budget: Annotated[
        int, typer.Option(min=0, help="Tokens a step may hold; 0: automatic.")
    ] = 0,
    limit: Annotated[
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

    from kllm.bench.base import BENCHES, is_small
    from kllm.bench.fidelity import default_load, pairs_for, scale_for_both
    from kllm.errors import ConfigError
    from kllm.models.load import resolve
    from kllm.models.shape import model_shape
    from kllm.parallel.layout import check, parse

    options = BenchOptions.of({**locals(), "layout": "", "token_budget": token_budget or 1})
    options = replace(options, scale=scale_for_both(options.config()))
    resolved = resolve(options.config())
    sizes, budget = default_load(is_small(resolved.scale, resolved.device))
    options = replace(options, token_budget=token_budget or budget)
    given = {"isl": isl, "osl": osl, "requests": requests}
    layouts = (parse(layout),) if layout else ()
    for one in layouts:
        check(model_shape(resolved.family, resolved.config).dims, one)
    if layouts and world not in (0, layouts[0].world):
        raise ConfigError(
            f"--layout {layout} has {layouts[0].world} ranks and --world is {world}; leave one out"
        )
    world = layouts[0].world if layouts else world or 2
    bench = BENCHES["fidelity"].load()(
        world=world,
        layouts=layouts,
        pairs=pairs_for(resolved.device, world),
        load=replace(sizes, **{name: value for name, value in given.items() if value}),
        limit_s=limit,
    )
    run_and_show(bench, options)


def ring_vs_allgather(
    model: Annotated[str, typer.Option(help="Models, as in glm-5.2,llama-3-8b.")] = "glm-5.2",
    attention: Annotated[
        str,
        typer.Option(help="model, or dense: without its indexer; or both, as in model,dense."),
    ] = "model",
    isl: Annotated[
        str, typer.Option(help="Prompt tokens, as in 32K,128K,1M; default: automatic.")
    ] = "",
    cp: Annotated[
        str, typer.Option(help="Context-parallel ranks, as in 2,8; default: automatic.")
    ] = "",
    link: Annotated[
        str, typer.Option(help="Links of rank-slices, by name or as SECONDS:BYTES/S.")
    ] = "nvlink4,nvlink5,pcie5,ib400",
    chunk: Annotated[
        str, typer.Option(help="Tokens of a step, as in 8K,32K; default: automatic.")
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
        float, typer.Option(min=0, help="Seconds for the rounds of a layout; 0: automatic.")
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
    models, links = names(model), names(link)
    ranks = integers("--cp", cp or ("2" if small else "8"))
    chunks = lengths("--chunk", chunk or ("256" if small else "8K,64K"))
    bench: Any = BENCHES["ring-vs-allgather"].load()(
        models=models,
        attentions=names(attention),
        isls=lengths("--isl", isl or ("512,2K" if small else "32K,128K,512K,1M")),
        cps=ranks,
        links=links,
        chunks=chunks,
        limit_s=limit or (60.0 if small else 20.0),
    )
    # Fidelity is chosen below; the rest is that of the first layout.
    first = {"model": models[0], "link": links[0], "token_budget": chunks[0], "fidelity": "real"}
    options = BenchOptions.of({**locals(), **first})
    config = choose(options.config(), fidelity, max(ranks))
    seconds = bench.estimate_s(config, repeats)
    say(err, f"{bench.name}: about {seconds:.0f} s, by a rough estimate")
    run_and_show(bench, options, config)


def tp_vs_dp_attention(
    model: Model = "deepseek-v4",
    world: Annotated[int, typer.Option(min=0, help="Ranks of a layout; 0: automatic.")] = 0,
    in_flight: Annotated[
        str, typer.Option(help="Requests that arrive at once, as in 8,64; default: automatic.")
    ] = "",
    isl: Annotated[
        str, typer.Option(help="Prompt tokens, as in 512,2048; default: automatic.")
    ] = "",
    osl: Annotated[int, typer.Option(min=0, help="Output tokens; 0: automatic.")] = 0,
    skewed: Annotated[
        int, typer.Option(min=0, max=MOST, help="Requests of the skewed loads; 0: automatic.")
    ] = 0,
    step_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of a step over all ranks; 0: automatic.")
    ] = 0,
    limit: Annotated[
        float, typer.Option(min=0, help="Seconds for the sweep of a layout; 0: automatic.")
    ] = 0.0,
    kv_mib: Annotated[
        int,
        typer.Option(
            "--kv-memory", min=0, max=MOST, help="KV memory of a rank, MiB; 0: automatic."
        ),
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
        int, typer.Option(min=0, help="Measurements of each point; 0: automatic.")
    ] = 0,
    seed: Seed = 0,
    output: Output = DEFAULT_OUTPUT,
    as_json: AsJson = False,
) -> None:
    """Compare attention cut by heads with attention by request: KV capacity, TTFT, TPOT, output."""
    from dataclasses import replace

    from kllm.bench.base import BENCHES
    from kllm.bench.tp_vs_dp_capacity import CapacityBench
    from kllm.bench.tp_vs_dp_defaults import bench_for, setup_for

    if capacity_only:
        result, path = CapacityBench().run(output, ("kllm", *sys.argv[1:]))
        show(result, path, as_json)
        return
    plain = BenchOptions.of({**locals(), "fidelity": "real", "repeats": 1})
    setup = setup_for(plain.config(), world=world, fidelity=fidelity, repeats=repeats)
    options = replace(
        plain,
        scale=setup.scale,
        fidelity=setup.fidelity,
        repeats=setup.repeats,
        layout=f"dp={setup.world},ep={setup.world}",
    )
    bench = bench_for(
        BENCHES["tp-vs-dp-attention"].load(),
        setup,
        in_flight=integers("--in-flight", in_flight) if in_flight else (),
        isls=integers("--isl", isl) if isl else (),
        osl=osl,
        skewed=skewed,
        step_tokens=step_tokens,
        limit_s=limit,
    )
    run_and_show(bench, options)
