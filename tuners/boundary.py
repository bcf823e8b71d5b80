"""Where the winner stops being the best, from what the trials already measured.

Every complete trial keeps its requests, so its goodput under a tighter or looser SLO follows
without running anything. The factor on the limits at which another setting takes over is the
boundary of the recommendation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kllm.tuners.layouts import layout_name
from kllm.tuners.objective import Goal, Slo
from kllm.tuners.outcome import measure
from kllm.tuners.setup import describe
from kllm.tuners.space import Value
from kllm.tuners.study import Trial

FACTORS = tuple(float(f) for f in np.geomspace(0.25, 4.0, 33))  # on both limits; 1 is among them
TIE = 0.95  # single runs scatter: a setting is beaten by one that is more than 5 % better
NEAR = 0.95  # "within 5 %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """The best other setting at one factor."""

    factor: float
    winner: float  # objective, 0 where the SLO is missed
    other: float
    trial: Trial | None  # None: no other meets the SLO


def sweep(goal: Goal, winner: Trial, trials: Sequence[Trial]) -> list[Rival]:
    """The winner against the best other complete trial, along the SLO's strictness.

    Goodput and throughput only: both are rates, of which 0 is the worst.
    """
    others = [t for t in trials if t.measured and t.number != winner.number]
    rows = []
    for factor in FACTORS:
        slo = goal.slo.scaled(factor)
        values = [(_value(goal, slo, t), t) for t in others]
        best, trial = max(values, key=lambda pair: pair[0], default=(0.0, None))
        rows.append(
            Rival(
                factor=factor,
                winner=_value(goal, slo, winner),
                other=best,
                trial=trial if best > 0 else None,
            )
        )
    return rows


def _value(goal: Goal, slo: Slo, trial: Trial) -> float:
    outcome = trial.outcome
    if outcome is None:
        return 0.0
    metrics = measure(outcome, slo)
    meets = metrics.get("attainment", 0.0) >= slo.attainment
    return metrics.get(goal.objectives[0].metric, 0.0) if meets else 0.0


def region(rows: Sequence[Rival]) -> tuple[float, float] | None:
    """The factors around 1 for which nothing beats the winner; None if something does at 1."""
    holds = [row.winner > 0 and row.winner >= TIE * row.other for row in rows]
    middle = min(range(len(rows)), key=lambda i: abs(np.log(rows[i].factor)))
    if not holds[middle]:
        return None
    low = high = middle
    while low > 0 and holds[low - 1]:
        low -= 1
    while high + 1 < len(rows) and holds[high + 1]:
        high += 1
    return rows[low].factor, rows[high].factor


def near_values(
    goal: Goal, winner: Trial, trials: Sequence[Trial], names: Sequence[str]
) -> dict[str, list[Value]]:
    """By parameter: the values of complete trials within 5 % of the winner in every objective."""
    found: dict[str, list[Value]] = {name: [winner.settings[name]] for name in names}
    for trial in trials:
        if trial.measured and goal.feasible(trial.metrics) and _near(goal, trial, winner):
            for name in names:
                if trial.settings[name] not in found[name]:
                    found[name].append(trial.settings[name])
    return {name: sorted(values, key=lambda v: (str(type(v)), v)) for name, values in found.items()}


def _near(goal: Goal, trial: Trial, winner: Trial) -> bool:
    for objective in goal.objectives:
        value, best = trial.metrics[objective.metric], winner.metrics[objective.metric]
        ratio = value / best if objective.sign > 0 else best / value
        if ratio < NEAR:
            return False
    return True


def statement(
    goal: Goal, rows: Sequence[Rival], default: Mapping[str, Value], free: Sequence[str]
) -> str:
    """The boundary in one sentence, with the swept range."""
    span = f"{rows[0].factor:g} to {rows[-1].factor:g} times"
    found = region(rows)
    if found is None:
        return f"Another trial was more than 5 % better already at {goal.slo}."
    low, high = found
    parts = [
        f"Best of the measured settings for limits of {low:.2g} to {high:.2g} times {goal.slo}"
    ]
    below = next((r for r in reversed(rows) if r.factor < low), None)
    above = next((r for r in rows if r.factor > high), None)
    for row, where in ((below, "tighter"), (above, "looser")):
        if row is None:
            continue
        if row.trial is None:
            parts.append(f"with {where} limits no measured setting meets the SLO")
        else:
            words = describe(row.trial.settings, default, free)
            parts.append(f"with {where} limits {words} (trial {row.trial.number}) is better")
    if below is None and above is None:
        parts.append(f"no crossover within the swept range of {span} the limits")
    return "; ".join(parts) + "."


def runner_up(
    goal: Goal, winner: Trial, trials: Sequence[Trial], again: Mapping[int, float]
) -> str:
    """How far the best other layout is behind, and where it takes over, from measured trials.

    Args:
        winner: of the recommended layout.
        trials: all that count.
        again: by trial, the first objective when it was measured again; counts more than the trial.
    """
    ours = layout_name(winner.settings)
    others = [t for t in trials if t.metrics and layout_name(t.settings) != ours]
    first = goal.objectives[0]
    fine = [t for t in others if t.measured and goal.feasible(t.metrics)]
    if not fine:
        return _none_else(goal, others)

    def value(trial: Trial) -> float:
        return again.get(trial.number, trial.metrics[first.metric])

    best = max(fine, key=lambda t: first.sign * value(t))
    one, other = value(winner), value(best)
    behind = 1 - other / one if first.sign > 0 else other / one - 1
    side = "behind" if behind >= 0 else "ahead"
    words = (
        f"The runner-up layout is {layout_name(best.settings)} (trial {best.number}), "
        f"{abs(behind):.1%} {side} in {first.name} ({other:.4g} against {one:.4g} {first.unit})"
    )
    if not goal.slo.limited or first.sign < 0:
        return f"{words}."
    rows = sweep(goal, winner, [winner, *(t for t in others if t.measured)])
    found = region(rows)
    if found is None:
        return f"{words}."
    tighter = next((r for r in reversed(rows) if r.factor < found[0]), None)
    looser = next((r for r in rows if r.factor > found[1]), None)
    crossings = [
        f"with limits {where} {edge:.2g} times those, {layout_name(row.trial.settings)} is better"
        for row, edge, where in ((tighter, found[0], "below"), (looser, found[1], "above"))
        if row is not None and row.trial is not None
    ]
    span = f"{rows[0].factor:g} to {rows[-1].factor:g} times"
    crossing = "; ".join(crossings) or f"no other layout takes over for limits of {span} those"
    return f"{words}; {crossing}."


def _none_else(goal: Goal, others: Sequence[Trial]) -> str:
    if not others:
        return "No other layout gave a figure."
    nearest = max(others, key=lambda t: t.metrics.get("output_tokens_per_s", 0.0))
    name = layout_name(nearest.settings)
    if nearest.measured:
        return f"No other layout met {goal.slo}; the nearest was {name} (trial {nearest.number})."
    return (
        f"No other layout ran to its end; the nearest, {name} (trial {nearest.number}), was "
        f"stopped: {nearest.reason}."
    )
