"""Which group of ranks a new request goes to.

By load in tokens, not by number of requests: one request may weigh as much as a hundred others.
"""

from collections.abc import Sequence

from kllm.scheduler.scheduler import Scheduler


def least_loaded(groups: Sequence[Scheduler]) -> int:
    """The group with the fewest tokens to compute and to keep; the first of equals."""
    return min(range(len(groups)), key=lambda i: groups[i].load_tokens)
