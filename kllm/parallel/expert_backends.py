"""Which exchange a step of an expert group uses; the same on all of its ranks."""

import torch

from kllm.config import ParallelConfig
from kllm.errors import ConfigError, DependencyError
from kllm.parallel import expert_deep_ep
from kllm.parallel.communicator import Communicator
from kllm.parallel.expert_all_gather import AllGather
from kllm.parallel.expert_all_to_all import AllToAll
from kllm.parallel.expert_deep_ep import DeepEP
from kllm.parallel.expert_dispatch import Dispatcher, DispatchStep


def exchanges(name: str, tp: int, ep: int) -> bool:
    """Whether tokens travel to their experts: where no rank lacks any, only if asked for by name.

    Args:
        tp: ranks that hold the same tokens.
        ep: ranks that hold different experts.
    """
    return ep > 1 and (ep > tp or name != "auto")


def capturable(layout: ParallelConfig, batch: int) -> bool:
    """Whether a CUDA graph can hold the exchanges of a decode step, if it has any.

    Pipeline stages must agree, also those without experts: it follows from the layout, and `auto`
    counts as DeepEP wherever that is installed.

    Args:
        batch: tokens of the rank that runs the most.
    """
    name = layout.ep_backend
    if not exchanges(name, layout.tp, layout.ep):
        return True
    if name == "all_to_all":
        return False  # the host waits for its counts
    if name == "deep_ep" or (name == "auto" and expert_deep_ep.installed()):
        # So it does in DeepEP's kernels for larger steps.
        return -(-batch // layout.tp) <= expert_deep_ep.LOW_LATENCY_TOKENS
    return True


class Backends:
    """The exchanges that one name of `kllm.config.EP_BACKENDS` stands for.

    Args:
        per_rank: expert slots of each rank.
        dim, top_k: width of a token, and experts a token.
        device, dtype: of the tokens.

    Raises:
        ConfigError, DependencyError: when DeepEP is asked for and cannot be used, or is missing.
    """

    def __init__(
        self,
        name: str,
        comm: Communicator,
        *,
        per_rank: int,
        dim: int,
        top_k: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._prefill: Dispatcher
        self._decode: Dispatcher
        why = None
        if name in ("auto", "deep_ep"):
            why = expert_deep_ep.problem(comm, dim, top_k, device, dtype)
            if why is None:
                name = "deep_ep"
        if name == "deep_ep":
            if why is not None:
                missing = not expert_deep_ep.installed()
                if device.type == "cuda":  # elsewhere nothing imports it
                    missing = expert_deep_ep.unusable() is not None
                raise (DependencyError if missing else ConfigError)(why)
            self._prefill = self._decode = DeepEP(comm, per_rank, dim)
        elif name == "all_to_all":
            self._prefill = self._decode = AllToAll(comm, per_rank)
        elif name == "all_gather":
            self._prefill = self._decode = AllGather(comm, per_rank)
        else:
            self._prefill, self._decode = AllToAll(comm, per_rank), AllGather(comm, per_rank)

    def choose(self, step: DispatchStep) -> Dispatcher:
        """The exchange of a step."""
        return self._decode if step.decode_only else self._prefill
