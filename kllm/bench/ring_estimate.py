"""How long a run of `ring-vs-allgather` will take, roughly: said before it starts."""

from collections.abc import Sequence
from math import prod

from kllm.bench.prompt_time import Place, places
from kllm.bench.ring_predictions import Sweep
from kllm.bench.shared_prompt import KINDS
from kllm.parallel.overlap import RING, predict_prompt

LOAD_S = {"cuda": 8.0, "cpu": 2.0}  # building the ranks of a layout
LAYER_S = {"cuda": 1e-3, "cpu": 4e-3}  # of a layer's many small operations


def layout_seconds(
    sweep: Sweep, isls: Sequence[int], links: Sequence[str], repeats: int, limit_s: float
) -> float:
    """Seconds of one layout: loading, and its rounds within the limit."""
    load = LOAD_S[_device(sweep)]
    most = sweep.resolved.config.max_position_embeddings
    found = places([isl for isl in isls if isl <= most], sweep.chunk)
    if not found:
        return load
    # Before a round the last step runs once more; before the first one, early ones too.
    each = sum(_step(sweep, place, link) for place in found for link in links)
    each += _step(sweep, found[-1], links[0])
    rounds = each * max(1.0, min(float(repeats), limit_s // each))
    if sweep.config.fidelity != "rank-slice":
        return load + rounds
    # Then every rank of a ring runs up to four steps: three, and the last of them to warm up.
    ranks = 4 * sweep.config.parallel.cp * _step(sweep, found[-1], links[0], (RING,))
    return load + rounds + (ranks if each + ranks <= limit_s else 0.0)


def _step(sweep: Sweep, place: Place, link: str, kinds: Sequence[str] = KINDS) -> float:
    """Seconds of a step of each of the kinds: attention, products with weights, the rest."""
    setting, device, config = sweep.setting(link), _device(sweep), sweep.config
    # Ranks that all run on a CPU share its cores.
    sharing = config.parallel.cp if config.fidelity == "real" and device == "cpu" else 1
    new = place.end - place.start
    times = predict_prompt(sweep.attention, setting, tokens=new, cached=place.start)
    products = 2 * _weights(sweep) * new / setting.ranks / setting.flops
    rest = (products + LAYER_S[device] * sweep.shape.dims.layers) * sharing
    found: float = sum(getattr(times, kind) + rest for kind in kinds)
    return found


def _weights(sweep: Sweep) -> float:
    """Weights that a token is multiplied with."""
    shape = sweep.shape
    share = shape.experts_per_token / shape.dims.experts if shape.dims.experts else 1.0
    return sum(
        w.count * prod(w.shape) * (share if w.part == "experts" else 1)
        for w in shape.weights
        if w.part != "vocab"
    )


def _device(sweep: Sweep) -> str:
    return "cuda" if sweep.resolved.device.startswith("cuda") else "cpu"
