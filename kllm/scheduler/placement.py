"""Which group of ranks a new request goes to."""

from collections.abc import Sequence

from kllm.scheduler.scheduler import Scheduler


def least_loaded(groups: Sequence[Scheduler]) -> int:
    """The group with the fewest tokens to compute and to keep; the first of equals.

    One request may weigh as much as a hundred others.
    """
    return min(range(len(groups)), key=lambda i: groups[i].load_tokens)


def fewest_requests(groups: Sequence[Scheduler]) -> int:
    """The group with the fewest requests, whatever their lengths; the first of equals."""
    return min(range(len(groups)), key=lambda i: groups[i].num_requests)
