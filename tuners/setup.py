"""From what a user asks for to what is searched: model, workload, space, prior.

Cheap: no weights are loaded. The workload's length and the cost model's overhead come from one
pilot run of the default settings, which the caller makes (`sized`, `calibrated_overhead`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from kllm import hardware
from kllm.attention.base import resolve_attention
from kllm.bench.base import is_small
from kllm.bench.costmodel import CostModel, Prediction
from kllm.bench.throughput import most_tokens_per_s
from kllm.bench.workloads import Lengths, Workload, preset
from kllm.config import CacheConfig, EngineConfig
from kllm.engine.memory import page_size
from kllm.errors import ConfigError
from kllm.models.devices import kv_share
from kllm.models.load import ResolvedModel, rank_bytes, resolve
from kllm.tuners.objective import Goal
from kllm.tuners.outcome import Outcome
from kllm.tuners.params import CONSTRAINTS, PARAMS
from kllm.tuners.prior import Guess, Prior
from kllm.tuners.space import Settings, Site, Space, Value, parse_fixed

TRIAL_S = 5.0  # length of a trial that the workload is sized for
FEWEST_ROUNDS = 2  # requests for each one in flight, so that the start does not decide
FULL_KV = "kv"  # the paged state of families with a choice of attention backends


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for."""

    config: EngineConfig
    workload: str = "chat"  # a preset's name
    isl: str = ""  # lengths of an explicit workload: "512" or "256-768"
    osl: str = ""
    concurrency: int | None = None
    num_requests: int | None = None  # None: sized by a pilot run
    objectives: tuple[str, ...] = ()
    slo: str | None = None
    fixed: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is searched."""

    resolved: ResolvedModel
    base: EngineConfig  # the default settings, with nothing left to "auto" but what is tuned
    workload: Workload
    goal: Goal
    space: Space
    device_name: str
    seed: int

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return torch.device(self.resolved.device).type

    def identity(self) -> dict[str, Any]:
        """What two studies must share for their trials to be comparable."""
        return {
            "model": self.resolved.name,
            "scale": self.resolved.scale,
            "dtype": self.resolved.dtype,
            "weights": "random" if self.resolved.weights is None else str(self.resolved.weights),
            "device": self.device_name,
            "workload": self.workload.to_dict(),
            "goal": self.goal.to_dict(),
            "space": self.space.describe(),
        }


def prepare(request: Request) -> Setup:
    """Find out what is meant and check that it can be.

    Raises:
        ConfigError: unknown names, conflicting options, values that cannot be used here.
        CapacityError: a device that is not there.
        DataError, DependencyError: weights that cannot be found.
    """
    goal = Goal.of(request.objectives, request.slo)
    resolved = resolve(request.config)
    device = torch.device(resolved.device)
    base = replace(
        request.config, scale=resolved.scale, dtype=resolved.dtype, device=resolved.device
    )
    workload = workload_of(request, resolved)
    fixed = parse_fixed(request.fixed, PARAMS, base)
    machine = hardware.detect()
    on_gpu = device.type == "cuda"
    return Setup(
        resolved=resolved,
        base=base,
        workload=workload,
        goal=goal,
        space=Space(
            PARAMS, CONSTRAINTS, site=site_of(resolved, base, workload), base=base, fixed=fixed
        ),
        device_name=machine.gpus[device.index or 0].name if on_gpu else machine.cpu,
        seed=request.seed,
    )


def workload_of(request: Request, resolved: ResolvedModel) -> Workload:
    """The preset, or the explicit lengths, that the request names.

    Raises:
        ConfigError: lengths without concurrency or the other way round, or too long.
    """
    longest = request.config.max_model_len or resolved.config.max_position_embeddings
    explicit = (bool(request.isl), bool(request.osl), request.concurrency is not None)
    if any(explicit):
        if not all(explicit):
            raise ConfigError("--isl, --osl and --concurrency belong together; give all three")
        workload = Workload(
            name="custom",
            isl=Lengths.parse(request.isl),
            osl=Lengths.parse(request.osl),
            concurrency=request.concurrency,
            num_requests=FEWEST_ROUNDS * (request.concurrency or 1),
            seed=request.seed,
        )
        if workload.max_tokens > longest:
            raise ConfigError(
                f"the longest request has {workload.max_tokens} tokens and the model holds "
                f"{longest}; choose shorter --isl or --osl"
            )
    else:
        small = is_small(resolved.scale, resolved.device)
        workload = preset(request.workload, max_model_len=longest, small=small, seed=request.seed)
    if request.num_requests is not None:
        workload = replace(workload, num_requests=request.num_requests)
    return workload


def site_of(resolved: ResolvedModel, base: EngineConfig, workload: Workload) -> Site:
    """The facts about model, machine and workload that decide which values can be used."""
    device = torch.device(resolved.device)
    spec = resolved.family.cache_spec(resolved.config)
    kv_dtypes = kv_dtypes_here(resolved.dtype)
    formats = [resolved.dtype if name == "auto" else name for name in kv_dtypes]
    weights = rank_bytes(
        resolved.family.manifest(resolved.config), resolved.parallel, resolved.dtype
    )
    share = kv_share(device, base.cache.memory_fraction, weights)
    memory = base.cache.memory_bytes or int(share)
    full_kv = any(state.name == FULL_KV for state in spec.paged)
    return Site(
        device="cuda" if device.type == "cuda" else "cpu",
        dtype=resolved.dtype,
        page_granule=spec.page_granule,
        default_page_size=page_size(replace(base, cache=CacheConfig()), spec),
        attention_backends=attention_here(resolved, device) if full_kv else (),
        kv_dtypes=kv_dtypes,
        concurrency=workload.concurrency or workload.num_requests,
        prompt_tokens=max(row.isl for row in workload.shapes()),
        request_tokens=workload.max_tokens,
        kv_memory_bytes=memory,
        request_state_bytes={name: spec.bytes_per_request(name) for name in formats},
    )


def kv_dtypes_here(dtype: str) -> tuple[str, ...]:
    """KV dtypes that hold no more than the compute dtype: more would only cost memory."""
    narrower = {"float32": ("bfloat16",), "bfloat16": (), "float16": ()}[dtype]
    return ("auto", *narrower, "fp8")


def attention_here(resolved: ResolvedModel, device: torch.device) -> tuple[str, ...]:
    """Usable attention backends, the engine's own choice first."""
    head_dim = int(resolved.config.head_dim)
    chosen = resolve_attention("auto", device, head_dim, resolved.kv_dtype)
    usable = [chosen, "torch"]
    if device.type == "cuda" and find_spec("triton"):
        usable.append("triton")
    return tuple(dict.fromkeys(usable))


