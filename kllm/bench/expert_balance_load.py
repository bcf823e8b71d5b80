"""What a placement of experts makes of a trace: loads of ranks, computed from counted choices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kllm.bench.expert_balance_trace import Trace
from kllm.parallel.expert_placement import ExpertPlacement, balanced, in_order

Loads = NDArray[np.float64]
Counts = NDArray[np.int64]
DRIFTS = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)  # share of the experts that change their popularity
DRAWS = 20  # ways in which they do


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Max/mean load of the ranks under one kind of placement; 1 is even.

    Layers come one after the other and each waits for its busiest rank, so values of several
    layers (and steps) are the sum of their maxima over the sum of their means.
    """

    whole: float  # loads added up over the half that is judged
    by_step: float  # step by step: what no placement can foresee comes on top
    layers: tuple[float, ...]  # as `whole`, of each layer
    drift: tuple[float, ...]  # as `whole`, by `drifts`


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A number of redundant experts on the second half of a trace."""

    in_order: Balance
    placed: Balance  # by the first half


def judge(trace: Trace, redundant: int, ranks: int) -> Judged:
    """Place by the first half of a trace, judge on the second.

    Raises:
        ConfigError: as `Trace.halves` and `in_order`.
    """
    seen, later = trace.halves()
    usual = [in_order(trace.num_experts, redundant, ranks)] * len(trace.layers)
    placed = [balanced(counts, redundant, ranks) for counts in seen.totals().tolist()]
    return Judged(in_order=_balance(later, usual), placed=_balance(later, placed))


def _balance(trace: Trace, placements: Sequence[ExpertPlacement]) -> Balance:
    shares = np.stack([rank_shares(placement) for placement in placements])
    totals = trace.totals()
    loads = rank_loads(totals, shares)
    return Balance(
        whole=max_over_mean(loads),
        by_step=max_over_mean(rank_loads(trace.counts, shares)),
        layers=tuple(max_over_mean(layer) for layer in loads),
        drift=tuple(_drifted(totals, shares, moved) for moved in drifts(trace.num_experts)),
    )


def rank_shares(placement: ExpertPlacement) -> Loads:
    """[E, ranks] the part of an expert's tokens that goes to a rank: its copies take turns."""
    shares = np.zeros((placement.num_experts, placement.ranks))
    for expert, slots in enumerate(placement.copies()):
        for slot in slots:
            shares[expert, slot // placement.per_rank] += 1 / len(slots)
    return shares


def rank_loads(counts: Counts, shares: Loads) -> Loads:
    """[..., layers, ranks] of counts [..., layers, E] and shares [layers, E, ranks]."""
    loads: Loads = np.einsum("...le,ler->...lr", counts, shares)
    return loads


def max_over_mean(loads: Loads) -> float:
    """Sum of the largest of each row over the sum of the rows' means, of loads [..., ranks]."""
    mean = loads.mean(axis=-1).sum()
    return float(loads.max(axis=-1).sum() / mean) if mean else 1.0


def drifts(num_experts: int) -> tuple[int, ...]:
    """How many experts change their popularity: what DRIFTS come to. One alone cannot."""
    return tuple(sorted({round(share * num_experts) for share in DRIFTS} - {1}))


def _drifted(totals: Counts, shares: Loads, moved: int) -> float:
    """Mean max/mean after `moved` random experts of each layer passed their popularity round."""
    rng = np.random.default_rng(moved)  # the same changes for every placement
    found = []
    for _ in range(DRAWS if moved else 1):
        counts = totals.copy()
        for layer in counts:
            chosen = rng.permutation(len(layer))[:moved]
            layer[chosen] = layer[np.roll(chosen, 1)]
        found.append(max_over_mean(rank_loads(counts, shares)))
    return math.fsum(found) / len(found)
