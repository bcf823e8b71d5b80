"""How long a run of `ring-vs-allgather` will take, roughly: said before it starts."""

from collections.abc import Iterator, Sequence
from math import prod

from kllm.bench.prompt_time import Place, places
from kllm.bench.ring_findings import Sweep
from kllm.bench.shared_prompt import KINDS
from kllm.parallel.overlap import predict_prompt

LOAD_S = {"cuda": 8.0, "cpu": 2.0}  # building the ranks of a layout
LAYER_S = {"cuda": 1e-3, "cpu": 4e-3}  # of a layer's many small operations


def layout_seconds(
    sweep: Sweep, isls: Sequence[int], links: Sequence[str], repeats: int, limit_s: float
) -> float:
    """Seconds of one layout: loading, a pass to warm up, and its rounds within the limit."""
    most = sweep.resolved.config.max_position_embeddings
    found = places([isl for isl in isls if isl <= most], sweep.chunk)
    passes = [sum(_steps(sweep, found, link)) for link in links]
    warm, each = passes[0], sum(passes)
    rounds = max(1.0, min(float(repeats), (limit_s - warm) // each)) if each else 0.0
    return LOAD_S[_device(sweep)] + warm + rounds * each


def _steps(sweep: Sweep, found: Sequence[Place], link: str) -> Iterator[float]:
    """Seconds of the steps of a pass, of each kind: attention, products with weights, the rest."""
    setting, device = sweep.setting(link), _device(sweep)
    config = sweep.config
    # Ranks that all run on a CPU share its cores.
    sharing = config.parallel.cp if config.fidelity == "real" and device == "cpu" else 1
    for place in found:
        new = place.end - place.start
        times = predict_prompt(sweep.attention, setting, tokens=new, cached=place.start)
        products = 2 * _weights(sweep) * new / setting.ranks / setting.flops
        rest = (products + LAYER_S[device] * sweep.shape.dims.layers) * sharing
        for kind in KINDS:
            yield getattr(times, kind) + rest


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
