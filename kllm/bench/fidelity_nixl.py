"""Buffers read through NIXL, NVIDIA's library for moving inference data, by its UCX backend.

UCX takes the fastest way that it finds between two processes: CUDA IPC between the GPUs of a
machine, shared or directly read memory between processes on a CPU.
Source: nixl 1.5 (github.com/ai-dynamo/nixl), whose agents name memory by descriptors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from torch import Tensor

from kllm.errors import WorkerError
from kllm.hardware.links import Call

Offer = tuple[bytes, bytes]  # an agent's metadata, and descriptors of a buffer


class Nixl:
    """An agent with the UCX backend.

    Raises:
        ImportError, OSError: nixl does not load.
    """

    def __init__(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(uuid4().hex, nixl_agent_config(backends=["UCX"]))

    @contextmanager
    def offered(self, x: Tensor) -> Iterator[Offer]:
        """See `Endpoint.offered`."""
        with self._registered(x) as memory:
            # Metadata holds what is registered by now, so it is taken after the buffer is.
            descriptors = self._agent.get_serialized_descs(memory.trim())
            yield self._agent.get_agent_metadata(), descriptors

    @contextmanager
    def reader(self, x: Tensor, offer: Offer) -> Iterator[Call]:
        """See `Endpoint.reader`."""
        agent = self._agent
        metadata, descriptors = offer
        with self._registered(x) as memory:
            peer = agent.add_remote_agent(metadata)
            theirs = agent.deserialize_descs(descriptors)
            transfer = agent.initialize_xfer("READ", memory.trim(), theirs, peer)

            def read() -> None:
                state = agent.transfer(transfer)
                while state == "PROC":
                    state = agent.check_xfer_state(transfer)
                if state != "DONE":
                    raise WorkerError(f"a read ended in the state {state}")

            yield read
            agent.release_xfer_handle(transfer)
            agent.remove_remote_agent(peer)

    @contextmanager
    def _registered(self, x: Tensor) -> Iterator[Any]:
        memory = self._agent.register_memory(x)
        yield memory
        self._agent.deregister_memory(memory)
