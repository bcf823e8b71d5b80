"""The exchanges of experts' tokens against each other: DeepEP, all_to_all and all_gather."""

import statistics
from typing import Any

import torch

from kllm.bench.fidelity_rounds import FAILURES, Limit, Rounds
from kllm.bench.fidelity_sides import UNITS
from kllm.bench.record import Record
from kllm.config import EngineConfig, ParallelConfig
from kllm.errors import one_line
from kllm.models.load import resolve
from kllm.parallel import expert_deep_ep
from kllm.parallel.single import SingleComm

BACKENDS = ("deep_ep", "all_to_all", "all_gather")


def add_exchanges(
    record: Record, rounds: Rounds, world: int, limit: Limit, at: tuple[int, int]
) -> None:
    """Run a layout with each exchange where DeepEP loads, a row each; else note why it does not.

    Args:
        world: ranks, all of which run.
        at: points that are done, and points in all.
    """
    why = _why_not(rounds.ctx.config)
    if why is not None:
        record.notes.append(f"DeepEP was not measured: {why}.")
        return
    for backend in BACKENDS:
        row: dict[str, Any] = {"backend": backend, "fidelity": "real"}
        if limit.passed:
            record.row("expert exchange", row | limit.cells)
            continue
        layout = ParallelConfig(dp=world, ep=world, ep_backend=backend)
        try:
            values, _ = rounds.run(layout, ["real"], f"experts by {backend}", at)
        except FAILURES as error:
            record.row("expert exchange", row | {"state": "failed", "reason": one_line(error)})
            continue
        for what, repeats in values["real"].items():
            row[what] = statistics.median(repeats)
        record.row("expert exchange", row | {"state": "ok"}, UNITS)


def _why_not(config: EngineConfig) -> str | None:
    """Why DeepEP does not run here; None where that shows only on its ranks."""
    resolved = resolve(config)
    if expert_deep_ep.installed() and resolved.device.startswith("cuda"):
        return None
    device, dtype = torch.device(resolved.device), getattr(torch, resolved.dtype)
    return expert_deep_ep.problem(SingleComm(), resolved.config.hidden_size, 1, device, dtype)
