"""What the measured points of `ring-vs-allgather` say, beside what was predicted and published."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from kllm.bench.record import Record
from kllm.bench.ring_predictions import LAYOUT, tokens
from kllm.config import EngineConfig
from kllm.models.devices import choose_device
from kllm.parallel.link import parse_link
from kllm.results.claims import claim_of, status_of
from kllm.results.compare import number

CLAIM = "ring-vs-allgather/throughput_change_pct"
CLAIM_ISL = 512 * 1024
CLOSE_PCT = 5.0  # how much slower than the better kind the automatic choice may be
ALIKE = 0.01  # difference of two single rounds that may be noise
Row = Mapping[str, Any]


def conditions(sliced: bool, config: EngineConfig) -> list[str]:
    """What every number of a run rests on."""
    notes = [
        "Times of a prompt are put together from steps (chunks) measured at both ends of it and "
        "between; throughput counts the tokens of all ranks at this scale.",
        "Throughputs are medians over the rounds, a ratio is that of a ring's and all-gather's, "
        "and its interval is from rounds drawn anew (bootstrap).",
        "Memory is above the weights, on a rank that does not own the prompt; its owner, which "
        "decodes it, holds all of its KV with each kind.",
    ]
    if sliced:
        notes.append(
            f"Rank {config.slice_rank} is sliced; rank cp - 1 owns the prompt. Exposed seconds are "
            "those of the context-parallel group alone."
        )
    else:
        notes.append("Transfers are real; how much of them is exposed is not measured then.")
    if choose_device(config.device).type == "cpu":
        notes.append("On a CPU peaks are KV and the buffers that are exchanged, computed.")
    return notes


def conclude(record: Record) -> None:
    """Set verdict, boundary and the rows of the claim."""
    rows = record.ok_rows("sweep")
    record.verdict = " ".join(map(_verdict, _groups(rows, *LAYOUT))) or (
        "No point could be measured both as a ring and with all-gather."
    )
    found = [*_along_length(rows), *_along_chunk(rows), *_along_bandwidth(rows)]
    record.boundary = " ".join(found) or "No boundary can be told without measured points."
    few = sum("ratio_lo" not in row for row in rows)
    if few:
        record.notes.append(
            f"{few} of {len(rows)} points were measured in fewer than 3 rounds: their "
            "differences may be noise."
        )
    _kernel(record)
    _exposed(record)
    _balance(record)
    _replicated(record, rows)
    _claim(record, rows)
    choices = record.ok_rows("predictions")
    if choices:
        near = sum(1 for row in choices if row["auto_loss_pct"] <= CLOSE_PCT)
        worst = max(row["auto_loss_pct"] for row in choices)
        record.notes.append(
            f"cp_kind=auto is within {CLOSE_PCT:g} % of the better kind in {near} of "
            f"{len(choices)} points; the most that it loses is {worst:.3g} %."
        )


def _kernel(record: Record) -> None:
    """How fast a dense step of a ring is at best."""
    rows = [row for row in record.rows.get("block kernel", []) if row["chosen"]]
    if rows:
        best = max(rows, key=lambda row: row["of_matmul_pct"])
        record.notes.append(
            f"A dense step of a ring ({best['attention']}, {tokens(best['queries'])} queries, "
            f"{tokens(best['keys'])} keys) reaches {number(best['tflops_per_s'])} TFLOP/s with "
            f"{best['kernel']}, {best['of_matmul_pct']:.3g} % of the measured matmul rate."
        )


def _exposed(record: Record) -> None:
    """How much a ring exposes where its transfers should be hidden."""
    rows = [row for row in record.rows.get("exposure", []) if row["predicted_hidden"]]
    shares = [row["ring_exposed_share"] for row in rows if row["ring_exposed_share"] is not None]
    if shares:
        record.notes.append(
            f"In {len(shares)} of {len(record.rows['exposure'])} points computation on a block is "
            "predicted to take longer than its transfer; there a ring exposes at most "
            f"{100 * max(shares):.3g} % of its transfers."
        )


def _balance(record: Record) -> None:
    """How much longer the busiest rank takes than the mean one, where every rank was measured."""
    rows = [row for row in record.rows.get("balance", []) if row["measured_over_mean"] is not None]
    if rows:
        worst = max(rows, key=lambda row: row["measured_over_mean"])
        record.notes.append(
            "Run on every rank of a ring in turn, steps of the longest prompt take the busiest "
            f"rank at most {worst['measured_over_mean']:.3g} times as long as the mean rank "
            f"({_about(worst)}, ISL {tokens(worst['prompt_tokens'])}; by the pairs of tokens that "
            f"it attends to, {worst['critical_path_over_mean']:.3g})."
        )


def _replicated(record: Record, rows: Sequence[Row]) -> None:
    """What replicated prompts trade, in one sentence."""
    speed = [
        row["replicated_tokens_per_s"] / row["ring_tokens_per_s"]
        for row in rows
        if row.get("replicated_tokens_per_s") is not None
    ]
    memory = [row["replicated_kv_gib"] / row["kv_gib"] for row in record.rows.get("memory", [])]
    if speed and memory:
        record.notes.append(
            "Replicated prompts (every rank keeps all entries, so that only new ones travel) have "
            f"{_range(speed)} times the throughput of a ring, for up to {max(memory):.3g} times "
            "the KV memory of a rank while a prompt is computed."
        )


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _about(row: Row) -> str:
    return f"{row['model']}, cp {row['cp']}, chunk {tokens(row['chunk'])}"


def _groups(rows: Sequence[Row], *keys: str) -> list[list[Row]]:
    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in keys)

    order = {key(row): i for i, row in reversed(list(enumerate(rows)))}
    ranked = sorted(rows, key=lambda row: order[key(row)])
    return [list(group) for _, group in groupby(ranked, key)]


def _verdict(rows: Sequence[Row]) -> str:
    """The best and the worst point of the longest prompt."""
    longest = max(row["prompt_tokens"] for row in rows)
    here = sorted(
        (row for row in rows if row["prompt_tokens"] == longest), key=lambda row: row["ratio"]
    )
    first = here[0]
    text = (
        f"{_about(first)} ({first['attention']}), ISL {tokens(longest)}: a ring "
        f"has {here[-1]['ratio']:.2f} times the throughput of all-gather over {here[-1]['link']}"
    )
    if len(here) > 1:
        text += f" and {first['ratio']:.2f} times over {first['link']}"
    return text + "."


def crossing_points(points: Sequence[tuple[float, float]]) -> list[tuple[float, bool]]:
    """Where the ratio passes 1 along a variable, and whether the ring is the faster one above.

    Args:
        points: (variable, ratio), in any order.

    Returns:
        Found on straight lines between neighbours, logarithms on both axes.
    """
    found = []
    for (x0, y0), (x1, y1) in pairwise(sorted(points)):
        if (y0 >= 1) != (y1 >= 1):
            share = math.log(y0) / (math.log(y0) - math.log(y1))
            found.append((x0 * (x1 / x0) ** share, y1 >= 1))
    return found


def _spots(
    rows: Sequence[Row],
    value: Callable[[Row], float],
    write: Callable[[float], str],
    variable: str,
) -> str:
    """Where along a variable the faster kind changes, in words.

    Points whose interval holds 1 do not tell which kind is faster and are left out, as are those
    of too few rounds for one that lie within ALIKE of it.
    """
    told = [row for row in rows if not _alike(row)]
    low, high = (write(f(map(value, rows))) for f in (min, max))
    span = f"at {variable} {low}" if low == high else f"in the swept range, {variable} {low} to "
    span += "" if low == high else high
    if not told:
        return f"the repeats show no difference {span}"
    unclear = f" ({len(rows) - len(told)} of {len(rows)} points show no difference)"
    found = [
        f"a ring {'wins' if above else 'loses'} from {variable} {write(at)} on"
        for at, above in crossing_points([(value(row), row["ratio"]) for row in told])
    ] or [f"a ring is {'faster' if told[0]['ratio'] >= 1 else 'slower'} {span}"]
    return "; ".join(found) + (unclear if len(told) < len(rows) else "")


def _alike(row: Row) -> bool:
    if row.get("ratio_lo"):
        return bool(row["ratio_lo"] <= 1 <= row["ratio_hi"])
    return bool(abs(row["ratio"] - 1) <= ALIKE)


def _along_length(rows: Sequence[Row]) -> Iterator[str]:
    """Along the prompt's length, for each layout and link."""
    for group in _groups(rows, *LAYOUT, "link"):
        spots = _spots(group, lambda row: float(row["prompt_tokens"]), tokens, "ISL")
        yield f"{_about(group[0])}, over {group[0]['link']}: {spots}."


