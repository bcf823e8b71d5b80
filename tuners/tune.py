"""`kllm tune` as a library call: prepare, search, measure the winner again, write."""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import optuna

from kllm import hardware
from kllm.bench.workloads import Workload
from kllm.errors import ConfigError, DataError, KllmError
from kllm.results.schema import RunResult
from kllm.results.store import make_folder, remove_empty, slug
from kllm.tuners import output
from kllm.tuners.finish import Comparison, compare, pairs_within, ranked
from kllm.tuners.interrupt import Interrupt, listening
from kllm.tuners.outcome import Outcome, Progress
from kllm.tuners.resume import REQUEST, resumed
from kllm.tuners.sampler import PointSampler
from kllm.tuners.search import Listener, Search
from kllm.tuners.setup import (
    Request,
    Setup,
    beats_ceilings,
    calibrated_overhead,
    describe,
    pilot_workload,
    predictor,
    prepare,
    prior_of,
    sized,
)
from kllm.tuners.space import Settings
from kllm.tuners.stopping import LAYOUT_RACE_SLACK, RACE_SLACK, Rule, Stopper, rules_for
from kllm.tuners.storage import JOURNAL, open_storage, without_password
from kllm.tuners.study import Trial, newest_study, open_study, stored_identity
from kllm.tuners.trial import WorkerRunner, memory_limit

