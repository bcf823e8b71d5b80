"""A small engine model for search tests: continuous batching on a virtual clock.

Steps cost a constant, a part per token and a part per running request; the scheduler serves
decodes first and fills the token budget with prefill. It has the traits that make tuning real
settings hard: an optimum inside the space, an SLO edge, plateaus, and noise by point.
"""

import zlib
from collections.abc import Mapping

import numpy as np

from kllm.config import EngineConfig
from kllm.tuners.objective import Goal
from kllm.tuners.outcome import Outcome, Served, Tick, thin
from kllm.tuners.params import CONSTRAINTS, PARAMS
from kllm.tuners.space import Site, Space, Value

SITE = Site(
    device="cpu",
    dtype="float32",
    page_granule=16,
    default_page_size=16,
    kv_dtypes=("auto", "bfloat16", "fp8"),
    concurrency=32,
    prompt_tokens=128,
    request_tokens=160,
)
GOAL = Goal.of(["goodput"], "ttft=800ms,tpot=30ms")
BASE = EngineConfig(model="deepseek-v4")


def space() -> Space:
    return Space(PARAMS, CONSTRAINTS, site=SITE, base=BASE)


def step_s(tokens: int, running: int, settings: Mapping[str, Value]) -> float:
    """Seconds of one step."""
    page = int(settings["page_size"]) or 16
    per_request = {"auto": 2.0e-4, "bfloat16": 1.6e-4, "fp8": 3.0e-4}[str(settings["kv_dtype"])]
    return 4e-3 + 6e-5 * tokens + per_request * running * (1 + page / 512)


def run(settings: Mapping[str, Value], requests: int = 64, noise: float = 0.02) -> Outcome:
    """Serve `requests` of 96 + 24 tokens with SITE.concurrency in flight."""
    key = zlib.crc32(repr(sorted(settings.items())).encode())
    factor = float(np.exp(np.random.default_rng(key).normal(0, noise)))
    budget, slots = int(settings["token_budget"]), int(settings["max_batch"])
    isl, osl = 96, 24
    waiting: list[list[float]] = []  # [arrival, prefill left, tokens made, first token at]
    running: list[list[float]] = []
    now, sent, made = 0.0, 0, 0
    rows: list[Served] = []
    ticks: list[Tick] = []
    while len(rows) < requests:
        while sent < requests and len(waiting) + len(running) < SITE.concurrency:
            waiting.append([now, isl, 0, 0.0])
            sent += 1
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        decoding = [r for r in running if r[1] == 0]
        left, tokens = budget - len(decoding), len(decoding)
        advanced = list(decoding)
        for request in running:
            if request[1] > 0 and left > 0:
                chunk = min(left, int(request[1]))
                request[1] -= chunk
                left -= chunk
                tokens += chunk
                if request[1] == 0:
                    advanced.append(request)
        now += factor * step_s(tokens, len(running), settings)
        for request in advanced:
            request[2] += 1
            made += 1
            if request[2] == 1:
                request[3] = now
            if request[2] == osl:
                running.remove(request)
                arrival, first = request[0], request[3]
                tpot = (now - first) / (osl - 1)
                rows.append(Served(now, first - arrival, tpot, now - arrival, isl, osl, True))
        ticks.append(Tick(now, made, len(running), len(waiting)))
    return Outcome(
        state="complete",
        start_s=0.1,
        run_s=now,
        total_s=now + 0.1,
        num_requests=requests,
        num_output_tokens=requests * osl,
        requests=tuple(rows),
        ticks=thin(ticks),
    )