def _along_chunk(rows: Sequence[Row]) -> Iterator[str]:
    """Along the tokens of a step, at the longest prompt over each link."""
    longest = max((row["prompt_tokens"] for row in rows), default=0)
    here = [row for row in rows if row["prompt_tokens"] == longest]
    for group in _groups(here, "model", "cp", "link"):
        if len(group) > 1:
            first = group[0]
            about = f"{first['model']}, cp {first['cp']}, ISL {tokens(longest)}"
            spots = _spots(group, lambda row: float(row["chunk"]), tokens, "chunk")
            yield f"{about}, over {first['link']}: {spots}."


def _along_bandwidth(rows: Sequence[Row]) -> Iterator[str]:
    """Along the link's bandwidth, at the longest prompt of each layout."""
    for group in _groups(rows, *LAYOUT):
        longest = max(row["prompt_tokens"] for row in group)
        here = [row for row in group if row["prompt_tokens"] == longest]
        if len(here) > 1:
            spots = _spots(here, _gb_per_s, _gigabytes, "bandwidth")
            yield f"{_about(here[0])}, ISL {tokens(longest)}: {spots}."


def _gigabytes(rate: float) -> str:
    return f"{rate:.3g} GB/s" if rate < 1000 else f"{rate:,.0f} GB/s"


