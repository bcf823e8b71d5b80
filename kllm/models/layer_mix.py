"""Cutting a model to fewer layers that keep its mix of layer types."""

from collections.abc import Hashable, Sequence

from kllm.errors import ConfigError


def check_layers(layers: int, total: int) -> None:
    """Check that a model of `total` layers can be cut to `layers`.

    Raises:
        ConfigError: when it cannot.
    """
    if not 1 <= layers <= total:
        raise ConfigError(f"layers:{layers} is not possible; this model has 1 to {total} layers")


def keep_mix(kinds: Sequence[Hashable], layers: int) -> list[int]:
    """Which `layers` layers to keep, in order, given the kind of each.

    Every kind keeps its share of layers, rounded, and at least one while there is room; the
    kept layers are spread evenly over the original ones of their kind.
    """
    kept: list[int] = []
    for kind, count in _shares(kinds, layers).items():
        members = [i for i, k in enumerate(kinds) if k == kind]
        kept += [members[(2 * i + 1) * len(members) // (2 * count)] for i in range(count)]
    return sorted(kept)


def _shares(kinds: Sequence[Hashable], layers: int) -> dict[Hashable, int]:
    """How many of `layers` layers each kind gets, largest deficit first."""
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    shares = dict.fromkeys(counts, 0)
    for _ in range(layers):
        # A kind without a layer comes first; then the one furthest below its exact share.
        def need(kind: Hashable) -> tuple[bool, float]:
            return shares[kind] == 0, counts[kind] / len(kinds) * layers - shares[kind]

        open_kinds = [kind for kind in counts if shares[kind] < counts[kind]]
        shares[max(open_kinds, key=need)] += 1
    return {kind: share for kind, share in shares.items() if share}
