"""What a study leaves behind: a result, a recipe and a report, all from stored trials."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from kllm import __version__, hardware
from kllm.bench.record import Clocks, code_commit, new_run_id
from kllm.recipes.schema import (
    Boundary,
    Hardware,
    Measured,
    Recipe,
    SloLimits,
    engine_changes,
)
from kllm.recipes.schema import save as save_recipe
from kllm.results.report import render_html
from kllm.results.schema import Fingerprint, Metric, RunResult, Series
from kllm.results.store import save as save_result
from kllm.results.store import slug, write_atomic
from kllm.tuners import boundary, layout_output
from kllm.tuners.finish import Comparison, verdict
from kllm.tuners.importance import importance
from kllm.tuners.layouts import layout_name
from kllm.tuners.objective import Objective
from kllm.tuners.outcome import METRICS, PER_GPU
from kllm.tuners.setup import Setup, describe
from kllm.tuners.space import Settings
from kllm.tuners.study import Trial

# What a recipe quotes; everything else is in the result.
QUOTED = (
    "goodput_tokens_per_s",
    PER_GPU,
    "output_tokens_per_s",
    "attainment",
    "ttft_p50_ms",
    "ttft_p90_ms",
    "tpot_p50_ms",
    "tpot_p90_ms",
    "e2e_p50_ms",
    "peak_memory_gib",
)
STATES = {"complete": "complete", "stopped": "pruned", "pruned": "pruned", "failed": "failed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Where things are."""

    result: Path
    report: Path
    recipe: Path | None  # None: nothing can be recommended


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """A finished study."""

    study: str
    setup: Setup
    trials: Sequence[Trial]
    best: Trial | None  # meets the SLO
    comparison: Comparison | None  # None: there is no best
    sentence: str  # when there is no best: why
    ended: str  # why the search ended
    started_at: datetime
    duration_s: float
    command: tuple[str, ...] = ()

    @property
    def recommended(self) -> Settings:
        """The best trial's settings, or the default ones where those are no better."""
        keep = self.comparison is None or self.comparison.keeps_default or self.best is None
        return self.setup.space.default if keep or self.best is None else self.best.settings

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.best is None or self.comparison is None:
            return self.sentence
        space = self.setup.space
        words = describe(self.best.settings, space.default, space.free)
        return verdict(self.setup.goal, self.comparison, words)

    @property
    def rivals(self) -> list[Trial]:
        """The trials that the recommendation is measured by.

        A best trial that was measured again and is no better than the default says nothing by
        its first, lucky run; neither does one that did not hold up.
        """
        if self.comparison is None:
            return list(self.trials)
        gone = {t.number for t in self.comparison.dropped}
        if self.comparison.keeps_default and self.best is not None:
            gone.add(self.best.number)
        return [t for t in self.trials if t.number not in gone]

    @property
    def misses_slo(self) -> bool:
        """Whether the recommended settings do not meet the SLO when measured again."""
        return self.comparison is not None and self.comparison.misses_slo(self.setup.goal)

    @property
    def recommended_trial(self) -> Trial | None:
        """The complete trial that ran the recommended settings."""
        wanted = dict(self.recommended)
        return next((t for t in self.trials if t.measured and dict(t.settings) == wanted), None)

    @property
    def slo_sweep(self) -> list[boundary.Rival]:
        """The recommendation against the best other trial under tighter and looser limits.

        Empty without a recommendation, without limits or where they are missed, or for an
        objective that is no rate.
        """
        goal, trial = self.setup.goal, self.recommended_trial
        if trial is None or self.misses_slo or not goal.slo.limited or goal.objectives[0].sign < 0:
            return []
        return boundary.sweep(goal, trial, self.rivals)


def write(findings: Findings, folder: Path) -> tuple[RunResult, Files]:
    """Write everything.

    Raises:
        DataError: the folder cannot be written.
    """
    stem = slug(findings.study)
    result = result_of(findings)
    result_path = save_result(result, folder / f"{stem}.json")
    recipe_path = None
    if findings.best is not None and findings.comparison is not None:
        recipe_path = folder / f"{stem}.toml"
        save_recipe(recipe_of(findings, result), recipe_path)
    report_path = folder / f"{stem}.html"
    write_atomic(report_path, render_html([result]).encode())
    return result, Files(result=result_path, report=report_path, recipe=recipe_path)


