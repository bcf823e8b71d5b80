"""Recording an exhaustive grid with the engine on this machine."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from kllm import hardware
from kllm.errors import ConfigError, KllmError
from kllm.tuners.grid import Header, read_lines, record
from kllm.tuners.outcome import Outcome
from kllm.tuners.setup import (
    Request,
    Setup,
    calibrated_overhead,
    predictor,
    prepare,
    prior_of,
    sized,
)
from kllm.tuners.space import Value
from kllm.tuners.trial import WorkerRunner, memory_limit


def record_grid(
    path: Path,
    request: Request,
    *,
    progress: Callable[[int, int, Outcome], None],
) -> None:
    """Measure every valid point to its end; continues a file that was cut short.

    Args:
        path: a .jsonl file.
        request: model and workload. The SLO plays no part: replayed searches choose one.
        progress: told points done, points in all and the last outcome.

    Raises:
        ConfigError, CapacityError, DataError: what cannot be recorded.
        KllmError: the default settings cannot run.
    """
    if path.suffix == ".gz":
        raise ConfigError(
            f"a grid is recorded line by line and {path} asks for a compressed file; record a "
            ".jsonl file and compress it afterwards"
        )
    setup = prepare(request)
    runner = WorkerRunner(memory_limit_bytes=memory_limit(setup.device))
    try:
        header, _ = read_lines(path)
        if header is None:
            header = new_header(setup, request, runner)
        count = int(header.identity["workload"]["num_requests"])
        workload = replace(setup.workload, num_requests=count)

        def measure(settings: Mapping[str, Value]) -> Outcome:
            return runner.run(setup.space.config(settings), workload)

        record(path, header, measure, seed=request.seed, progress=progress)
    finally:
        runner.close()


def new_header(setup: Setup, request: Request, runner: WorkerRunner) -> Header:
    """What is recorded, with the workload sized and the cost model calibrated by a pilot run."""
    pilot = runner.run(setup.base, setup.workload)
    if pilot.state == "failed":
        raise KllmError(f"the default settings cannot run: {pilot.reason}")
    if request.num_requests is None:
        setup = replace(setup, workload=sized(setup.workload, pilot))
    ceilings = hardware.ceilings(setup.resolved.device)
    overhead = calibrated_overhead(setup, ceilings, pilot)
    prior = prior_of(setup, predictor(setup, ceilings, overhead_s=overhead))
    return Header(
        identity=setup.identity(),
        site=setup.space.site,
        base=setup.space.base,
        candidates=setup.space.describe(),
        concurrency=setup.workload.concurrency,
        predicted=prior.logs.tolist() if prior else [],
        predicted_slo=prior.slo_logs.tolist() if prior else [],
    )
