"""`kllm bench expert-balance`: on which ranks experts lie, in how many copies, what that gains."""

from typing import Annotated

import typer

from kllm.cli.bench_run import BenchOptions, chosen_workload, run_and_show
from kllm.cli.options import (
    DEFAULT_OUTPUT,
    AsJson,
    Device,
    Dtype,
    KvDtype,
    Load,
    Model,
    Output,
    Repeats,
    Seed,
    integers,
)

REAL, WORKLOAD = "real", "chat"


def expert_balance(
    model: Model = "deepseek-v4",
    ep: Annotated[int, typer.Option(min=2, help="Ranks that the experts are spread over.")] = 8,
    redundant: Annotated[
        str, typer.Option(help="Redundant experts of a layer, as in 0,8,16.")
    ] = "0,8,16,32",
    trace: Annotated[
        str,
        typer.Option(help="real: routing counted in a run; zipf:1.0: drawn with that exponent."),
    ] = REAL,
    workload: Annotated[
        str,
        typer.Option(
            help="What a real trace runs: chat (default), ..., ISL:OSL:C or a file of requests."
        ),
    ] = "",
    gpu: Annotated[
        str, typer.Option(help="GPU for the cost of copies: h100, h200, b200 or b300.")
    ] = "h200",
    scale: Annotated[
        str, typer.Option(help="full, layers:N or tiny; auto: what fits, or full with zipf.")
    ] = "auto",
    token_budget: Annotated[int, typer.Option(min=1, help="Tokens a step may hold.")] = 2048,
    load: Load = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    repeats: Repeats = 3,
    seed: Seed = 0,
    output: Output = DEFAULT_OUTPUT,
    as_json: AsJson = False,
) -> None:
    """Predict the load of expert ranks from measured routing, and what redundant experts cost."""
    from kllm.bench.base import BENCHES
    from kllm.bench.expert_balance_trace import Zipf
    from kllm.errors import ConfigError

    if trace != REAL and workload:
        raise ConfigError(
            "--workload is what a real trace runs; give --workload or --trace, not both"
        )
    if trace != REAL and scale == "auto":
        scale = "full"
    options = BenchOptions.of(locals())
    bench = BENCHES["expert-balance"].load()(
        ep=ep,
        redundant=integers("--redundant", redundant),
        trace=(
            chosen_workload(options.config(), workload or WORKLOAD)
            if trace == REAL
            else Zipf.parse(trace)
        ),
        gpu=gpu,
    )
    run_and_show(bench, options)