def result_of(findings: Findings) -> RunResult:
    """The study as one result document."""
    setup, comparison = findings.setup, findings.comparison
    clocks = Clocks()
    clocks.look()
    config = setup.config(findings.recommended)
    return RunResult(
        run_id=new_run_id(findings.started_at),
        command=findings.command,
        kind="tune",
        name=question(setup),
        started_at=findings.started_at.isoformat(timespec="seconds"),
        model=setup.resolved.name,
        scale=setup.resolved.scale,
        dtype=setup.resolved.dtype,
        fidelity=setup.base.fidelity,
        duration_s=findings.duration_s,
        kllm_version=__version__,
        commit=code_commit(),
        fingerprint=Fingerprint.from_dict(hardware.fingerprint(tuple(clocks.seen))),
        layout=asdict(config.parallel),
        workload=setup.workload.to_dict() | {"slo": setup.goal.slo.to_dict()},
        settings=dict(findings.recommended),
        metrics=metrics_of(comparison) if comparison else {},
        series=tuple(series_of(findings)),
        notes=tuple(notes_of(findings)),
        verdict=findings.verdict,
        boundary=boundary_of(findings),
        extra={
            "direction": setup.goal.objectives[0].direction,
            "objectives": [o.name for o in setup.goal.objectives],
            "ended": findings.ended,
            "study": findings.study,
        },
    )


def question(setup: Setup) -> str:
    """What was asked, without the study's name: two answers to it can be compared."""
    return slug("-".join(["tune", setup.workload.name, *(o.name for o in setup.goal.objectives)]))


def metrics_of(comparison: Comparison) -> dict[str, Metric]:
    """The recommended settings' metrics, and the default's under "default."."""
    found: dict[str, Metric] = {}
    sides = [("", comparison.winner), ("default.", comparison.default)]
    if comparison.keeps_default and comparison.conclusion != "default only":
        sides = [("", comparison.default), ("best_trial.", comparison.winner)]
    for prefix, runs in sides:
        for name, (unit, direction) in METRICS.items():
            values = [m[name] for m in runs if name in m]
            if values:
                found[prefix + name] = Metric.of(values, unit=unit, direction=direction)
    return found


def series_of(findings: Findings) -> list[Series]:
    """Trials, importance, Pareto front and the sweep of the SLO, as reports draw them."""
    setup, goal = findings.setup, findings.setup.goal
    first = goal.objectives[0]
    shown = [t for t in findings.trials if t.state in STATES]
    rows = [_trial_row(t, findings) for t in shown]
    units = {f"metric.{name}": unit for name, (unit, _) in METRICS.items()}
    found = [Series.of("trials", rows, units | {"objective": first.unit})] if rows else []
    measured = [
        (index, t.metrics)
        for t in shown
        if t.metrics and (index := setup.space.find(t.settings)) is not None
    ]
    shares = importance(setup.space, goal, measured, setup.seed)
    if shares:
        ranked = [{"parameter": name, "importance": share} for name, share in shares.items()]
        found.append(Series.of("importance", ranked))
    if not goal.single:
        found.append(_front(goal.objectives[:2], shown, findings))
    if setup.deployment is not None:
        found += layout_output.series_of(goal, setup.deployment, shown, with_front=goal.single)
    found += _slo_sweep(findings)
    return found


def _trial_row(trial: Trial, findings: Findings) -> dict[str, Any]:
    goal, space = findings.setup.goal, findings.setup.space
    counts = trial.measured and goal.feasible(trial.metrics)
    reason = trial.reason
    if trial.measured and not counts:
        reason = f"misses its SLO: {trial.metrics['attainment']:.0%} of requests met the limits"
    return {
        "number": trial.number,
        "state": STATES[trial.state],
        "reason": reason,
        "objective": trial.metrics.get(goal.objectives[0].metric) if counts else None,
        **({"layout": layout_name(trial.settings)} if space.joint else {}),
        **{f"param.{name}": trial.settings[name] for name in space.free},
        **{f"metric.{name}": trial.metrics.get(name) for name in METRICS},
    }


def _front(objectives: Sequence[Objective], trials: Sequence[Trial], findings: Findings) -> Series:
    complete = [t for t in trials if t.measured]
    front = findings.setup.goal.front([t.metrics for t in complete])
    columns = sorted(objectives, key=lambda o: o.sign)  # a latency goes on the x axis
    rows = [
        {
            "number": complete[i].number,
            **{f"metric.{o.metric}": complete[i].metrics[o.metric] for o in columns},
        }
        for i in front
    ]
    return Series.of("pareto", rows, {f"metric.{o.metric}": o.unit for o in columns})


def _slo_sweep(findings: Findings) -> list[Series]:
    goal, rows = findings.setup.goal, findings.slo_sweep
    if not rows:
        return []
    unit = goal.objectives[0].unit
    name = goal.objectives[0].name
    table = [
        {
            "slo_factor": row.factor,
            f"recommended_{name}": row.winner,
            f"best_other_{name}": row.other,
        }
        for row in rows
    ]
    units = {f"recommended_{name}": unit, f"best_other_{name}": unit}
    return [Series.of("sweep:SLO strictness", table, units)]


