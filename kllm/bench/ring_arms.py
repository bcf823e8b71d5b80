"""The sides of `ring-vs-allgather`: what of the sweep fits each, and what its steps cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kllm.bench.base import warming_up
from kllm.bench.prompt_time import Cost, Place, RankTimes, places, prompt_cost
from kllm.bench.shared_prompt import SharedPrompt
from kllm.bench.timing import Failed, attempt
from kllm.parallel.link import Link

# Of what is free beside the weights; the rest is for a step's tensors, and the allocator's gaps.
KV_SHARE = 0.85
EARLY = 8  # places before this part of the longest prompt have a warm-up of their own
GIB = float(1 << 30)

Costs = dict[Place, Cost]


@dataclass(slots=True)
class Arm:
    """One kind of context parallelism.

    `rounds[link][i]` is what steps cost in round i; i of one kind pairs with i of another.
    """

    kind: str
    isls: list[int]  # those that fit, rising
    refused: dict[int, str] = field(default_factory=dict)  # the others: why
    rounds: dict[str, list[Costs]] = field(default_factory=dict)
    ranks: RankTimes | None = None  # of steps of the longest prompt, where every rank ran them

    def refuse(self, isl: int, reason: str) -> None:
        """Take a length, and all longer ones, out of the sweep."""
        for longer in [n for n in self.isls if n >= isl]:
            self.isls.remove(longer)
            self.refused[longer] = reason

    def fit(self, prompt: SharedPrompt, *, sliced: bool, ranks_here: int) -> None:
        """Refuse the lengths whose KV would not fit the device.

        Args:
            sliced: whether only a typical rank is here, or the owner of the prompt as well.
            ranks_here: that share what is free.
        """
        room = KV_SHARE * prompt.free_bytes() / ranks_here
        for isl in tuple(self.isls):
            need = prompt.need(self.kind, isl)
            wanted = need.typical if sliced else need.owner
            if wanted > room:
                self.refuse(
                    isl,
                    f"{self.kind}: needs {wanted / GIB:.3g} GiB of KV on a rank and "
                    f"{room / GIB:.3g} GiB are free for it",
                )
                return

    def places(self, chunk: int) -> list[Place]:
        """The steps to measure."""
        return places(self.isls, chunk)

    def steps(self, chunk: int, links: int, repeats: int) -> int:
        """How many steps all rounds have, those before a round included."""
        measured = len(self.places(chunk)) * links * repeats
        return measured + len(self._early(chunk)) + (repeats if self.isls else 0)

    def run(
        self,
        prompt: SharedPrompt,
        links: dict[str, Link | None],
        tell: Callable[[str], None],
        *,
        warm_up: bool,
    ) -> None:
        """Run the steps of all places, one after the other, over each link: a round.

        Args:
            tell: called before each step.
            warm_up: whether shapes are new, so that steps at the first places run once before.
        """
        self._prepare(prompt, tell, warm_up)
        found: dict[str, Costs] = {name: {} for name in links}
        for place in self.places(prompt.chunk):
            if place.end > max(self.isls, default=0):
                break  # an earlier step took away what this one was for
            for name, link in links.items():
                tell(f"{self.kind} at {place.start} over {name}")
                cost = self._step(prompt, place, link)
                if cost is None:
                    break
                found[name][place] = cost
        for name, costs in found.items():
            self.rounds.setdefault(name, []).append(costs)

    def _prepare(self, prompt: SharedPrompt, tell: Callable[[str], None], warm_up: bool) -> None:
        """Make the pool, and run the step that needs most memory.

        With a new pool the device's memory is divided anew, and the first step that needs more
        than those before it pays for that. Lengths that do not fit are refused.
        """
        while self.isls:
            longest = self.isls[-1]
            made = attempt(lambda n=longest: prompt.arrange(self.kind, n))  # type: ignore[misc]
            if isinstance(made, Failed):
                self.refuse(longest, f"{self.kind}: {made.reason}")
                continue
            early = self._early(prompt.chunk) if warm_up else []
            for place in (*early, self.places(prompt.chunk)[-1]):
                tell(warming_up(f"{self.kind} at {place.start}"))
                self._step(prompt, place, None)
            if longest in self.isls:
                return

    def _early(self, chunk: int) -> list[Place]:
        """Places that differ from the last one in what a step does, not only in how long."""
        return [place for place in self.places(chunk) if place.start * EARLY < self.isls[-1]]

    def _step(self, prompt: SharedPrompt, place: Place, link: Link | None) -> Cost | None:
        cost = attempt(lambda: prompt.run(place, link))
        if isinstance(cost, Failed):
            self.refuse(place.end, f"{self.kind}: {cost.reason} in a step behind {place.start}")
            return None
        return cost

    def prompts(self, link: str, isl: int, chunk: int) -> list[Cost]:
        """What a whole prompt costs, by each round; empty where it does not fit."""
        if isl not in self.isls:
            return []
        return [prompt_cost(isl, chunk, costs) for costs in self.rounds.get(link, [])]


def arms_of(kinds: Sequence[str], isls: Sequence[int]) -> dict[str, Arm]:
    """An arm for each kind."""
    return {kind: Arm(kind, sorted(set(isls))) for kind in kinds}
