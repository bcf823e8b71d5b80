"""What a collective puts on a link, against a ring played step by step."""

import pytest

from kllm.errors import ConfigError
from kllm.parallel.link import (
    LINKS,
    Link,
    all_gather_bytes,
    all_reduce_bytes,
    parse_link,
    reduce_scatter_bytes,
)


def ring_pass(ranks: int, block: int) -> int:
    """Bytes a rank sends while every block travels once around the ring, save its last hop."""
    return sum(block for _ in range(ranks - 1))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ring_collectives_send_what_a_played_ring_sends(ranks: int) -> None:
    block = 120
    whole = ranks * block
    assert all_gather_bytes(whole, ranks) == ring_pass(ranks, block)
    assert reduce_scatter_bytes(whole, ranks) == ring_pass(ranks, block)
    assert all_reduce_bytes(whole, ranks) == 2 * ring_pass(ranks, block)


def test_time_is_latency_and_bytes_over_bandwidth() -> None:
    assert Link(latency_s=1e-5, bytes_per_s=1e9).seconds(2e6) == pytest.approx(2.01e-3)


def test_links_are_read_by_name_or_as_two_numbers() -> None:
    assert parse_link("nvlink4") is LINKS["nvlink4"]
    assert parse_link("5e-6:100e9") == Link(latency_s=5e-6, bytes_per_s=100e9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nvlink9", "unknown link 'nvlink9'; known: ib400, nvlink4, nvlink5, pcie5"),
        ("fast:1e9", "link 'fast:1e9' cannot be read"),
        ("1e-6:", "cannot be read"),
        ("1e-6:0", "bandwidth above 0"),
        ("-1:1e9", "latency of 0 s or more"),
        ("nan:1e9", "latency of 0 s or more"),
        ("1e-6:nan", "bandwidth above 0"),
    ],
)
def test_what_is_no_link_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_link(text)
