"""Runs a bench and stores its result, whatever happens on the way."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from kllm.bench.base import Bench, Context
from kllm.bench.record import Record, Subject
from kllm.config import EngineConfig
from kllm.errors import KllmError
from kllm.models.load import resolve
from kllm.results.schema import RunResult


def run_bench(
    bench: Bench, ctx: Context, target: Path, command: Sequence[str] = ()
) -> tuple[RunResult, Path]:
    """Run a bench and store its result; Ctrl-C stores what was measured so far.

    Returns:
        The result (`interrupted` among its `extra` values says whether it is complete) and its
        path.

    Raises:
        KeyboardInterrupt: interrupted before anything was measured.
        KllmError: what the engine and the store raise.
    """
    with Record(subject_of(bench, ctx.config, command), target) as record:
        try:
            bench.measure(ctx, record)
        except KeyboardInterrupt:
            record.interrupted = True
            if not record.values:
                raise
        except KllmError as error:
            if not record.values:
                raise
            raise type(error)(f"{error}; {record.kept}") from error
        bench.conclude(record)
        return record.finish()


def subject_of(bench: Bench, config: EngineConfig, command: Sequence[str]) -> Subject:
    """What the result says about the run before it starts.

    Raises:
        ConfigError: the model cannot be resolved.
    """
    resolved = resolve(config)
    settings = asdict(replace(config, scale=resolved.scale, dtype=resolved.dtype))
    layout = settings.pop("parallel")
    for known in ("model", "scale", "dtype", "fidelity"):
        settings.pop(known)
    return Subject(
        name=bench.name,
        model=resolved.name,
        scale=resolved.scale,
        dtype=resolved.dtype,
        # A bench that compares fidelities has several, and says which is the weakest.
        fidelity=getattr(bench, "fidelity", config.fidelity),
        command=tuple(command),
        layout=layout,
        workload=bench.workload(),
        settings=settings | {"device": resolved.device, "kv_dtype": resolved.kv_dtype},
    )
