"""Base against new: are they comparable, and what changed for certain.

Both sides may be several results of the same run (a folder of repeats). Hardware, model, scale,
dtype, workload, layout and fidelity must be equal, or the difference measures them and not the
change; software versions and engine settings may differ, since they are what is usually compared,
and are listed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from kllm.errors import ConfigError
from kllm.results.schema import Metric, RunResult
from kllm.results.stats import (
    DEFAULT_MARGIN,
    MIN_REPEATS,
    Judgement,
    Verdict,
    holm,
    judge,
    judge_exact,
)

MUST_MATCH = ("kind", "name", "model", "scale", "dtype", "fidelity", "layout", "workload")
HARDWARE = ("cpu", "cores", "link")
CONFIDENCE = 0.99
TABLE_COLUMNS = ("metric", "unit", "base", "new", f"change [{CONFIDENCE:.0%} interval]", "verdict")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailOn:
    """When a comparison counts as failed: `worse` by more than `margin`."""

    margin: float = DEFAULT_MARGIN

    @classmethod
    def parse(cls, text: str) -> "FailOn":
        """Read "worse" or "worse:5%".

        Raises:
            ConfigError: anything else.
        """
        word, colon, amount = text.partition(":")
        try:
            margin = float(amount.removesuffix("%")) / 100 if colon else DEFAULT_MARGIN
        except ValueError:
            margin = -1.0
        percent_missing = bool(colon) and not amount.endswith("%")
        if word != "worse" or percent_missing or not 0 < margin < 1:
            raise ConfigError(
                f"--fail-on takes 'worse' or 'worse:5%' (above 0 % and below 100 %), got '{text}'"
            )
        return cls(margin=margin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric of a comparison."""

    metric: str
    unit: str
    base: float | None  # medians
    new: float | None
    judgement: Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Every metric that both sides have, and what makes the sides different."""

    base: str
    new: str
    fidelity: str
    margin: float
    rows: tuple[Row, ...]
    verdict: str  # one sentence
    allowed: tuple[str, ...] = ()  # differences that were explicitly allowed
    notes: tuple[str, ...] = field(default=())

    @property
    def regressed(self) -> tuple[str, ...]:
        """Names of the metrics that are worse."""
        return tuple(r.metric for r in self.rows if r.judgement.verdict == "worse")


def compare(
    base: Sequence[RunResult],
    new: Sequence[RunResult],
    *,
    fail_on: FailOn | None = None,
    allow_different: Sequence[str] = (),
) -> Comparison:
    """Compare two runs, or two sets of repeats of a run.

    Args:
        base: the reference; several results of one run are merged.
        new: the candidate.
        fail_on: sets the margin; the default is 5 %.
        allow_different: fields that may differ, such as "layout" or "workload.isl".

    Raises:
        ConfigError: the sides, or the results of one side, are not comparable, or they have no
            metric in common. The message lists the differences.
    """
    one, two = merge(base, allow_different), merge(new, allow_different)
    differences = incomparable(one, two)
    refused = [d for f, d in differences.items() if not _allowed(f, allow_different)]
    if refused:
        raise ConfigError(
            "these results cannot be compared: " + "; ".join(refused) + ". Measure both sides "
            "alike, or allow a difference with --allow-different FIELD"
        )
    margin = (fail_on or FailOn()).margin
    shared = [name for name in one.metrics if name in two.metrics]
    if not shared:
        raise ConfigError(f"'{one.run_id}' and '{two.run_id}' have no metric in common")
    paired = one.interleave is not None and one.interleave == two.interleave
    judged = holm(
        {n: judge_metric(one.metrics[n], two.metrics[n], margin, paired) for n in shared},
        alpha=1 - CONFIDENCE,
    )
    rows = tuple(
        Row(
            metric=name,
            unit=one.metrics[name].unit,
            base=one.metrics[name].median,
            new=two.metrics[name].median,
            judgement=judged[name],
        )
        for name in shared
    )
    return Comparison(
        base=label(one),
        new=label(two),
        fidelity=one.fidelity if one.fidelity == two.fidelity else "mixed",
        margin=margin,
        rows=rows,
        verdict=sentence(rows, margin),
        allowed=tuple(differences.values()),
        notes=_notes(one, two, paired),
    )


def judge_metric(base: Metric, new: Metric, margin: float, paired: bool) -> Judgement:
    """The verdict on one metric, by the kind of its repeats."""
    if base.direction == "none" or new.direction != base.direction:
        reason = "" if new.direction == base.direction else "the two sides disagree on direction"
        return Judgement(verdict="not judged", reason=reason)
    if base.unit != new.unit:
        return Judgement(verdict="not judged", reason=f"units differ: {base.unit} and {new.unit}")
    if not base.values or not new.values:
        return Judgement(verdict="can't tell", reason="one side has no values")
    higher = base.direction == "higher"
    if base.sample == new.sample == "exact":
        return judge_exact(base.values, new.values, higher_is_better=higher, margin=margin)
    if "request" in (base.sample, new.sample):
        reason = "values of single requests of one run are not repeats of the run"
        return Judgement(verdict="can't tell", reason=reason)
    return judge(
        base.values,
        new.values,
        higher_is_better=higher,
        paired=paired and not base.dropped and not new.dropped,
        processes=base.sample == new.sample == "process",
        margin=margin,
        confidence=CONFIDENCE,
    )


def merge(results: Sequence[RunResult], allow_different: Sequence[str] = ()) -> RunResult:
    """Make one result of several of the same run.

    With MIN_REPEATS results or more each gives its median, which then are independent processes;
    with fewer their repeats are joined.

    Raises:
        ConfigError: none were given, or they are of different runs.
    """
    if not results:
        raise ConfigError("there is no result to compare")
    first = results[0]
    if len(results) == 1:
        return first
    for other in results[1:]:
        wrong = [
            d for f, d in incomparable(first, other).items() if not _allowed(f, allow_different)
        ]
        if wrong:
            raise ConfigError(
                f"results '{first.run_id}' and '{other.run_id}' of one side are of different "
                f"runs: {'; '.join(wrong)}"
            )
    names = [n for n in first.metrics if all(n in r.metrics for r in results)]
    metrics = {n: _merge_metric([r.metrics[n] for r in results]) for n in names}
    return replace(first, metrics=metrics, interleave=None)


def _merge_metric(parts: Sequence[Metric]) -> Metric:
    first = parts[0]
    medians = [p.median for p in parts if p.median is not None]
    values, sample = [v for p in parts for v in p.values], first.sample
    many = len(parts) >= MIN_REPEATS and first.sample != "exact"
    if many or first.sample == "request":
        values, sample = medians, "process"
    return Metric.of(values, unit=first.unit, direction=first.direction, sample=sample)


def incomparable(base: RunResult, new: RunResult) -> dict[str, str]:
    """Field to sentence, for everything whose difference would be measured by mistake."""
    found: dict[str, str] = {}
    for name in MUST_MATCH:
        one, two = getattr(base, name), getattr(new, name)
        if isinstance(one, Mapping):
            found |= _dict_differences(name, one, two)
        elif one != two:
            found[name] = f"{name} is {one} and {two}"
    for name in HARDWARE:
        one, two = getattr(base.fingerprint, name), getattr(new.fingerprint, name)
        if one is not None and two is not None and one != two:
            found[f"fingerprint.{name}"] = f"{name} is {one} and {two}"
    gpus = [", ".join(g.name for g in r.fingerprint.gpus) or "none" for r in (base, new)]
    known = base.fingerprint.platform is not None and new.fingerprint.platform is not None
    if known and gpus[0] != gpus[1]:
        found["fingerprint.gpus"] = f"GPUs are {gpus[0]} and {gpus[1]}"
    return found


def _dict_differences(name: str, one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, str]:
    keys = [k for k in {**one, **two} if one.get(k) != two.get(k)]
    return {f"{name}.{k}": f"{name}.{k} is {one.get(k)} and {two.get(k)}" for k in keys}


def _allowed(difference: str, allowed: Sequence[str]) -> bool:
    return any(difference == a or difference.startswith(f"{a}.") for a in allowed)


def _notes(base: RunResult, new: RunResult, paired: bool) -> tuple[str, ...]:
    notes = [f"{d}." for d in _dict_differences("settings", base.settings, new.settings).values()]
    libraries = base.fingerprint.libraries, new.fingerprint.libraries
    notes += [f"{d}." for d in _dict_differences("libraries", *libraries).values()]
    drivers = [{g.driver for g in r.fingerprint.gpus} for r in (base, new)]
    if drivers[0] != drivers[1]:
        notes.append("The GPU drivers differ.")
    if base.fingerprint.platform is None or new.fingerprint.platform is None:
        notes.append("A side does not say which machine it ran on; this was not checked.")
    if paired:
        notes.append("The runs were interleaved: repeats are compared pair by pair.")
    for side, names in (("base", base.metrics.keys() - new.metrics.keys()),
                        ("new", new.metrics.keys() - base.metrics.keys())):  # fmt: skip
        if names:
            notes.append(f"Only {side} has {', '.join(sorted(names))}.")
    return tuple(notes)


def label(result: RunResult) -> str:
    """How a comparison names one side."""
    commit = f", commit {result.commit[:10]}" if result.commit else ""
    return f"{result.name} {result.run_id}{commit}"


def sentence(rows: Sequence[Row], margin: float) -> str:
    """The verdict over all metrics."""
    by: dict[Verdict, list[str]] = {}
    for row in rows:
        by.setdefault(row.judgement.verdict, []).append(row.metric)
    if worse := by.get("worse"):
        return f"Worse by more than {margin:.0%}: {', '.join(worse)}."
    unsure = by.get("can't tell", [])
    if better := by.get("better"):
        counts = [f"{len(better)} better: {', '.join(better)}"]
        counts += [f"{len(by['same'])} the same"] if "same" in by else []
        counts += [f"{len(unsure)} can't be told"] if unsure else []
        return f"Nothing is found worse by more than {margin:.0%} ({'; '.join(counts)})."
    if unsure:
        judged = len(unsure) + len(by.get("same", []))
        return (
            f"No regression found, but the repeats cannot tell for {len(unsure)} of {judged} "
            f"metrics: {', '.join(unsure)}."
        )
    if "same" not in by:
        return "No metric could be judged."
    return f"The same within {margin:.0%}."


def change_text(judgement: Judgement) -> str:
    """The ratio as a signed percentage, with its interval."""
    if judgement.ratio is None:
        return "–"
    text = f"{judgement.ratio - 1:+.1%}"
    if judgement.interval is not None:
        text += f" [{judgement.interval[0] - 1:+.1%}, {judgement.interval[1] - 1:+.1%}]"
    return text


def number(value: float | None) -> str:
    """Four significant digits, without an exponent for everyday sizes."""
    if value is None:
        return "–"
    if value != 0 and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table_cells(row: Row) -> list[str]:
    """One line of a printed comparison, under TABLE_COLUMNS."""
    found = row.judgement
    verdict = f"{found.verdict} ({found.reason})" if found.reason else found.verdict
    return [row.metric, row.unit, number(row.base), number(row.new), change_text(found), verdict]


def render_markdown(comparison: Comparison) -> str:
    """A comment for a pull request."""
    lines = [
        f"**{comparison.verdict}**",
        "",
        f"base: {comparison.base}  ",
        f"new: {comparison.new}  ",
        f"fidelity: {comparison.fidelity}",
        "",
        f"| {' | '.join(TABLE_COLUMNS)} |",
        "|---|---|---:|---:|---:|---|",
    ]
    lines += [f"| {' | '.join(table_cells(row))} |" for row in comparison.rows]
    if comparison.allowed:
        lines += ["", "Allowed differences: " + "; ".join(comparison.allowed) + "."]
    if comparison.notes:
        lines += ["", *(f"- {note}" for note in comparison.notes)]
    return "\n".join(lines) + "\n"


def to_json(comparison: Comparison) -> str:
    """One JSON document."""
    raw = msgspec.json.encode(comparison)
    return msgspec.json.format(raw, indent=1).decode()
