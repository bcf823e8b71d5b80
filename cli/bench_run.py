"""What every bench command does: a config of its options, a run, and the result shown."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import typer

from kllm.cli.bench_output import print_result
from kllm.cli.bench_progress import watch
from kllm.cli.console import INTERRUPTED, err, interrupted, say

if TYPE_CHECKING:
    from kllm.bench.base import Bench
    from kllm.bench.workloads import Workload
    from kllm.config import EngineConfig
    from kllm.results.schema import RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options that benches share, with the defaults of what a command may lack."""

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
    expert_placement: str = ""

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        """From the parameters of a command, of which others are left out."""
        return cls(**{name: given[name] for name in cls.__slots__ if name in given})

    def config(self) -> "EngineConfig":
        """The engine's config. Raises ConfigError for what cannot be."""
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
            expert_placement=self.expert_placement,
        )


def sizes_are_small(config: "EngineConfig") -> bool:
    """Whether default sizes are cut for this model on this machine."""
    from kllm.bench.base import is_small
    from kllm.models.load import resolve

    resolved = resolve(config)
    return is_small(resolved.scale, resolved.device)


def chosen_workload(
    config: "EngineConfig", text: str, num_requests: int | None = None
) -> "Workload":
    """What a user means by a workload, for this model (see `kllm.bench.workloads.choose`)."""
    from kllm.bench.workloads import choose
    from kllm.models.load import resolve

    return choose(
        text,
        max_model_len=resolve(config).config.max_position_embeddings,
        small=sizes_are_small(config),
        num_requests=num_requests,
        seed=config.seed,
    )


def settled(config: "EngineConfig") -> "EngineConfig":
    """The config with the scale that `auto` means now: what is free changes during a run."""
    from kllm.models.load import resolve

    return replace(config, scale=resolve(config).scale)


def run_and_show(
    bench: "Bench", options: BenchOptions, config: "EngineConfig | None" = None
) -> None:
    """Run a bench and show its result, also one that Ctrl-C cut short.

    Points that failed or were left out are findings of a sweep, as long as another was measured.

    Args:
        config: None: that of the options.

    Raises:
        KllmError: no point could be measured.
    """
    from kllm.bench.base import Context
    from kllm.bench.run import run_bench
    from kllm.errors import KllmError

    context = Context(
        config=config or settled(options.config()),
        repeats=options.repeats,
        seed=options.seed,
        progress=watch().hook,
    )
    command = ("kllm", *sys.argv[1:])
    try:
        result, path = run_bench(bench, context, options.output, command)
    except KeyboardInterrupt:
        watch().stop()
        raise interrupted("interrupted before anything was measured") from None
    show(result, path, options.as_json)
    if result.extra.get("interrupted"):
        raise typer.Exit(INTERRUPTED)
    if not result.metrics:
        raise KllmError(f"nothing was measured: {_first_reason(result)}")


def _first_reason(result: "RunResult") -> str:
    rows = (row for series in result.series for row in series.to_dicts())
    return next((str(row["reason"]) for row in rows if row.get("reason")), "no point has a value")


def show(result: "RunResult", path: Path, as_json: bool) -> None:
    """Print a stored result, as tables or as one document, and where it is."""
    from kllm.results.schema import encode

    watch().stop()
    if as_json:
        typer.echo(encode(result).decode(), nl=False)
    else:
        print_result(result)
    say(err, f"result: {path}")
