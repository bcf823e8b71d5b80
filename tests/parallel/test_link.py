"""What a collective puts on a link, against a ring played step by step."""

from dataclasses import replace

import pytest

from kllm.errors import ConfigError
from kllm.hardware import Ceilings
from kllm.hardware.links import COLLECTIVES, LinkCeilings
from kllm.parallel.link import (
    LINKS,
    Link,
    all_gather_bytes,
    all_reduce_bytes,
    parse_link,
    reduce_scatter_bytes,
)

FOUND = Ceilings(
    device="cpu", copy_bytes_per_s=1.0, read_bytes_per_s=1.0, matmul_flops_per_s={}, launch_s=1.0
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


CURVES = {
    "ring_shift": ((1e3, 1e-5), (1e5, 1e-4)),
    "all_reduce": ((1e3, 4e-5), (1e5, 4e-4)),
}
BY_CURVES = Link(latency_s=1e-5, bytes_per_s=1e9, curves=CURVES)


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [
        (1e3, 1e-5),
        (1e5, 1e-4),
        (1e4, 1e-5 * 10**0.5),  # half of the way in both logarithms
        (10.0, 1e-5),  # less than was measured takes as long as the least
        (0.0, 1e-5),
        (1e6, 1e-3),  # beyond, at the bandwidth of the largest
    ],
)
def test_a_measured_link_interpolates_between_sizes(sent: float, seconds: float) -> None:
    assert BY_CURVES.seconds(sent, "ring_shift") == pytest.approx(seconds)


def test_each_collective_has_its_own_time() -> None:
    assert BY_CURVES.seconds(1e4, "all_reduce") == 4 * BY_CURVES.seconds(1e4, "ring_shift")
    for hop in ("send", "receive"):
        assert BY_CURVES.seconds(1e4, hop) == BY_CURVES.seconds(1e4, "ring_shift")
    assert BY_CURVES.seconds(1e4, "all_gather") == pytest.approx(2e-5), "the two numbers"


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_larger_groups_take_the_time_of_the_ring_algorithms_bytes(ranks: int) -> None:
    """Measured among two; a buffer that sends as much as was measured takes as long."""
    buffer = 1e5 * ranks / (2 * (ranks - 1))
    sent = all_reduce_bytes(buffer, ranks)
    assert BY_CURVES.seconds(sent, "all_reduce") == pytest.approx(4e-4)
    whole = BY_CURVES.seconds(all_reduce_bytes(1e8, ranks), "all_reduce")
    pair = BY_CURVES.seconds(all_reduce_bytes(1e8, 2), "all_reduce")
    assert whole / pair == pytest.approx(2 * (ranks - 1) / ranks)


def test_the_measured_link_is_the_one_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    curves = dict.fromkeys(COLLECTIVES, CURVES["ring_shift"])
    links = LinkCeilings(ranks=2, backend="gloo", curves=curves)
    monkeypatch.setattr("kllm.hardware.cached_ceilings", lambda device: replace(FOUND, links=links))
    link = parse_link("measured", "cpu")
    assert (link.latency_s, link.bytes_per_s) == (1e-5, pytest.approx(1e9))
    assert link.seconds(1e4, "all_to_all") == pytest.approx(1e-5 * 10**0.5)


@pytest.mark.parametrize("found", [True, False])
def test_a_link_that_was_not_measured_is_a_sentence(
    found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kllm.hardware.cached_ceilings", lambda device: FOUND if found else None)
    with pytest.raises(ConfigError, match="kllm doctor --links"):
        parse_link("measured", "cpu")


def test_links_are_read_by_name_or_as_two_numbers() -> None:
    assert parse_link("nvlink4") is LINKS["nvlink4"]
    assert parse_link("5e-6:100e9") == Link(latency_s=5e-6, bytes_per_s=100e9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nvlink9", "unknown link 'nvlink9'; known: ib400, nvlink4, nvlink5, pcie5, measured,"),
        ("fast:1e9", "link 'fast:1e9' cannot be read"),
        ("1e-6:", "cannot be read"),
        ("1e-6:0", "bandwidth above 0"),
        ("-1:1e9", "latency of 0 s or more"),
        ("nan:1e9", "latency of 0 s or more"),
        ("1e-6:nan", "bandwidth above 0"),
        ("5:100e9", "latency is in seconds, at most 0.1"),
        ("5e-6:100", "bytes per second, at least 1e.06"),
        ("0:inf", "joins no ranks"),
    ],
)
def test_what_is_no_link_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_link(text)