def pilot_workload(workload: Workload, *, fixed: bool) -> Workload:
    """What the pilot run serves: no more rounds than a trial needs, unless they are fixed."""
    fewest = FEWEST_ROUNDS * (workload.concurrency or 1)
    if fixed or workload.concurrency is None or workload.num_requests <= fewest:
        return workload
    return replace(workload, num_requests=fewest)


def sized(workload: Workload, pilot: Outcome) -> Workload:
    """The workload with as many requests as take about TRIAL_S, by a run of it.

    Rounds are powers of two: two studies of one question mostly get the same load, although no
    two pilots take the same time.
    """
    in_flight = workload.concurrency or 1
    wanted = pilot.num_requests * TRIAL_S / max(pilot.run_s, 1e-3)
    rounds = 2 ** max(round(math.log2(wanted / in_flight)), int(math.log2(FEWEST_ROUNDS)))
    return replace(workload, num_requests=rounds * in_flight)


Predict = Callable[[Settings], Prediction]


def predictor(setup: Setup, ceilings: hardware.Ceilings, *, overhead_s: float = 0.0) -> Predict:
    """The cost model's prediction for settings, with a constant added to each step."""
    base = CostModel.of(setup.resolved, ceilings)  # counts every tensor of the model: once

    def predict(settings: Settings) -> Prediction:
        config = setup.space.config(settings)
        auto = config.cache.dtype == "auto"
        kv_dtype = setup.resolved.dtype if auto else config.cache.dtype
        model = replace(base, kv_dtype=kv_dtype)
        return model.predict(setup.workload, config.scheduler, step_overhead_s=overhead_s)

    return predict


def calibrated_overhead(setup: Setup, ceilings: hardware.Ceilings, pilot: Outcome) -> float:
    """Seconds that a step takes beyond the cost model's floor, from a run of the default."""
    seen = [row.tpot_s for row in pilot.requests if row.tpot_s is not None]
    if not seen:
        return 0.0
    modelled = predictor(setup, ceilings)(setup.space.default).tpot_s
    return max(0.0, sum(seen) / len(seen) - modelled)


def beats_ceilings(setup: Setup, ceilings: hardware.Ceilings, run: Outcome) -> bool:
    """Whether a run of the default gave more output than the ceilings allow at all."""
    if run.state != "complete" or run.run_s <= 0:
        return False
    most = most_tokens_per_s(CostModel.of(setup.resolved, ceilings), setup.workload)
    return sum(row.osl for row in run.requests) / run.run_s > most


def prior_of(setup: Setup, predict: Predict) -> Prior | None:
    """Predictions for every point: the first objective, and how its means stand to the SLO."""
    latency, slo = setup.goal.objectives[0].name == "latency", setup.goal.slo
    tokens = mean_output_tokens(setup.workload)

    def guess(settings: Settings) -> Guess:
        seen = predict(settings)
        return Guess(
            value=(
                1 / (seen.ttft_s + seen.tpot_s * (tokens - 1))
                if latency
                else seen.output_tokens_per_s
            ),
            slo_ratio=(
                max(seen.ttft_s / slo.ttft_s, seen.tpot_s / slo.tpot_s) if slo.limited else math.nan
            ),
        )

    return Prior.of(setup.space, guess)


def mean_output_tokens(workload: Workload) -> float:
    """Of a request."""
    rows = workload.shapes()
    return sum(row.osl for row in rows) / len(rows)


def changed(settings: Settings, default: Settings) -> dict[str, Value]:
    """The settings that differ from the default."""
    return {name: value for name, value in settings.items() if value != default[name]}


def describe(settings: Settings, default: Settings, free: Sequence[str]) -> str:
    """Settings in one line: what differs from the default, or that nothing does."""
    parts = [f"{k}={v}" for k, v in changed(settings, default).items() if k in free]
    return ", ".join(parts) or "the default settings"
