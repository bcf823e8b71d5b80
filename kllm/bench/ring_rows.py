"""Rows of `kllm bench ring-vs-allgather`: what was measured of a layout, beside predictions."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from kllm.bench import ring_predictions as predicted
from kllm.bench.prompt_time import Cost, RankTimes, critical_path
from kllm.bench.record import Record
from kllm.bench.ring_arms import GIB, Arm
from kllm.bench.ring_kernel import BlockShape, block_rates
from kllm.bench.ring_predictions import Sweep
from kllm.bench.shared_prompt import KINDS, SharedPrompt
from kllm.hardware import ceilings, release_memory
from kllm.parallel.link import Link
from kllm.parallel.overlap import ALL_GATHER, REPLICATED, RING
from kllm.parallel.stripes import Stripes
from kllm.results.stats import median_ci, median_ratio

SHARDED = (RING, ALL_GATHER)  # what is compared: as much KV on each rank
MOST_KEYS = 64 << 10  # of the block whose kernel is timed; the rate of longer ones is the same
UNITS = {
    **{f"{kind}_tokens_per_s": "tokens/s" for kind in KINDS},
    **{f"{kind}_exposed_s": "s" for kind in KINDS},
    **{f"{kind}_transfer_s": "s" for kind in KINDS},
    **{f"{kind}_peak_gib": "GiB" for kind in KINDS},
    "kv_gib": "GiB",
    "replicated_kv_gib": "GiB",
}


def block_kernel(record: Record, sweep: Sweep, isl: int) -> None:
    """Rows of how fast each kernel is that can take a dense step of the ring on this device.

    Args:
        isl: prompt tokens, which the ranks share.
    """
    config, device = sweep.config, sweep.resolved.device
    for kind in sweep.attention:
        if kind.dense is None:
            continue
        ranks = config.parallel.cp
        shape = BlockShape(
            queries=max(1, min(sweep.chunk, isl) // ranks),
            keys=max(1, min(isl // ranks, MOST_KEYS)),
            heads=kind.dense,
        )
        dtype = sweep.resolved.dtype
        rates = block_rates(shape, ceilings(device), dtype=dtype, device=device)
        for name, rate in rates.items():
            row = {
                "model": sweep.resolved.name,
                "attention": kind.name,
                "kernel": name,
                "queries": shape.queries,
                "keys": shape.keys,
                "tflops_per_s": rate.flops_per_s / 1e12,
                "of_matmul_pct": 100 * rate.share_of_matmul,
                "chosen": "yes" if rate.chosen else "",
            }
            record.row("block kernel", row, {"tflops_per_s": "TFLOP/s", "of_matmul_pct": "%"})
    release_memory()  # prompts are fitted into the memory that is free


def mark(
    record: Record,
    sweep: Sweep,
    isls: Iterable[int],
    links: Mapping[str, Link | None],
    state: str,
    reason: str,
) -> None:
    """Rows of points that were not measured.

    Args:
        state: "failed" or LEFT_OUT.
    """
    for isl, link in product(sorted(set(isls)), links):
        at = sweep.about | {"link": link, "prompt_tokens": isl}
        record.row("sweep", at | {"state": state, "reason": reason})


def report(
    record: Record,
    sweep: Sweep,
    prompt: SharedPrompt,
    arms: Mapping[str, Arm],
    isls: Sequence[int],
    links: Mapping[str, Link | None],
) -> None:
    """Rows of everything that was measured of a layout, and of what was predicted."""
    about = sweep.about
    for isl in isls:
        record.row("memory", about | _memory(prompt, arms, isl), UNITS)
        balance = _balance(prompt.stripes, isl, sweep.chunk, arms[RING].ranks)
        record.row("balance", about | balance)
        for link in links:
            costs = _costs(arms, link, isl, sweep.chunk)
            at = about | {"link": link, "prompt_tokens": isl}
            row = {"attention": sweep.attention_names}
            record.row("sweep", at | row | _throughput(costs, arms, isl), UNITS)
            if any(cost.transfer_s for found in costs.values() for cost in found):
                hidden = all(row["hidden"] for row in predicted.overlap(sweep, isl, link))
                record.row("exposure", at | _exposure(costs) | {"predicted_hidden": hidden}, UNITS)
            if all(costs[kind] for kind in SHARDED):
                seconds = {kind: _median(costs[kind], "seconds") for kind in SHARDED}
                row = predicted.prediction(sweep, isl, link, seconds)
                record.row("predictions", at | row, predicted.UNITS)
    for link in links:
        for row in predicted.overlap(sweep, max(isls), link):
            record.row("overlap", about | row, predicted.UNITS)
    first = next(iter(links))
    record.notes.append(predicted.pass_kv_or_q(sweep, max(isls), first))
    if record.ok_rows("sweep"):
        record.notes.append(predicted.predicted_crossings(sweep, max(isls), first))


def _costs(arms: Mapping[str, Arm], link: str, isl: int, chunk: int) -> dict[str, list[Cost]]:
    """The kinds' costs of a prompt in the rounds that all of them have run."""
    found = {kind: arm.prompts(link, isl, chunk) for kind, arm in arms.items()}
    rounds = min((len(costs) for costs in found.values() if costs), default=0)
    return {kind: costs[:rounds] for kind, costs in found.items()}