def _gb_per_s(row: Row) -> float:
    return parse_link(row["link"]).bytes_per_s / 1e9


def _claim(record: Record, rows: Sequence[Row]) -> None:
    """The published gain beside what each point at its length reached."""
    published = claim_of(CLAIM)
    here = [row for row in rows if row["prompt_tokens"] == CLAIM_ISL]
    if not here:
        record.notes.append(
            f"Claim: {published.statement} +{published.published} %; not measured, as no point of "
            f"this run has an ISL of {tokens(CLAIM_ISL)}."
        )
        return
    scale = record.header.scale
    for row in here:
        change = 100 * (row["ratio"] - 1)
        record.row(
            "claim",
            {
                "claim": f"+{published.published} % at ISL {tokens(CLAIM_ISL)}",
                "measured_pct": change,
                "fidelity": record.header.fidelity,
                "model": row["model"],
                "attention": row["attention"],
                "cp": row["cp"],
                "chunk": row["chunk"],
                "link": row["link"],
                "status": status_of(published, change, scale),
            },
        )
    best = max(here, key=lambda row: row["ratio"])
    gain = 100 * (best["ratio"] - 1)
    record.add(published.metric, gain, unit="%", direction="higher")
    changes = [100 * (row["ratio"] - 1) for row in here]
    reached = [
        row
        for row, change in zip(here, changes, strict=True)
        if status_of(published, change, scale) == "reproduced"
    ]
    record.notes.append(
        f"Claim: {published.statement} +{published.published} %; largest measured "
        f"{gain:+.3g} % ({_about(best)}, {best['attention']}, "
        f"{best['link']}); reproduced in {len(reached)} of {len(here)} points"
        + (": " + ", ".join(f"{_about(row)}, {row['link']}" for row in reached) if reached else "")
        + "."
    )
