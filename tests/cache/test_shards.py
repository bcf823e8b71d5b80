"""The arithmetic of stripes on tensors agrees with the one on plain numbers."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kllm.cache.shards import entry_ids, entry_places, entry_ranks, held_slots
from kllm.parallel.sequence import Piece, SequenceStep
from kllm.parallel.stripes import Stripes

deals = st.builds(Stripes, st.integers(1, 8), st.integers(1, 9))


@given(deals, st.integers(0, 300))
def test_ids_ranks_and_places_are_those_of_the_stripes(stripes: Stripes, length: int) -> None:
    ids = np.arange(length, dtype=np.int64)
    ranks = entry_ranks(stripes, torch.from_numpy(ids))
    places = entry_places(stripes, torch.from_numpy(ids))
    assert (ranks.numpy() == stripes.rank_of(ids)).all()
    assert (places.numpy() == stripes.local(ids)).all()
    for rank in range(stripes.ranks):
        own = ids[stripes.rank_of(ids) == rank]
        assert entry_ids(stripes, rank, torch.arange(len(own))).tolist() == own.tolist()


@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(0, 120))
def test_entries_lie_where_their_tokens_were_put(
    ranks: int, stripe_pages: int, ratio: int, end: int
) -> None:
    """Page size 4, on owners and on others, for entries of several tokens too."""
    page, stripes = 4, Stripes(ranks, 4 * stripe_pages)
    table = np.random.default_rng(0).permutation(40).astype(np.int32)[None]
    for rank in range(ranks):
        for owner in range(ranks):
            piece = Piece(0, end, owner, slice(0), True)
            step = SequenceStep(rank, stripes, True, (piece,), np.zeros(1, np.int32), table)
            got = held_slots(step, 0, torch.from_numpy(table), page, ratio).tolist()
            held = [p for a, b in stripes.runs(rank, 0, end) for p in range(a, b)]
            lasts = [p for p in held if (p + 1) % ratio == 0]  # complete entries
            places = step.places(piece, np.array(lasts, np.int64)) // ratio
            per_page = page // ratio
            want = [int(table[0, p // per_page]) * per_page + p % per_page for p in places]
            assert got == want
