"""Buffers read through Mooncake's transfer engine, by TCP or by NVLink within a machine.

Source: mooncake-transfer-engine 0.3 (github.com/kvcache-ai/Mooncake). The engine does not refuse a
protocol that it does not have but takes another; which one is decided by environment variables.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

from kllm.errors import DependencyError, WorkerError
from kllm.hardware.links import Call

HOST = "127.0.0.1"
NO_SERVER = "P2PHANDSHAKE"  # engines ask each other for what a metadata server would tell
# Protocol, to the variable that leaves no other; set is on, whatever the value.
SWITCHES = {"tcp": "MC_FORCE_TCP", "nvlink_intra": "MC_INTRANODE_NVLINK"}
OTHER_SWITCHES = ("MC_FORCE_HCA", "MC_FORCE_MNNVL", "MC_FORCE_SHM")

MooncakeProtocol = Literal["tcp", "nvlink_intra"]
Offer = tuple[str, int]  # an engine's address, and that of a buffer


class Mooncake:
    """A transfer engine; the process has no other.

    Raises:
        ImportError, OSError: mooncake does not load.
        DependencyError: this build of it has no such protocol.
        WorkerError: the engine does not start.
    """

    def __init__(self, protocol: MooncakeProtocol) -> None:
        for name in (*SWITCHES.values(), *OTHER_SWITCHES):
            os.environ.pop(name, None)
        os.environ[SWITCHES[protocol]] = "1"
        from mooncake import engine

        if protocol == "nvlink_intra" and not getattr(engine, "SUPPORT_INTRA_NVLINK", False):
            raise DependencyError("this build of it does not say that it has nvlink_intra")
        self._engine = engine.TransferEngine()
        _check("initialize", self._engine.initialize(HOST, NO_SERVER, protocol, ""))

    @contextmanager
    def offered(self, x: Tensor) -> Iterator[Offer]:
        """See `Endpoint.offered`."""
        with self._registered(x):
            yield f"{HOST}:{self._engine.get_rpc_port()}", x.data_ptr()

    @contextmanager
    def reader(self, x: Tensor, offer: Offer) -> Iterator[Call]:
        """See `Endpoint.reader`."""
        peer, address = offer
        read = self._engine.transfer_sync_read
        with self._registered(x):
            yield lambda: _check("read", read(peer, x.data_ptr(), address, x.nbytes))

    @contextmanager
    def _registered(self, x: Tensor) -> Iterator[None]:
        _check("register_memory", self._engine.register_memory(x.data_ptr(), x.nbytes))
        yield
        _check("unregister_memory", self._engine.unregister_memory(x.data_ptr()))


def _check(what: str, code: int) -> None:
    if code:
        raise WorkerError(f"{what} answered {code}")