TRIALS = 24
TIMEOUT_FACTOR = 10  # times what the pilot took, weights included
TIMEOUT_FLOOR_S = 60.0
OVERHEAD = "step_overhead_s"  # what a study's first run found out
TRIAL_TIMEOUT = "trial_timeout_s"
STOPPING = "Stopping after the running trial; press Ctrl-C again to stop at once."


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to search; what to search is in `Request`."""

    output: Path
    trials: int = TRIALS
    timeout_s: float | None = None
    trial_timeout_s: float | None = None  # None: from the pilot run
    storage: str = ""  # "": a journal file in the output folder
    study: str = ""  # "": a new name, or on resume the newest
    resume: bool = False
    # Options of `kllm.tuners.resume` that the user gave: a resumed study has the others stored.
    # None: the request is complete.
    given: frozenset[str] | None = None

    @property
    def storage_url(self) -> str:
        """Where studies are kept."""
        return self.storage or f"{JOURNAL}{self.output / 'tune.journal'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """How a call ended."""

    study: str
    setup: Setup
    best: Trial | None
    interrupted: bool
    result: RunResult | None = None  # None: interrupted before the end
    files: output.Files | None = None
    comparison: Comparison | None = None
    sentence: str = ""  # why nothing can be recommended

    @property
    def misses_slo(self) -> bool:
        """Whether the recommended settings do not meet the SLO, as far as was measured."""
        return self.comparison is not None and self.comparison.misses_slo(self.setup.goal)


class Watcher(Listener):
    """What a user interface is told besides the trials; the base class ignores it."""

    def note(self, sentence: str) -> None:
        """Something worth a line."""

    def begun(self, study: str, setup: Setup, trials: int) -> None:
        """The search begins."""

    def comparing(self, trial: Trial, done: int, total: int) -> None:
        """A run of the final comparison begins: of a candidate, in turn with the default."""

    def running(self, share: float) -> None:
        """How much of its output a run has given, in a trial or in the final comparison."""


def tune(
    request: Request,
    options: Options,
    *,
    watcher: Watcher | None = None,
    runner: WorkerRunner | None = None,
) -> Tuned:
    """Tune.

    Raises:
        ConfigError, CapacityError, DataError: before anything is run, for what cannot be.
        KllmError: the default settings cannot run, or every trial failed.
        KeyboardInterrupt: Ctrl-C before the search, while there is nothing to store.
    """
    # Optuna would log every trial and warn of what it calls experimental.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    watcher, interrupt = watcher or Watcher(), Interrupt()
    begin, started_at = time.monotonic(), datetime.now(UTC)
    if options.resume and options.given is not None:
        storage = open_storage(options.storage_url, resume=True)
        name, request = resumed(storage, options.study, request, options.given)
        options = replace(options, study=name)
    setup = prepare(request)
    made = check_writable(options.output)
    runner = runner or WorkerRunner(memory_limit_bytes=memory_limit(setup.device))
    try:
        session = _Session(setup, request, options, watcher, runner, interrupt)
        session.open()
        with listening(interrupt, lambda: watcher.note(STOPPING)):
            try:
                ended = session.search.run(trials=options.trials, timeout_s=options.timeout_s)
                if ended != "interrupted":
                    return session.finish(ended, started_at, lambda: time.monotonic() - begin)
            except KeyboardInterrupt:
                pass  # asked twice: what was stored until now stays
            return session.interrupted()
    finally:
        runner.close()
        remove_empty(made)


def check_writable(folder: Path) -> list[Path]:
    """Make the output folder now: an hour later is too late to learn that it cannot be.

    Returns:
        The folders that were not there before.

    Raises:
        DataError: it cannot be made or written.
    """
    probe = folder / ".kllm-write-test"
    try:
        made = make_folder(folder)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise DataError(
            f"the output folder {folder} cannot be written ({error.strerror}); "
            "choose another with --output"
        ) from error
    return made


class _Session:
    """One run of `tune`."""

    def __init__(
        self,
        setup: Setup,
        request: Request,
        options: Options,
        watcher: Watcher,
        runner: WorkerRunner,
        interrupt: Interrupt,
    ) -> None:
        self.setup, self.request, self.options = setup, request, options
        self.watcher, self.runner, self.interrupt = watcher, runner, interrupt
        self.storage = open_storage(options.storage_url)
        self.name = options.study
        self.timeout_s = options.trial_timeout_s
        self.pilot: Outcome | None = None
        self.search: Search

    def open(self) -> None:
        """Find or create the study; a new one begins with a pilot run."""
        setup, ceilings = self.setup, hardware.ceilings(self.setup.resolved.device)
        if self.options.resume:
            self.name = self.name or newest_study(self.storage, setup.resolved.name)
            stored = stored_identity(self.storage, self.name)
            if self.request.num_requests is None:
                count = int(stored["workload"].get("num_requests", setup.workload.num_requests))
                setup = self._with_workload(replace(setup.workload, num_requests=count))
            overhead = float(stored.get(OVERHEAD, 0.0))
            if self.timeout_s is None:
                self.timeout_s = stored.get(TRIAL_TIMEOUT)
        else:
            self.name = self.name or default_name(setup)
            if self.name in optuna.get_all_study_names(self.storage):
                raise ConfigError(
                    f"study '{self.name}' exists already; continue it with --resume or choose "
                    "another --study"
                )
            pilot = self._pilot()
            if self.request.num_requests is None:
                setup = self._with_workload(sized(setup.workload, pilot, setup.trial_s))
            overhead = calibrated_overhead(setup, ceilings, pilot)
            if beats_ceilings(setup, ceilings, pilot):
                self.watcher.note(hardware.mark_beaten(ceilings))
            if self.timeout_s is None:
                self.timeout_s = max(TIMEOUT_FLOOR_S, TIMEOUT_FACTOR * pilot.total_s)
        predict = predictor(setup, ceilings, overhead_s=overhead)
        prior = prior_of(setup, predict, overhead_s=overhead)
        sampler = PointSampler(setup.space, setup.goal, prior=prior, seed=setup.seed)
        study = open_study(
            self.storage,
            self.name,
            goal=setup.goal,
            identity=setup.identity(),
            resume=self.options.resume,
            sampler=sampler,
            extra={
                OVERHEAD: overhead,
                TRIAL_TIMEOUT: self.timeout_s,
                REQUEST: msgspec.to_builtins(self.request),
            },
        )
        self.search = Search(
            study,
            setup.space,
            setup.goal,
            sampler,
            self._measure,
            listener=self.watcher,
            interrupt=self.interrupt,
        )
        self.watcher.begun(self.name, setup, self.options.trials)

    def _with_workload(self, workload: Workload) -> Setup:
        self.setup = replace(self.setup, workload=workload)
        return self.setup

    def _pilot(self) -> Outcome:
        """Run the default settings once: whether they work at all, and how long they take."""
        self.watcher.note("Loading the model and running the default settings once.")
        workload = pilot_workload(self.setup.workload, fixed=self.request.num_requests is not None)
        outcome = self._run(self.setup.space.default, workload=workload)
        if outcome.state == "failed":
            raise KllmError(f"the default settings cannot run: {outcome.reason}")
        self.pilot = outcome
        return outcome

    def _run(
        self, settings: Settings, rules: Sequence[Rule] = (), workload: Workload | None = None
    ) -> Outcome:
        """Measure settings; a run that the rules do not end runs to its end."""
        return self.runner.run(
            self.setup.config(settings),
            workload or self.setup.workload,
            rule=Stopper([self._told, *rules]),
            timeout_s=self.timeout_s,
        )

    def _told(self, progress: Progress) -> None:
        self.watcher.running(progress.tick.output_tokens / max(progress.num_output_tokens, 1))

    def _measure(self, settings: Settings, best: Trial | None) -> Outcome:
        if (pilot := self._pilot_of(settings)) is not None:
            return pilot
        rules = rules_for(
            self.setup.goal,
            concurrency=self.setup.workload.concurrency,
            best=best.outcome if best else None,
            best_metrics=best.metrics if best else {},
            slack=RACE_SLACK if self.setup.deployment is None else LAYOUT_RACE_SLACK,
        )
        return self._run(settings, rules.rules)

    def _pilot_of(self, settings: Settings) -> Outcome | None:
        """The pilot run, once, where it was of these settings and of this load: a trial saved."""
        pilot, self.pilot = self.pilot, None
        if pilot is None or dict(settings) != dict(self.setup.space.default):
            return None
        return pilot if pilot.num_requests == self.setup.workload.num_requests else None

    def interrupted(self) -> Tuned:
        """Where the study stands: the best complete trial, if it meets the SLO."""
        best = self.search.best()
        if best is not None and not self.setup.goal.feasible(best.metrics):
            best = None
        return Tuned(study=self.name, setup=self.setup, best=best, interrupted=True)

    def finish(self, ended: str, started_at: datetime, seconds: Callable[[], float]) -> Tuned:
        """Measure the winner again and write everything."""
        setup, trials = self.setup, self.search.trials()
        best, comparison, sentence = None, None, ""
        if candidates := ranked(setup.goal, trials):
            comparison = compare(
                setup.goal,
                candidates,
                setup.space.default,
                self._run,
                pairs=self._pairs(candidates[0], trials),
                progress=self.watcher.comparing,
                asked_to_stop=lambda: self.interrupt.asked,
            )
            best = comparison.trial
        else:
            sentence = nothing_meets(setup, trials)
        findings = output.Findings(
            study=self.name,
            setup=setup,
            trials=trials,
            best=best,
            comparison=comparison,
            sentence=sentence,
            ended=ended,
            started_at=started_at,
            duration_s=seconds(),
            command=("kllm", *map(without_password, sys.argv[1:])),
        )
        result, files = output.write(findings, self.options.output)
        return Tuned(
            study=self.name,
            setup=setup,
            best=best,
            interrupted=self.interrupt.asked,
            result=result,
            files=files,
            comparison=comparison,
            sentence=sentence,
        )

    def _pairs(self, winner: Trial, trials: list[Trial]) -> int:
        """How often the winner and the default are measured again."""
        default = dict(self.setup.space.default)
        rival = next((t for t in trials if t.measured and dict(t.settings) == default), winner)
        return pairs_within(sum(map(_seconds, trials)), _seconds(winner) + _seconds(rival))


def _seconds(trial: Trial) -> float:
    """That a trial took, without loading: the pilot's run may be one."""
    stored = trial.stored or {}
    return float(stored.get("warmup_s", 0.0) + stored.get("run_s", 0.0))


