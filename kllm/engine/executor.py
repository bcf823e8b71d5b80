"""Who runs the plans: the seam between one engine and one or many ranks.

An executor owns networks, KV memory and devices. The engine above it knows only plans and
outcomes, so ranks in other processes, torchrun's or a simulation take the same place.
"""

from typing import Protocol

import torch

from kllm.cache.pool import KVPool
from kllm.config import EngineConfig, ParallelConfig
from kllm.core import Outcome, Plan
from kllm.engine.graphs import DecodeGraphs
from kllm.engine.memory import SCRATCH, KVBudget, plan_kv
from kllm.engine.profile import activation_bytes
from kllm.engine.runner import ModelRunner
from kllm.errors import ConfigError
from kllm.models.base import CausalLM, Groups
from kllm.models.devices import fit_threads
from kllm.models.load import ResolvedModel, load_model
from kllm.sampling.sampler import Sampler


class Executor(Protocol):
    """Runs plans one after the other."""

    budget: KVBudget

    def execute(self, plan: Plan) -> Outcome:
        """Run one step and return its sampled tokens.

        Raises:
            torch.OutOfMemoryError: when a device runs out of memory.
            WorkerError: when a rank died or hung.
        """

    def close(self) -> None:
        """Give memory and processes back."""


class InProcessExecutor:
    """One rank in this process.

    Args:
        model: the network if it is already loaded; it outlives the executor.

    Raises:
        ConfigError: for a layout of several ranks.
        CapacityError: when the weights or the KV pool do not fit the device.
    """

    def __init__(
        self, config: EngineConfig, resolved: ResolvedModel, model: CausalLM | None = None
    ) -> None:
        if config.parallel != ParallelConfig():
            raise ConfigError(
                f"{config.parallel} is a layout of several ranks and this engine runs one; leave "
                "every degree at 1"
            )
        device = torch.device(resolved.device)
        dtype: torch.dtype = getattr(torch, resolved.dtype)
        if model is None:
            model = load_model(resolved, device=device, dtype=dtype, groups=Groups.single())
        if device.type == "cpu":
            fit_threads(sum(p.numel() * p.element_size() for p in model.parameters()))
        self.budget = budget = plan_kv(
            config,
            model.cache_spec,
            kv_dtype=resolved.kv_dtype,
            model_len=resolved.config.max_position_embeddings,
            device=device,
            activation_bytes=activation_bytes(config, model, resolved.kv_dtype, dtype, device),
        )
        pool = KVPool(
            model.cache_spec,
            num_pages=budget.num_pages + SCRATCH,
            page_size=budget.page_size,
            max_batch=budget.max_batch + SCRATCH,
            kv_dtype=budget.kv_dtype,
            compute_dtype=dtype,
            device=device,
            rewind_tokens=budget.rewind_tokens,
        )
        graphs = None
        if config.graphs and device.type == "cuda" and model.capturable:
            graphs = DecodeGraphs(
                model,
                pool,
                scratch_page=budget.num_pages,
                scratch_row=budget.max_batch,
                max_pages=-(-budget.max_model_len // budget.page_size),
            )
        sampler = Sampler(config.seed, device)
        self._runner: ModelRunner | None = ModelRunner(model, pool, sampler, device, graphs)

    def execute(self, plan: Plan) -> Outcome:
        """Run one step in this process."""
        assert self._runner is not None, "executor used after close"
        return self._runner.run(plan)

    def close(self) -> None:
        """Drop the KV pool; what the caller does not hold of the network goes too."""
        device = self._runner.device if self._runner else None
        self._runner = None
        if device is not None and device.type == "cuda":
            torch.cuda.empty_cache()
