"""Which expert lies on which rank: whole experts, some of them more than once. No torch.

A rank has a number of slots; a slot holds one expert. Copies of an expert lie on different ranks
and share its tokens evenly. Without measured counts experts lie in order; with them the busiest
are copied and all are spread so that the busiest rank has as little to do as possible.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from kllm.config import ParallelConfig
from kllm.errors import ConfigError

GOOD_ENOUGH = 1.001  # max/mean load below which no better placement is looked for


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The expert in each slot; rank r has the slots [r S, (r + 1) S)."""

    num_experts: int
    ranks: int
    slots: tuple[int, ...]  # [ranks * S]

    @property
    def per_rank(self) -> int:
        """S: slots a rank."""
        return len(self.slots) // self.ranks

    @property
    def plain(self) -> bool:
        """Whether slot and expert are the same number."""
        return self.slots == tuple(range(self.num_experts))

    def held(self, rank: int) -> tuple[int, ...]:
        """[S] the experts of a rank, slot by slot."""
        return self.slots[rank * self.per_rank : (rank + 1) * self.per_rank]

    def copies(self) -> tuple[tuple[int, ...], ...]:
        """[E] the slots of each expert."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.slots):
            found[expert].append(slot)
        return tuple(map(tuple, found))

    def loads(self, counts: Sequence[float]) -> list[float]:
        """[ranks] expected tokens of a rank when the experts get `counts` [E]."""
        copies = [len(slots) for slots in self.copies()]
        return [sum(counts[e] / copies[e] for e in self.held(rank)) for rank in range(self.ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOptions:
    """How experts are spread over their ranks, and how tokens get there."""

    backend: str = "auto"  # one of `kllm.config.EP_BACKENDS`
    redundant: int = 0  # copies besides the first, of all experts together
    counts: Mapping[int, Sequence[int]] = field(default_factory=dict)  # [E] tokens, by layer

    @classmethod
    def of(cls, layout: ParallelConfig, counts: Mapping[int, Sequence[int]] | None = None) -> Self:
        """What a layout says, and the routing that was measured."""
        return cls(
            backend=layout.ep_backend, redundant=layout.redundant_experts, counts=counts or {}
        )

    def placement(self, layer: int, num_experts: int, ranks: int) -> ExpertPlacement:
        """The placement of a layer: balanced where its routing was measured, else in order.

        Raises:
            ConfigError: as `in_order`, and for counts of another number of experts.
        """
        counts = self.counts.get(layer)
        if counts is None:
            return in_order(num_experts, self.redundant, ranks)
        if len(counts) != num_experts:
            raise ConfigError(
                f"layer {layer} has {num_experts} experts and routing counts of {len(counts)}; "
                "measure it again with `kllm bench expert-balance`"
            )
        return balanced(counts, self.redundant, ranks)


def imbalance(loads: Sequence[float]) -> float:
    """Largest load over the mean load; 1 is perfect, also when there is no load at all."""
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0


def in_order(num_experts: int, redundant: int, ranks: int) -> ExpertPlacement:
    """Each rank an equal run of experts; its further slots hold the first ones of the next rank.

    Raises:
        ConfigError: when the slots are not the same number on every rank, or more than experts.
    """
    per_rank = _slots_a_rank(num_experts, redundant, ranks)
    starts = [rank * num_experts // ranks for rank in range(ranks)]
    slots = tuple((start + i) % num_experts for start in starts for i in range(per_rank))
    return ExpertPlacement(num_experts, ranks, slots)


def balanced(counts: Sequence[float], redundant: int, ranks: int) -> ExpertPlacement:
    """A placement for experts that get `counts` [E] tokens, as even as this search finds.

    Copies go to whatever expert has the most tokens a copy; then the busiest copies are placed
    first, each on the least busy rank (Graham 1969), and pairs of experts are exchanged while
    that helps the busiest rank. Never worse than `in_order`.

    Raises:
        ConfigError: as `in_order`.
    """
    usual = in_order(len(counts), redundant, ranks)
    copies = _copies(counts, redundant, ranks)
    load = [count / n for count, n in zip(counts, copies, strict=True)]
    ranked = _improve(_spread(load, copies, usual.per_rank, ranks), load)
    found = ExpertPlacement(len(counts), ranks, tuple(e for held in ranked for e in sorted(held)))
    return min(usual, found, key=lambda placement: max(placement.loads(counts)))


def _slots_a_rank(num_experts: int, redundant: int, ranks: int) -> int:
    total = num_experts + redundant
    if total % ranks:
        raise ConfigError(
            f"{num_experts} routed experts and {redundant} redundant ones cannot be split over "
            f"{ranks} ranks; {redundant + -total % ranks} redundant experts would fit"
        )
    if total > num_experts * ranks:
        raise ConfigError(
            f"{redundant} redundant experts are more than {ranks} ranks have use for; "
            f"{num_experts * (ranks - 1)} put every expert on every rank"
        )
    return total // ranks


def _copies(counts: Sequence[float], redundant: int, ranks: int) -> list[int]:
    """[E] how often each expert is there: at least once, at most on every rank."""
    copies = [1] * len(counts)
    for _ in range(redundant):
        possible = (e for e in range(len(counts)) if copies[e] < ranks)
        copies[max(possible, key=lambda e: counts[e] / copies[e])] += 1
    return copies


def _spread(
    load: Sequence[float], copies: Sequence[int], per_rank: int, ranks: int
) -> list[set[int]]:
    """[ranks] the experts of each, placed from the busiest copy to the idlest."""
    held: list[set[int]] = [set() for _ in range(ranks)]
    total = [0.0] * ranks
    for expert in sorted(range(len(load)), key=lambda e: (-load[e], -copies[e])):
        for _ in range(copies[expert]):
            rooms = [r for r in range(ranks) if len(held[r]) < per_rank]
            fits = [r for r in rooms if expert not in held[r]]
            if not fits:  # only ranks that have the expert have room: another one moves there
                donor = min(
                    (r for r in range(ranks) if expert not in held[r]), key=total.__getitem__
                )
                moved = min(held[donor] - held[rooms[0]], key=load.__getitem__)
                _move(held, total, load, moved, donor, rooms[0])
                fits = [donor]
            rank = min(fits, key=total.__getitem__)
            held[rank].add(expert)
            total[rank] += load[expert]
    return held


def _move(
    held: list[set[int]], total: list[float], load: Sequence[float], expert: int, old: int, new: int
) -> None:
    held[old].remove(expert)
    held[new].add(expert)
    total[old] -= load[expert]
    total[new] += load[expert]


def _improve(held: list[set[int]], load: Sequence[float]) -> list[set[int]]:
    """Exchange two experts of the busiest rank and another one while that lowers the maximum."""
    total = [sum(load[e] for e in experts) for experts in held]
    while imbalance(total) > GOOD_ENOUGH:
        top = max(range(len(total)), key=total.__getitem__)
        best, swap = total[top], None
        for other in range(len(total)):
            for mine in held[top] - held[other]:
                for theirs in held[other] - held[top]:
                    shift = load[mine] - load[theirs]
                    peak = max(total[top] - shift, total[other] + shift)
                    if peak < best:
                        best, swap = peak, (mine, theirs, other)
        if swap is None:
            break
        _move(held, total, load, swap[0], top, swap[2])
        _move(held, total, load, swap[1], swap[2], top)
    return held
