"""What a bench is, what it is given, and the table of all of them.

A bench is a frozen dataclass: its fields are its options, `measure` does the work and records
values as they come, `conclude` turns what there is, complete or not, into a verdict and the
boundary where the verdict stops being true.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from kllm.config import EngineConfig
from kllm.registry import Registry

if TYPE_CHECKING:  # `kllm bench list` answers without torch and pandas
    from kllm.bench.record import Record
    from kllm.bench.serve_loop import ServingEngine


# Admission keeps a page of each running request free; without room for it the last request of a
# batch would wait, although the memory for it is there.
SPARE_TOKENS = 256
ProgressHook = Callable[[str, int, int], None]  # what is measured, points done, points in all


def warming_up(what: str) -> str:
    """What is told of a warm-up: it is where the first run of a machine waits, for a minute."""
    return f"{what}: warming up, kernels may be compiled now"


def no_progress(what: str, done: int, total: int) -> None:
    """The hook of a run that nobody watches."""


def make_engine(config: EngineConfig) -> "ServingEngine":
    """The real engine."""
    from kllm.engine.engine import Engine

    return Engine(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What every bench is given."""

    config: EngineConfig
    repeats: int = 5
    seed: int = 0
    progress: ProgressHook = no_progress
    make_engine: "Callable[[EngineConfig], ServingEngine]" = make_engine

    @contextmanager
    def engine(self, *, max_batch: int, max_tokens: int) -> "Iterator[ServingEngine]":
        """An engine for `max_batch` requests of up to `max_tokens` tokens, closed at the end."""
        from kllm.models.load import resolve

        scheduler = replace(
            self.config.scheduler,
            max_batch=max_batch,
            token_budget=max(self.config.scheduler.token_budget, max_batch),
        )
        most: int = resolve(self.config).config.max_position_embeddings
        length = max(max_tokens, min(max_tokens + SPARE_TOKENS, most))
        config = replace(self.config, scheduler=scheduler, max_model_len=length)
        engine = self.make_engine(config)
        try:
            yield engine
        finally:
            engine.close()


class Bench(Protocol):
    """One bench with its options."""

    @property
    def name(self) -> str:
        """As it is called on the command line."""

    def workload(self) -> Mapping[str, Any]:
        """The options that make two runs comparable, as plain data."""

    def measure(self, ctx: Context, record: "Record") -> None:
        """Measure, and record every value as soon as it is there."""

    def conclude(self, record: "Record") -> None:
        """Set the record's verdict and boundary from what was measured."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of `kllm bench list`."""

    summary: str
    sweeps: str  # the variable along which the boundary is looked for
    load: Callable[[], Callable[..., Bench]]  # imports the module, returns the class


def _latency() -> Callable[..., Bench]:
    from kllm.bench.latency import LatencyBench

    return LatencyBench


def _throughput() -> Callable[..., Bench]:
    from kllm.bench.throughput import ThroughputBench

    return ThroughputBench


def _overhead() -> Callable[..., Bench]:
    from kllm.bench.overhead import OverheadBench

    return OverheadBench


def _vs_transformers() -> Callable[..., Bench]:
    from kllm.bench.vs_transformers import TransformersBench

    return TransformersBench


def _ring_vs_allgather() -> Callable[..., Bench]:
    from kllm.bench.ring_vs_allgather import RingVsAllGatherBench

    return RingVsAllGatherBench


def _compare_power() -> Callable[..., Bench]:
    from kllm.bench.compare_power import ComparePowerBench

    return ComparePowerBench


def _fidelity() -> Callable[..., Bench]:
    from kllm.bench.fidelity import FidelityBench

    return FidelityBench


def _tp_vs_dp_attention() -> Callable[..., Bench]:
    from kllm.bench.tp_vs_dp import TpVsDpBench

    return TpVsDpBench


def _expert_balance() -> Callable[..., Bench]:
    from kllm.bench.expert_balance import ExpertBalanceBench

    return ExpertBalanceBench


BENCHES: Registry[Entry] = Registry(
    "bench",
    {
        "latency": Entry("TTFT, TPOT and decode step time against its floor", "batch", _latency),
        "throughput": Entry(
            "tokens and requests a second under a load", "concurrency", _throughput
        ),
        "overhead": Entry(
            "time of a step that the model does not take", "running requests", _overhead
        ),
        "vs-transformers": Entry(
            "decode speed against transformers' generate, interleaved", "batch", _vs_transformers
        ),
        "fidelity": Entry(
            "a rank-slice against all ranks, the cost model against a rank-slice",
            "layout",
            _fidelity,
        ),
        "ring-vs-allgather": Entry(
            "prefill of a prompt that ranks share: a ring against all-gather",
            "prompt length, link",
            _ring_vs_allgather,
        ),
        "tp-vs-dp-attention": Entry(
            "attention cut by heads against attention by request, experts spread in both",
            "requests in flight, prompt length, skew",
            _tp_vs_dp_attention,
        ),
        "expert-balance": Entry(
            "load of expert ranks with experts placed by measured routing, and what copies cost",
            "redundant experts, drift of the routing",
            _expert_balance,
        ),
        "compare-power": Entry(
            "false alarms and detections of `kllm compare` on this machine",
            "injected slowdown",
            _compare_power,
        ),
    },
)


def doubling(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to and including `most`."""
    sizes = [1]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes if sizes[-1] == most else [*sizes, most])


def is_small(scale: str, device: str) -> bool:
    """Whether default sizes are cut: tiny models and CPUs."""
    return scale == "tiny" or not device.startswith("cuda")
