"""`tune` with fake workers, as a program of its own that tests can interrupt and kill.

Usage: fake_tune.py OUTPUT DEEDS [--resume] [--trials=N]; prints a line for each event.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from kllm.config import EngineConfig
from kllm.tuners.setup import Request, Setup
from kllm.tuners.space import Value
from kllm.tuners.study import Trial
from kllm.tuners.trial import WorkerRunner
from kllm.tuners.tune import Options, Watcher, tune


class Lines(Watcher):
    def __init__(self, runner: WorkerRunner) -> None:
        self.runner = runner

    def note(self, sentence: str) -> None:
        print("note", sentence, flush=True)

    def begun(self, study: str, setup: Setup, trials: int) -> None:
        print("study", study, flush=True)

    def resumed(self, trials: int, retried: int) -> None:
        print("resumed", trials, retried, flush=True)

    def started(self, number: int, settings: Mapping[str, Value]) -> None:
        worker = self.runner._worker
        print("started", number, worker.process.pid if worker else 0, flush=True)

    def ended(self, trial: Trial, best: Trial | None) -> None:
        print("ended", trial.number, trial.state, flush=True)


def main() -> int:
    output, deeds, *flags = sys.argv[1:]
    trials = next((int(f.split("=")[1]) for f in flags if f.startswith("--trials=")), 8)
    runner = WorkerRunner(command=(sys.executable, "-m", "tests.tuners.fake_worker", deeds))
    request = Request(
        config=EngineConfig(model="deepseek-v4", scale="tiny", device="cpu"),
        slo="ttft=2s,tpot=50ms",
    )
    options = Options(output=Path(output), trials=trials, resume="--resume" in flags)
    tuned = tune(request, options, watcher=Lines(runner), runner=runner)
    print("best", tuned.best.number if tuned.best else None, flush=True)
    if tuned.files is not None:
        print("recipe", tuned.files.recipe, flush=True)
    return 130 if tuned.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
