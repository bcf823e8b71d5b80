"""From what a user asks for to what is searched: model, workload, space, prior.

Cheap: no weights are loaded. The workload's length and the cost model's overhead come from one
pilot run of the default settings, which the caller makes (`sized`, `calibrated_overhead`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from kllm import hardware
from kllm.attention.base import resolve_attention
from kllm.bench.base import is_small
from kllm.bench.costmodel import CostModel, Prediction, steady_state
from kllm.bench.layout_cost import LayoutCost
from kllm.bench.throughput import most_tokens_per_s
from kllm.bench.workloads import Lengths, Workload, preset
from kllm.config import (
    FIDELITIES,
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
)
from kllm.engine.memory import page_size
from kllm.errors import CapacityError, ConfigError
from kllm.models.devices import choose_device, kv_share
from kllm.models.load import ResolvedModel, rank_bytes, resolve
from kllm.parallel.layout import parse, short_name
from kllm.parallel.link import Link, parse_link
from kllm.tuners.layouts import Deployment, find_deployment, layout_name, share_of
from kllm.tuners.objective import Goal
from kllm.tuners.outcome import Outcome
from kllm.tuners.params import CONSTRAINTS, LAYOUT_PARAMS, PARAMS
from kllm.tuners.prior import Guess, Prior
from kllm.tuners.space import Settings, Site, Space, Value, parse_fixed

TRIAL_S = 5.0  # length of a trial that the workload is sized for
LAYOUT_TRIAL_S = 3.0  # where layouts are tuned: there are many, and each has weights to make
FEWEST_ROUNDS = 2  # requests for each one in flight, so that the start does not decide
NOT_MODELLED = ("page_size", "attention", "graphs")  # the cost model does not know of these
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
    world: int = 1  # ranks of a layout
    layout: str = ""  # the only layout; "": all that suit
    fidelity: str = ""  # "": real where there are devices for all ranks, else rank-slice


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
    deployment: Deployment | None = None  # of several ranks

    def config(self, settings: Settings) -> EngineConfig:
        """The engine's config of a trial."""
        config = self.space.config(settings)
        if self.deployment is None:
            return config
        auto = config.cache.dtype == "auto"
        kv_dtype = self.resolved.dtype if auto else config.cache.dtype
        page = config.cache.page_size or self.space.site.default_page_size
        return self.deployment.config(config, kv_dtype, page)

    @property
    def world(self) -> int:
        """Ranks of a layout."""
        return self.base.parallel.world

    @property
    def fidelity(self) -> str:
        """Whether all ranks run."""
        return self.base.fidelity

    @property
    def trial_s(self) -> float:
        """Length of a trial that the workload is sized for."""
        return TRIAL_S if self.world == 1 else LAYOUT_TRIAL_S

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return torch.device(self.resolved.device).type

    def identity(self) -> dict[str, Any]:
        """What two studies must share for their trials to be comparable."""
        ranks = {}
        if self.deployment is not None:
            ranks = {
                "world": self.world,
                "fidelity": self.fidelity,
                "link": self.base.link if self.fidelity == "rank-slice" else None,
                "layouts": [short_name(layout) for layout in self.deployment.allowed],
                "memory_bytes": self.deployment.memory_bytes,
            }
        return {
            "model": self.resolved.name,
            "scale": self.resolved.scale,
            "dtype": self.resolved.dtype,
            "weights": "random" if self.resolved.weights is None else str(self.resolved.weights),
            "device": self.device_name,
            "workload": self.workload.to_dict(),
            "goal": self.goal.to_dict(),
            "space": self.space.describe(),
            **ranks,
        }


def prepare(request: Request) -> Setup:
    """Find out what is meant and check that it can be.

    Raises:
        ConfigError: unknown names, conflicting options, values that cannot be used here.
        CapacityError: a device that is not there.
        DataError, DependencyError: weights that cannot be found.
    """
    goal = Goal.of(request.objectives, request.slo)
    resolved, deployment, config = _deployed(request)
    device = torch.device(resolved.device)
    base = replace(config, scale=resolved.scale, dtype=resolved.dtype, device=resolved.device)
    workload = workload_of(request, resolved)
    params = PARAMS if deployment is None else (*PARAMS, *LAYOUT_PARAMS)
    rows = () if deployment is None else deployment.rows
    fixed = parse_fixed(request.fixed, params, base)
    machine = hardware.detect()
    on_gpu = device.type == "cuda"
    return Setup(
        resolved=resolved,
        base=base,
        workload=workload,
        goal=goal,
        space=Space(
            params,
            CONSTRAINTS,
            site=site_of(resolved, base, workload),
            base=base,
            fixed=fixed,
            rows=rows,
        ),
        device_name=machine.gpus[device.index or 0].name if on_gpu else machine.cpu,
        seed=request.seed,
        deployment=deployment,
    )


def _deployed(request: Request) -> tuple[ResolvedModel, Deployment | None, EngineConfig]:
    """The model, the layouts to compare (None: one rank), and the config with the usual one."""
    chosen = parse(request.layout) if request.layout else None
    world = chosen.world if chosen is not None else request.world
    if request.world not in (1, world):
        raise ConfigError(
            f"layout '{request.layout}' has {world} ranks and --world is {request.world}; "
            "leave one of them out"
        )
    fidelity = fidelity_here(request.fidelity, world, choose_device(request.config.device))
    if world == 1:
        return resolve(request.config), None, request.config
    config = replace(
        request.config,
        parallel=chosen or ParallelConfig(dp=world),
        fidelity=fidelity,  # type: ignore[arg-type]  # EngineConfig checks it
    )
    resolved, deployment = find_deployment(config, chosen=chosen)
    config = replace(config, parallel=deployment.allowed[0])
    return replace(resolved, parallel=config.parallel), deployment, config


