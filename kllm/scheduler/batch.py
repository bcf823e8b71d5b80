"""The running requests as a structure of arrays, one element a state row.

A pure decode step touches these arrays with a few numpy calls, whatever the number of
requests; Python loops run only over requests that enter, leave or need a page.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class RunningBatch:
    """Per-row state; rows of requests that do not run hold leftovers."""

    computed: NDArray[np.int32]  # [R] tokens whose KV is in the cache
    known: NDArray[np.int32]  # [R] tokens of prompt and output
    limit: NDArray[np.int32]  # [R] the request ends when it knows this many tokens
    last_token: NDArray[np.int64]  # [R] newest known token
    stops_at_eos: NDArray[np.bool_]  # [R]

    @classmethod
    def empty(cls, rows: int) -> "RunningBatch":
        """Arrays for `rows` requests."""
        return cls(
            computed=np.zeros(rows, np.int32),
            known=np.zeros(rows, np.int32),
            limit=np.zeros(rows, np.int32),
            last_token=np.zeros(rows, np.int64),
            stops_at_eos=np.zeros(rows, np.bool_),
        )
