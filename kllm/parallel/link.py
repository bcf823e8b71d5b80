"""Links between ranks, and how long collectives occupy them. No torch.

The time of a collective is one latency plus the bytes that a rank sends over the bandwidth of
its link. Bytes are those of the ring algorithms (Thakur, Rabenseifner and Gropp 2005), which are
optimal for large messages; the latency stands for a whole call, not for a step of the ring.
"""

from dataclasses import dataclass

from kllm.errors import ConfigError
from kllm.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What connects a rank to its peers."""

    latency_s: float  # of one collective call that moves next to nothing
    bytes_per_s: float  # a rank's, in one direction

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < float("inf") and self.bytes_per_s > 0):
            raise ConfigError(
                "a link needs a latency of 0 s or more and a bandwidth above 0 bytes/s, got "
                f"{self.latency_s} and {self.bytes_per_s}"
            )

    def seconds(self, sent_bytes: float) -> float:
        """Time that a collective occupies the link when each rank sends this much."""
        return self.latency_s + sent_bytes / self.bytes_per_s


# Bandwidths are the makers' figures for one direction: NVLink 4 and 5 a GPU, PCIe 5.0 with 16
# lanes, InfiniBand NDR a port. Latencies are of the order that small NCCL calls take. Where two
# GPUs are present `kllm doctor` measures both; those belong into a Link of one's own.
LINKS = Registry(
    "link",
    {
        "nvlink4": Link(latency_s=10e-6, bytes_per_s=450e9),
        "nvlink5": Link(latency_s=10e-6, bytes_per_s=900e9),
        "pcie5": Link(latency_s=15e-6, bytes_per_s=63e9),
        "ib400": Link(latency_s=20e-6, bytes_per_s=50e9),
    },
)


def parse_link(text: str) -> Link:
    """A link by name, or as `LATENCY_S:BYTES_PER_S`, for instance `5e-6:100e9`.

    Raises:
        ConfigError: for an unknown name or numbers that are no link.
    """
    latency, colon, bandwidth = text.partition(":")
    if not colon:
        return LINKS[text]
    try:
        return Link(latency_s=float(latency), bytes_per_s=float(bandwidth))
    except ValueError:
        raise ConfigError(
            f"link '{text}' cannot be read; give a name ({', '.join(sorted(LINKS))}) or seconds "
            "and bytes per second as 5e-6:100e9"
        ) from None


def all_reduce_bytes(nbytes: float, ranks: int) -> float:
    """Bytes a rank sends to sum `nbytes` over the ranks: 2 (n - 1) / n of them."""
    return 2 * all_gather_bytes(nbytes, ranks)


def all_gather_bytes(nbytes: float, ranks: int) -> float:
    """Bytes a rank sends to gather `nbytes` in all: (n - 1) / n of them."""
    return nbytes * (ranks - 1) / ranks


def reduce_scatter_bytes(nbytes: float, ranks: int) -> float:
    """Bytes a rank sends to sum `nbytes` and keep its part: (n - 1) / n of them."""
    return all_gather_bytes(nbytes, ranks)
