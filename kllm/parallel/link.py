"""Links between ranks, and how long collectives occupy them. No torch.

The time of a collective is one latency plus the bytes that a rank sends over the bandwidth of
its link. Bytes are those of the ring algorithms (Thakur, Rabenseifner and Gropp 2005), which are
optimal for large messages; the latency stands for a whole call, not for a step of the ring.

A measured link has a time of its own for each collective and size. For another number of ranks
than were measured the time is that of as many bytes sent by a rank: the ring algorithms' share of
the buffer changes with the ranks ((n - 1) / n of it), the fixed part of a call does not. Small
calls of larger groups are therefore too fast by the hops that they have more.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from kllm.errors import ConfigError
from kllm.registry import Registry

MEASURED = "measured"  # the link that was measured on this machine
# What a user may name. Anything slower is a mistaken unit, and a slice would sleep for hours.
SLOWEST_S, SLOWEST_BYTES_PER_S = 0.1, 1e6
# Point-to-point calls take the time of a shift along a ring of which they are one hop.
MEASURED_AS = {"send": "ring_shift", "receive": "ring_shift"}

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What connects a rank to its peers.

    `curves` are measured times by collective (a method of `Communicator`): (bytes that a rank
    sends, seconds), rising. A collective without one takes latency and bytes over bandwidth.
    """

    latency_s: float  # of one collective call that moves next to nothing
    bytes_per_s: float  # a rank's, in one direction
    curves: Mapping[str, Points] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < float("inf") and self.bytes_per_s > 0):
            raise ConfigError(
                "a link needs a latency of 0 s or more and a bandwidth above 0 bytes/s, got "
                f"{self.latency_s} and {self.bytes_per_s}"
            )

    def seconds(self, sent_bytes: float, collective: str = "") -> float:
        """Time that a collective occupies the link when each rank sends this much."""
        points = self.curves.get(MEASURED_AS.get(collective, collective))
        if points:
            return interpolate(points, sent_bytes)
        return self.latency_s + sent_bytes / self.bytes_per_s


def interpolate(points: Points, sent_bytes: float) -> float:
    """Seconds along a straight line between the logarithms of the two neighbouring points.

    Less than the first point takes as long as it; beyond the last one its bandwidth goes on.
    """
    if sent_bytes <= points[0][0]:
        return points[0][1]
    last, seconds = points[-1]
    if sent_bytes >= last:
        return seconds * sent_bytes / last
    above = bisect_right(points, sent_bytes, key=lambda point: point[0])
    (x0, y0), (x1, y1) = points[above - 1], points[above]
    share = math.log(sent_bytes / x0) / math.log(x1 / x0)
    return float(y0 * (y1 / y0) ** share)


# Bandwidths are the makers' figures for one direction: NVLink 4 and 5 a GPU, PCIe 5.0 with 16
# lanes, InfiniBand NDR a port. Latencies are of the order that small NCCL calls take. Where two
# GPUs are present `kllm doctor` measures them: the link named "measured".
LINKS = Registry(
    "link",
    {
        "nvlink4": Link(latency_s=10e-6, bytes_per_s=450e9),
        "nvlink5": Link(latency_s=10e-6, bytes_per_s=900e9),
        "pcie5": Link(latency_s=15e-6, bytes_per_s=63e9),
        "ib400": Link(latency_s=20e-6, bytes_per_s=50e9),
    },
)


def parse_link(text: str, device: str = "auto") -> Link:
    """A link by name, as `LATENCY_S:BYTES_PER_S` (for instance `5e-6:100e9`), or as measured.

    Args:
        text: "measured" is the link between this machine's GPUs, or between processes on its CPU.
        device: whose measured link: "cpu", "cuda", or "auto" for the GPUs' if there is one.

    Raises:
        ConfigError: for an unknown name, numbers that are no link, or a link that is not measured.
    """
    if text == MEASURED:
        return measured_link(device)
    latency, colon, bandwidth = text.partition(":")
    if not colon:
        if text not in LINKS:
            raise ConfigError(
                f"unknown link '{text}'; known: {', '.join(sorted(LINKS))}, {MEASURED}, or seconds "
                "and bytes per second as 5e-6:100e9"
            )
        return LINKS[text]
    try:
        link = Link(latency_s=float(latency), bytes_per_s=float(bandwidth))
    except ValueError:
        raise ConfigError(
            f"link '{text}' cannot be read; give a name ({', '.join(sorted(LINKS))}, {MEASURED}) "
            "or seconds and bytes per second as 5e-6:100e9"
        ) from None
    if link.latency_s > SLOWEST_S or not SLOWEST_BYTES_PER_S <= link.bytes_per_s < math.inf:
        raise ConfigError(
            f"link '{text}' joins no ranks: the latency is in seconds, at most {SLOWEST_S:g}, and "
            f"the bandwidth in bytes per second, at least {SLOWEST_BYTES_PER_S:g}, as 5e-6:100e9"
        )
    return link


def measured_link(device: str = "auto") -> Link:
    """The link that was measured on this machine.

    Raises:
        ConfigError: when none has been measured.
    """
    from kllm.hardware import cached_ceilings  # needs torch, which presets do not

    found = cached_ceilings(device)
    if found is None or found.links is None:
        raise ConfigError(
            "the link of this machine has not been measured; run `kllm doctor` where there are "
            f"two GPUs, `kllm doctor --links` on a CPU, or name a preset: {', '.join(LINKS)}"
        )
    links = found.links
    return Link(latency_s=links.latency_s, bytes_per_s=links.bytes_per_s, curves=links.curves)


def all_reduce_bytes(nbytes: float, ranks: int) -> float:
    """Bytes a rank sends to sum `nbytes` over the ranks: 2 (n - 1) / n of them."""
    return 2 * all_gather_bytes(nbytes, ranks)


def all_gather_bytes(nbytes: float, ranks: int) -> float:
    """Bytes a rank sends to gather `nbytes` in all: (n - 1) / n of them."""
    return nbytes * (ranks - 1) / ranks


def reduce_scatter_bytes(nbytes: float, ranks: int) -> float:
    """Bytes a rank sends to sum `nbytes` and keep its part: (n - 1) / n of them."""
    return all_gather_bytes(nbytes, ranks)
