"""How evenly a ring spreads a prompt's time over its ranks: measured, where ranks are sliced.

Context-parallel ranks have the same weights, so that one process can stand for each of them in
turn and run the same steps. Each step of a real ring lasts as long as its busiest rank.
"""

from collections.abc import Callable, Mapping

from kllm.bench.prompt_time import Place, RankTimes, places
from kllm.bench.ring_arms import Arm
from kllm.bench.shared_prompt import SharedPrompt
from kllm.bench.timing import Failed, attempt
from kllm.parallel.link import Link
from kllm.parallel.overlap import RING


def measure_ranks(
    prompt: SharedPrompt,
    ring: Arm,
    links: Mapping[str, Link | None],
    left_s: float,
    tell: Callable[[str], None],
) -> None:
    """Run steps of the longest prompt on one rank after the other, and keep the times in `ring`.

    Over the first link, of which a round must have been measured. Nothing is kept where a rank's
    memory does not suffice or time does not.

    Args:
        left_s: seconds that all of it may take.
        tell: called before each rank.
    """
    name, link = next(iter(links.items()))
    steps = _steps(ring, name, prompt, left_s)
    if not steps:
        return
    tokens, here = ring.isls[-1], prompt.rank
    found: dict[Place, list[float]] = {place: [] for place in steps}

    def run() -> None:
        for rank in range(prompt.stripes.ranks):
            tell(f"as rank {rank} of the ring")
            prompt.stand_for(rank)
            prompt.arrange(RING, tokens)
            prompt.run(steps[-1], link)
            for place in steps:
                found[place].append(prompt.run(place, link).seconds)

    ended = attempt(run)
    prompt.stand_for(here)
    if not isinstance(ended, Failed):
        ring.ranks = RankTimes(tokens=tokens, seconds=found)


def _steps(ring: Arm, link: str, prompt: SharedPrompt, left_s: float) -> list[Place]:
    """Measured steps at both ends of the longest prompt and in its middle, or just the last one.

    The step that hands the prompt over is left out where there are others. Empty: no time.
    """
    if not ring.isls:
        return []
    cost, found = ring.rounds[link][0], places(ring.isls[-1:], prompt.chunk)
    whole = [place for place in found if not place.last] or found
    ends = sorted({whole[0], whole[len(whole) // 2], whole[-1]})
    for steps in (ends, ends[-1:]):
        # The last one runs once more on each rank, to warm up.
        each = sum(cost[place].seconds for place in (*steps, steps[-1]))
        if prompt.stripes.ranks * each <= left_s:
            return steps
    return []
