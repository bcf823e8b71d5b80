"""What a study over layouts leaves behind besides its trials: tables and notes."""

from collections.abc import Sequence
from typing import Any

from kllm.config import EngineConfig
from kllm.parallel.layout import short_name
from kllm.results.schema import Series
from kllm.tuners.layouts import GIB, Deployment, layout_name
from kllm.tuners.objective import Goal
from kllm.tuners.outcome import METRICS, PER_GPU
from kllm.tuners.study import Trial

TPOT = "tpot_p90_ms"
COMPARED = ("attainment", "ttft_p90_ms", TPOT, "output_tokens_per_s", PER_GPU, "peak_memory_gib")


def series_of(
    goal: Goal, deployment: Deployment, trials: Sequence[Trial], *, with_front: bool
) -> list[Series]:
    """The best trial of each layout, the Pareto front, and the layouts that were left out.

    Args:
        with_front: of goodput per GPU against TPOT; off where the objectives have one of their own.
    """
    found = []
    if rows := _by_layout(goal, trials):
        units = {name: METRICS[name][0] for name in COMPARED}
        found.append(Series.of("layouts", rows, units | {"objective": goal.objectives[0].unit}))
    if with_front and (front := front_of(goal, trials)):
        columns = {f"metric.{name}": METRICS[name][0] for name in (TPOT, PER_GPU)}
        rows = [
            {
                "number": trial.number,
                **{f"metric.{name}": trial.metrics[name] for name in (TPOT, PER_GPU)},
                "layout": layout_name(trial.settings),
            }
            for trial in front
        ]
        found.append(Series.of("pareto", rows, columns))
    if deployment.excluded:
        left_out = [
            {"layout": short_name(layout), "reason": why} for layout, why in deployment.excluded
        ]
        found.append(Series.of("layouts left out", left_out))
    return found


def front_of(goal: Goal, trials: Sequence[Trial]) -> list[Trial]:
    """Complete trials within the SLO that no other beats in both, by rising TPOT."""
    fine = [t for t in trials if t.measured and goal.feasible(t.metrics)]
    fine = [t for t in fine if TPOT in t.metrics and PER_GPU in t.metrics]
    front: list[Trial] = []
    for trial in sorted(fine, key=lambda t: (t.metrics[TPOT], -t.metrics[PER_GPU])):
        if not front or trial.metrics[PER_GPU] > front[-1].metrics[PER_GPU]:
            front.append(trial)
    return front


def _by_layout(goal: Goal, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """A row a layout: its best trial to the end, or how its trials ended."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(layout_name(trial.settings), []).append(trial)
    first = goal.objectives[0]
    rows = []
    for name, members in groups.items():
        best: Trial | None = None
        for trial in members:
            if trial.measured and goal.better(trial.metrics, best.metrics if best else None):
                best = trial
        row: dict[str, Any] = {"layout": name, "trials": len(members)}
        if best is None:
            row["state"] = members[-1].reason
        else:
            fine = goal.feasible(best.metrics)
            row |= {
                "state": "complete" if fine else "misses its SLO",
                "best_trial": best.number,
                "objective": best.metrics[first.metric] if fine else None,
                **{metric: best.metrics.get(metric) for metric in COMPARED},
            }
        rows.append(row)
    rows.sort(key=lambda row: -first.sign * (row.get("objective") or 0.0))
    return rows


def notes_of(deployment: Deployment, config: EngineConfig) -> list[str]:
    """What a reader has to know of the layouts' numbers.

    Args:
        config: of the recommended settings.
    """
    world = config.parallel.world
    if config.fidelity == "real":
        notes = [f"Fidelity real: all {world} ranks ran."]
    else:
        notes = [
            f"Fidelity rank-slice: one rank of {world} ran, over the link {config.link}. Under "
            "request-DP every group schedules its requests, and each step runs the busiest group's."
        ]
    if deployment.shape is not deployment.whole:
        layers = deployment.shape.dims.layers
        notes.append(
            f"Times are those of {layers} of {deployment.whole.dims.layers} layers; the SLO was "
            "applied to them as it stands."
        )
    if deployment.limited:
        notes.append(
            "The KV pool of each trial holds the tokens that the whole model would leave room for "
            f"on a rank of {(deployment.memory_bytes or 0) / GIB:.0f} GiB, activations not counted."
        )
    if deployment.excluded:
        total = len(deployment.allowed) + len(deployment.excluded)
        notes.append(
            f"{len(deployment.excluded)} of {total} valid layouts were left out because a rank "
            'cannot hold them; the table "layouts left out" says why.'
        )
    return notes