def fidelity_here(asked: str, world: int, device: torch.device) -> str:
    """Whether all ranks of a layout run: where there is a device for each, or as asked.

    Raises:
        ConfigError: no such fidelity.
        CapacityError: `real` with less GPUs than ranks.
    """
    if asked not in ("", *FIDELITIES):
        raise ConfigError(f"unknown fidelity '{asked}'; known: {', '.join(FIDELITIES)}")
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if not asked:
        return "real" if count >= world else "rank-slice"
    if asked == "real" and device.type == "cuda" and count < world:
        raise CapacityError(
            f"--fidelity real needs {world} GPUs and this machine has {count}; leave it out to run "
            "one rank of each layout"
        )
    return asked


def default_world(device: str) -> int:
    """Ranks where nobody says how many: one for each GPU, or one."""
    chosen = choose_device(device)
    return torch.cuda.device_count() if chosen.type == "cuda" and ":" not in device else 1


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
    memory = base.cache.memory_bytes or None
    if memory is None and base.parallel.world == 1:  # else it is another one for each layout
        memory = int(kv_share(device, base.cache.memory_fraction, weights))
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


def sized(workload: Workload, pilot: Outcome, trial_s: float = TRIAL_S) -> Workload:
    """The workload with as many requests as take about `trial_s`, by a run of it.

    Rounds are powers of two: two studies of one question mostly get the same load, although no
    two pilots take the same time.
    """
    in_flight = workload.concurrency or 1
    wanted = pilot.num_requests * trial_s / max(pilot.run_s, 1e-3)
    rounds = 2 ** max(round(math.log2(wanted / in_flight)), int(math.log2(FEWEST_ROUNDS)))
    return replace(workload, num_requests=rounds * in_flight)


Predict = Callable[[Settings], Prediction]


def predictor(setup: Setup, ceilings: hardware.Ceilings, *, overhead_s: float = 0.0) -> Predict:
    """The cost model's prediction for settings, with a constant added to each step."""
    base = CostModel.of(setup.resolved, ceilings)  # counts every tensor of the model: once
    # Thousands of points ask for a few hundred contexts.
    shape = replace(
        base.shape,
        attention_flops=cache(base.shape.attention_flops),
        attention_entries=cache(base.shape.attention_entries),
    )
    base = replace(base, shape=shape)
    link = link_of(setup, ceilings)
    parts = cache(lambda dp: share_of(setup.workload, dp))

    def steady(layout: ParallelConfig, scheduler: SchedulerConfig, kv_dtype: str) -> Prediction:
        model = replace(base, kv_dtype=kv_dtype)
        if setup.deployment is None:
            return model.predict(setup.workload, scheduler, step_overhead_s=overhead_s)
        cost = LayoutCost(cost=model, shape=setup.deployment.shape, layout=layout, link=link)
        part, groups = parts(layout.dp)
        seen = steady_state(cost, part, scheduler, step_overhead_s=overhead_s)
        return replace(
            seen,
            requests_per_s=groups * seen.requests_per_s,
            output_tokens_per_s=groups * seen.output_tokens_per_s,
        )

    known: dict[tuple[tuple[str, Value], ...], Prediction] = {}

    def predict(settings: Settings) -> Prediction:
        key = tuple(item for item in settings.items() if item[0] not in NOT_MODELLED)
        if key not in known:
            config = setup.space.config(settings)
            auto = config.cache.dtype == "auto"
            kv_dtype = setup.resolved.dtype if auto else config.cache.dtype
            known[key] = steady(config.parallel, config.scheduler, kv_dtype)
        return known[key]

    return predict


def link_of(setup: Setup, ceilings: hardware.Ceilings) -> Link | None:
    """The link that a layout's transfers take; None where it is not known."""
    if setup.fidelity == "real":
        found = ceilings.links
        if found is None:
            return None
        return Link(latency_s=found.latency_s, bytes_per_s=found.bytes_per_s, curves=found.curves)
    return parse_link(setup.base.link, setup.device)


def calibrated_overhead(setup: Setup, ceilings: hardware.Ceilings, pilot: Outcome) -> float:
    """Seconds that a step takes beyond the cost model's floor, from a run of the default."""
    seen = [row.tpot_s for row in pilot.requests if row.tpot_s is not None]
    if not seen:
        return 0.0
    modelled = predictor(setup, ceilings)(setup.space.default).tpot_s
    return max(0.0, sum(seen) / len(seen) - modelled)


def beats_ceilings(setup: Setup, ceilings: hardware.Ceilings, run: Outcome) -> bool:
    """Whether a run of the default gave more output than the ceilings allow at all."""
    if run.state != "complete" or run.run_s <= 0 or setup.world > 1:
        return False
    most = most_tokens_per_s(CostModel.of(setup.resolved, ceilings), setup.workload)
    return sum(row.osl for row in run.requests) / run.run_s > most


def prior_of(setup: Setup, predict: Predict, *, overhead_s: float = 0.0) -> Prior | None:
    """Predictions for every point: the first objective, and how its means stand to the SLO.

    Args:
        predict: what is expected.
        overhead_s: of each step in `predict`; what is left is the floor.
    """
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
            floor_ratio=(seen.tpot_s - overhead_s) / slo.tpot_s,
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
    """Settings in one line: the layout where it is tuned, and what differs from the default."""
    layout = layout_name(settings)
    of_layout = {p.name for p in LAYOUT_PARAMS}
    others = changed(settings, default).items()
    parts = [f"{k}={v}" for k, v in others if k in free and k not in of_layout]
    if not layout:
        return ", ".join(parts) or "the default settings"
    if settings == default:
        return f"{layout} (the default settings)"
    return ", ".join([layout, *parts])
