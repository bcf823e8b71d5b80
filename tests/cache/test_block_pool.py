"""Ids are handed out once, taken back once, and nothing is lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm.cache.block_pool import BlockPool


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_no_id_is_held_twice_and_none_is_lost(actions: list[tuple[bool, int]]) -> None:
    pool, held = BlockPool(16), []
    for take, count in actions:
        if take and count <= pool.free:
            held += pool.take(count).tolist()
        elif not take:
            back, held = held[:count], held[count:]
            pool.give(np.array(back, np.int32))
        assert len(set(held)) == len(held) == pool.used
        assert pool.free + pool.used == 16


def test_giving_back_twice_is_caught() -> None:
    pool = BlockPool(4)
    ids = pool.take(2)
    pool.give(ids[:1])
    with pytest.raises(RuntimeError, match="nobody holds"):
        pool.give(ids)
    with pytest.raises(RuntimeError, match="nobody holds"):
        pool.give(np.array([3], np.int32))


def test_taking_more_than_there_is_is_caught() -> None:
    with pytest.raises(RuntimeError, match="5 blocks taken where 4 are free"):
        BlockPool(4).take(5)