def boundary_of(findings: Findings) -> str | None:
    """Where the recommendation stops being the best, one sentence."""
    setup, trial = findings.setup, findings.recommended_trial
    goal, space = setup.goal, setup.space
    if trial is None or findings.misses_slo:
        return None
    if rows := findings.slo_sweep:
        sentence = boundary.statement(goal, rows, space.default, space.free)
    else:
        near = boundary.near_values(goal, trial, findings.trials, _alone(findings))
        kept = "; ".join(f"{k} {', '.join(map(str, v))}" for k, v in near.items() if len(v) > 1)
        no_other = "No other setting came within 5 % of it."
        sentence = f"Within 5 % of it came: {kept}." if kept else no_other
    if len(space.rows) > 1:
        dropped = findings.comparison.dropped if findings.comparison else ()
        gone = {t.number for t in dropped}
        counting = [t for t in findings.trials if t.number not in gone]
        sentence += " " + boundary.runner_up(goal, trial, counting, _again(findings))
    return sentence


def _again(findings: Findings) -> dict[int, float]:
    """The first objective of the trials that were measured again, by trial: medians."""
    comparison, setup = findings.comparison, findings.setup
    if comparison is None or findings.best is None:
        return {}
    metric = setup.goal.objectives[0].metric
    default = dict(setup.space.default)
    base = next((t for t in findings.trials if t.measured and dict(t.settings) == default), None)
    sides = ((findings.best, comparison.winner), (base, comparison.default))
    return {
        trial.number: float(np.median([m[metric] for m in runs]))
        for trial, runs in sides
        if trial is not None and runs
    }


def _alone(findings: Findings) -> list[str]:
    """Free parameters that can be changed without changing another one."""
    space = findings.setup.space
    return [name for name in space.free if name not in space.joint]


def notes_of(findings: Findings) -> list[str]:
    """What a reader has to know about the numbers."""
    setup = findings.setup
    notes = [f"The search ended because {findings.ended}."]
    counts = {state: sum(t.state == state for t in findings.trials) for state in STATES}
    notes.append(
        f"{counts['complete']} trials ran to their end, {counts['stopped']} were stopped early, "
        f"{counts['failed']} failed, {counts['pruned']} were ruled out before they ran."
    )
    if setup.deployment is not None:
        notes += layout_output.notes_of(setup.deployment, setup.config(findings.recommended))
    if setup.resolved.weights is None:
        notes.append("Random weights: timings and memory are real, the text is meaningless.")
    if findings.recommended["kv_dtype"] != setup.space.default["kv_dtype"]:
        notes.append(
            f"KV is kept as {findings.recommended['kv_dtype']}: outputs change slightly, and the "
            "loss of quality was not measured."
        )
    return notes


def recipe_of(findings: Findings, result: RunResult) -> Recipe:
    """The recommended settings as a recipe."""
    setup, goal = findings.setup, findings.setup.goal
    # The deployment's settings: which rank was run, and how, belongs to the measurement.
    config = setup.space.config(findings.recommended)
    machine = hardware.detect()
    gpu = machine.gpus[0] if setup.device == "cuda" else None
    memory = gpu.memory_bytes if gpu else machine.memory_bytes
    slo = goal.slo.to_dict()
    engine = engine_changes(config)
    for name in ("device", "fidelity", "link", "slice_rank"):
        engine.pop(name, None)  # and "cuda:3" would not suit another machine
    return Recipe(
        name=findings.study,
        model=setup.base.model,
        scale=setup.resolved.scale,
        dtype=setup.resolved.dtype,
        hardware=Hardware(
            device="cuda" if gpu else "cpu",
            name=setup.device_name,
            count=config.parallel.world,
            memory_gib=round(memory / 2**30, 1),
        ),
        workload=setup.workload.to_dict(),
        engine=engine,
        measured={
            name: Measured(unit=m.unit, median=m.median, ci95=m.ci95)
            for name, m in result.metrics.items()
            if m.median is not None and name in QUOTED
        },
        fidelity=result.fidelity,
        verdict=findings.verdict,
        objectives=[o.name for o in goal.objectives],
        slo=SloLimits(**slo) if slo else None,
        boundary=_recipe_boundary(findings),
        results=[result.run_id],
        commit=result.commit,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _recipe_boundary(findings: Findings) -> Boundary | None:
    goal = findings.setup.goal
    trial = findings.recommended_trial
    sentence = boundary_of(findings)
    if trial is None or sentence is None:
        return None
    rows = findings.slo_sweep
    factor = boundary.region(rows) if rows else None
    near: Mapping[str, list[Any]] = boundary.near_values(
        goal, trial, findings.trials, _alone(findings)
    )
    return Boundary(statement=sentence, slo_factor=factor, near=dict(near))
