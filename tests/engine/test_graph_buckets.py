"""Which padded sizes decode steps are captured at."""

from kllm.engine.graphs import NARROWEST_TOKENS, batch_bucket, width_bucket


def test_batches_are_padded_by_less_than_half() -> None:
    for batch in range(1, 600):
        assert batch <= batch_bucket(batch) <= batch * 1.5


def test_few_batch_sizes_are_captured() -> None:
    assert sorted({batch_bucket(n) for n in range(1, 65)}) == [
        *(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    ]


def test_block_tables_are_padded_to_powers_of_two_within_the_longest() -> None:
    page = 16
    narrowest = NARROWEST_TOKENS // page
    assert width_bucket(1, page, 1000) == narrowest
    assert width_bucket(narrowest + 1, page, 1000) == 2 * narrowest
    assert width_bucket(600, page, 1000) == 1000
    assert width_bucket(3, page, 10) == 10
