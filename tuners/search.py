"""The search: chooses points, has them measured, and stores what came out. Nothing is lost.

Every trial is stored as it ends, with its metrics, its reason and enough of its run to judge it
again under another SLO. What died half-way is found on resume and run again, once.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import optuna
import psutil
from optuna.trial import FrozenTrial, TrialState

from kllm.results.schema import plain
from kllm.tuners.interrupt import Interrupt
from kllm.tuners.objective import Goal
from kllm.tuners.outcome import Outcome, measure, to_plain
from kllm.tuners.sampler import PointSampler, evidence
from kllm.tuners.space import Space, Value
from kllm.tuners.study import Trial, read_trial

RAN = ("complete", "stopped", "failed")
CHOOSING_S = 0.05  # how often a trial that is being chosen elsewhere is looked at
CHOOSING_LIMIT_S = 10.0  # after this its process is taken for dead
UNOWNED_S = 60.0  # a running trial without an owner for this long was killed while it began


class Listener:
    """Told what happens; the base class ignores it."""

    def started(self, number: int, settings: Mapping[str, Value]) -> None:
        """A trial begins."""

    def ended(self, trial: Trial, best: Trial | None) -> None:
        """A trial ended, also by being pruned; `best` is the best so far."""

    def resumed(self, trials: int, retried: int) -> None:
        """An existing study goes on: how many trials it has, and how many are run again."""


Measure = Callable[[Mapping[str, Value], Trial | None], Outcome]


class Search:
    """Runs trials of one study until something says enough.

    Args:
        study: from `open_study`.
        space: its points.
        goal: what better means.
        sampler: the study's.
        measure: runs settings; is given the best trial so far, to stop what cannot win.
        listener: told what happens.
        interrupt: asked between trials.
        lease_s: a trial that another machine began longer ago than this is taken for dead.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        study: optuna.Study,
        space: Space,
        goal: Goal,
        sampler: PointSampler,
        measure: Measure,
        *,
        listener: Listener | None = None,
        interrupt: Interrupt | None = None,
        lease_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.study, self.space, self.goal = study, space, goal
        self.sampler, self.measure = sampler, measure
        self.listener = listener or Listener()
        self.interrupt = interrupt or Interrupt()
        self.lease_s = lease_s
        self.clock = clock

    def trials(self) -> list[Trial]:
        """All trials as stored, in order."""
        return [read_trial(t, self.space) for t in self.study.get_trials(deepcopy=False)]

    def best(self, trials: Sequence[Trial] | None = None) -> Trial | None:
        """The best complete trial by the first objective, or None."""
        best: Trial | None = None
        for trial in self.trials() if trials is None else trials:
            if trial.measured and self.goal.better(trial.metrics, best.metrics if best else None):
                best = trial
        return best

    def ran(self) -> int:
        """Trials that were run, anywhere; pruned, repeated and running ones do not count."""
        return sum(t.state in RAN for t in self.trials())

    def recover(self) -> int:
        """Mark trials whose process is dead and queue their points once more.

        Returns:
            How many are run again.
        """
        retried = 0
        before = [t.params for t in self.study.get_trials(deepcopy=False) if _retry(t)]
        for trial in self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            if not self._abandoned(trial):
                continue
            again = bool(trial.params) and trial.params not in before
            self._interrupted(trial, again)
            retried += again
        return retried

    def _running_elsewhere(self) -> int:
        """Trials that other processes run; those of dead ones are queued again."""
        running = (TrialState.RUNNING,)
        if not self.study.get_trials(deepcopy=False, states=running):
            return 0
        self.recover()
        return len(self.study.get_trials(deepcopy=False, states=running))

    def _abandoned(self, trial: FrozenTrial) -> bool:
        age = time.time() - trial.datetime_start.timestamp() if trial.datetime_start else 0.0
        owner = trial.user_attrs.get("owner")
        if owner is None:
            return age > UNOWNED_S
        if owner["host"] != socket.gethostname():
            return age > self.lease_s
        return bool(owner != _owner_of(owner["pid"]))

    def _interrupted(self, trial: FrozenTrial, again: bool) -> None:
        storage, trial_id = self.study._storage, trial._trial_id
        if again or not trial.params:
            storage.set_trial_user_attr(trial_id, "retry", True)
            storage.set_trial_user_attr(trial_id, "reason", "interrupted; run again")
        else:
            reason = "interrupted twice at this point; it may be what ends the process"
            storage.set_trial_user_attr(trial_id, "reason", reason)
        self.study.tell(trial.number, state=TrialState.FAIL)
        if again:
            self.study.enqueue_trial(trial.params)

    def run(self, *, trials: int | None, timeout_s: float | None = None) -> str:
        """Search.

        Args:
            trials: of the whole study, those of earlier runs included; None: no limit.
            timeout_s: no trial is begun after this long.

        Returns:
            Why it ended, one sentence.

        Raises:
            KeyboardInterrupt: the running trial was cut short; it is stored as interrupted.
        """
        begin = self.clock()
        if existing := len(self.study.get_trials(deepcopy=False)):
            self.listener.resumed(existing, self.recover())
        while True:
            if self.interrupt.asked:
                return "interrupted"
            # Whoever ran a trial elsewhere may have died since.
            others = self._running_elsewhere()
            if trials is not None and self.ran() + others >= trials:
                last = ", the last of them in another process" if others else ""
                return f"all {trials} trials were run{last}"
            if timeout_s is not None and self.clock() - begin >= timeout_s:
                return f"the time limit of {timeout_s:.0f} s was reached"
            chosen = self._choose()
            if isinstance(chosen, str):
                return chosen
            if trials is not None and self._begun_before(chosen[0].number) >= trials:
                self._give_up(chosen[0], "another process began the last trial at the same time")
                continue
            self._run_one(*chosen)

    def _choose(self) -> tuple[optuna.Trial, int] | str:
        """A trial of a point that nobody else runs, or why there is none.

        The first choice may be one that is ruled out: it is stored with the reason,
        and the next choice avoids all such points.
        """
        self.sampler.avoid_hopeless = False
        while True:
            seen = evidence(self.study.get_trials(deepcopy=False), self.space)
            hopeless = self.sampler.ruled_out(seen)
            if not self._waiting():
                left = len(self.space.points) - len(seen.taken)
                if left == 0:
                    return "every valid combination was tried"
                if left == len(hopeless):
                    return "every combination that was not tried cannot win or will not fit"
            trial = self.study.ask(self.sampler.distributions)
            trial.set_user_attr("owner", _owner_of(os.getpid()))
            index = self.space.find({**self.space.default, **trial.params})
            assert index is not None  # the sampler only knows points of the space
            if (rival := self._chosen_elsewhere(trial)) is not None:
                self._give_up(trial, f"trial {rival} of another process has this point")
            elif reason := hopeless.get(index):
                trial.set_user_attr("reason", reason)
                self.study.tell(trial, state=TrialState.PRUNED)
                self._ended(trial.number)
                self.sampler.avoid_hopeless = True
            else:
                return trial, index

    def _give_up(self, trial: optuna.Trial, reason: str) -> None:
        """Record that a trial was not run; its point is free again."""
        trial.set_user_attr("retry", True)
        trial.set_user_attr("reason", reason)
        self.study.tell(trial, state=TrialState.FAIL)

    def _begun_before(self, number: int) -> int:
        """Trials with a lower number that were run or are running, anywhere."""
        earlier = [t for t in self.trials() if t.number < number]
        ran = sum(t.state in RAN for t in earlier)
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return ran + sum(t.number < number for t in running)

    def _waiting(self) -> bool:
        """Whether an interrupted point is queued."""
        return bool(self.study.get_trials(deepcopy=False, states=[TrialState.WAITING]))

    def _chosen_elsewhere(self, mine: optuna.Trial) -> int | None:
        """Number of an earlier trial with the same point, when two processes chose at once.

        Like Lamport's bakery (1974): numbers are given out in order, whoever has the lower one
        keeps the point, and the higher one first waits until all lower ones have chosen.
        """
        waited = 0.0
        while True:
            earlier = [
                t
                for t in self.study.get_trials(deepcopy=False)
                if t.number < mine.number and not t.user_attrs.get("retry")
            ]
            for other in earlier:
                if other.params == mine.params and other.state != TrialState.WAITING:
                    return other.number
            choosing = any(t.state == TrialState.RUNNING and not _settled(t) for t in earlier)
            if not choosing or waited >= CHOOSING_LIMIT_S:
                return None
            time.sleep(CHOOSING_S)
            waited += CHOOSING_S

    def _run_one(self, trial: optuna.Trial, index: int) -> None:
        settings = self.space.settings(index)
        self.listener.started(trial.number, settings)
        try:
            outcome = self.measure(settings, self.best())
        except BaseException:
            # Ctrl-C, or an error of ours: either way this trial has no result and may be rerun.
            frozen = self.study.get_trials(deepcopy=False)[trial.number]
            self._interrupted(frozen, again=True)
            raise
        self._store(trial, outcome)
        self._ended(trial.number)

    def _store(self, trial: optuna.Trial, outcome: Outcome) -> None:
        metrics = measure(outcome, self.goal.slo)
        values = self.goal.values(metrics)
        if outcome.state == "complete" and values is None:
            outcome = replace(outcome, state="failed", reason="it gave no figure to compare")
        trial.set_user_attr("outcome", plain(to_plain(outcome)))
        trial.set_user_attr("metrics", metrics)
        if outcome.reason:
            trial.set_user_attr("reason", outcome.reason)
        if hasattr(trial, "set_constraint") and self.goal.slo.limited and metrics:
            trial.set_constraint("slo", self.goal.deficit(metrics))  # Optuna 5 shows feasibility
        if outcome.state == "complete":
            self.study.tell(trial, values)
        else:
            stopped = outcome.state == "stopped"
            self.study.tell(trial, state=TrialState.PRUNED if stopped else TrialState.FAIL)

    def _ended(self, number: int) -> None:
        trials = self.trials()
        self.listener.ended(trials[number], self.best(trials))


def _retry(trial: FrozenTrial) -> bool:
    return bool(trial.user_attrs.get("retry")) and bool(trial.params)


def _settled(trial: FrozenTrial) -> bool:
    """Whether a running trial has its point (the owner is written right after it)."""
    return "owner" in trial.user_attrs


def _owner_of(pid: int) -> dict[str, Any] | None:
    """What tells a process from a later one with the same number; None when it is gone."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return {"host": socket.gethostname(), "pid": pid, "started": process.create_time()}
    except psutil.Error:
        return None