def _median(costs: Sequence[Cost], name: str) -> float:
    return float(median_ci([getattr(cost, name) for cost in costs])[0])


def _memory(prompt: SharedPrompt, arms: Mapping[str, Arm], isl: int) -> dict[str, Any]:
    """KV of the prompt, and the most that it and a step's tensors took together."""
    row: dict[str, Any] = {"prompt_tokens": isl}
    row["kv_gib"] = prompt.need(RING, isl).typical / GIB  # all-gather's as well
    row["replicated_kv_gib"] = prompt.need(REPLICATED, isl).typical / GIB
    for kind, arm in arms.items():
        costs = [cost for link in arm.rounds for cost in arm.prompts(link, isl, prompt.chunk)]
        peak = prompt.need(kind, isl).typical + max((c.passing_bytes for c in costs), default=0)
        row[f"{kind}_peak_gib"] = peak / GIB if costs else None
    return row


def _throughput(
    costs: Mapping[str, Sequence[Cost]], arms: Mapping[str, Arm], isl: int
) -> dict[str, Any]:
    """Cells of one point; those of a kind that could not run stay empty."""
    row: dict[str, Any] = {
        f"{kind}_tokens_per_s": isl / _median(found, "seconds") if found else None
        for kind, found in costs.items()
    }
    reasons = dict.fromkeys(arm.refused[isl] for arm in arms.values() if isl in arm.refused)
    if reasons:
        row["reason"] = "; ".join(reasons)
    if not all(costs[kind] for kind in SHARDED):
        return row | {"ratio": None, "state": "failed"}
    # The throughput of a ring over that of all-gather: their times the other way round.
    ratio, interval = median_ratio(
        [cost.seconds for cost in costs[RING]], [cost.seconds for cost in costs[ALL_GATHER]]
    )
    row["ratio"] = ratio
    if interval:
        row |= {"ratio_lo": interval[0], "ratio_hi": interval[1]}
    return row | {"state": "ok"}


def _exposure(costs: Mapping[str, Sequence[Cost]]) -> dict[str, Any]:
    """Seconds that transfers of the context-parallel group take, and those that are waited for."""
    row: dict[str, Any] = {}
    for kind, found in costs.items():
        transfer = _median(found, "transfer_s") if found else None
        exposed = _median(found, "exposed_s") if found else None
        row |= {f"{kind}_transfer_s": transfer, f"{kind}_exposed_s": exposed}
        row[f"{kind}_exposed_share"] = exposed / transfer if exposed and transfer else None
    return row


def _balance(stripes: Stripes, isl: int, chunk: int, ranks: RankTimes | None) -> dict[str, Any]:
    """The busiest rank of each step over the mean rank: pairs of tokens, and measured times."""
    measured = ranks if ranks is not None and ranks.tokens == isl else None
    return {
        "prompt_tokens": isl,
        "critical_path_over_mean": critical_path(isl, chunk, stripes),
        "measured_over_mean": measured.over_mean if measured else None,
        "measured_steps": len(measured.seconds) if measured else None,
    }