def default_name(setup: Setup) -> str:
    """A new name of a study for each call: model, workload and time."""
    now = datetime.now(UTC)
    return slug(f"tune-{setup.resolved.name}-{setup.workload.name}-{now:%Y%m%dT%H%M%S}")


def nothing_meets(setup: Setup, trials: list[Trial]) -> str:
    """Why nothing can be recommended, one sentence with the best that was attained."""
    tried = [t for t in trials if "attainment" in t.metrics]
    if not tried:
        reasons = [t.reason for t in trials if t.reason]
        return f"no trial gave a figure; the last one: {reasons[-1] if reasons else 'none ran'}"

    def merit(metrics: Mapping[str, float]) -> tuple[float, float]:
        return metrics["attainment"], -metrics.get("e2e_p50_ms", math.inf)

    best = max(tried, key=lambda t: merit(t.metrics))
    words = describe(best.settings, setup.space.default, setup.space.free)
    seen = ", ".join(
        f"p90 {name.upper()} {best.metrics[f'{name}_p90_ms']:.3g} ms"
        for name in ("ttft", "tpot")
        if f"{name}_p90_ms" in best.metrics
    )
    return (
        f"no setting meets {setup.goal.slo}; the closest, {words}, meets the limits for "
        f"{best.metrics['attainment']:.0%} of requests ({seen}); relax --slo or lower the load"
    )
