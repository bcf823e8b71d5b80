"""Buffers between two processes: by torch, by libraries that work, and by those that do not."""

import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kllm.bench import fidelity_pair, fidelity_transfer
from kllm.bench.fidelity_mooncake import Mooncake
from kllm.bench.fidelity_pair import Open
from kllm.bench.fidelity_transfer import (
    WAYS,
    Moved,
    Way,
    add_transfers,
    measure_libraries,
    measure_transfers,
)
from kllm.bench.record import Record, Subject
from kllm.errors import DependencyError, WorkerError
from tests.bench.fake_libraries import Refused, Shared, Wrong, dies, does_not_load, hangs

SIZES = {"kv": 1000, "weights": 1 << 40}


def way(library: str, open_end: Open, module: str = "torch") -> Way:
    return Way(
        library=library,
        module=module,
        package="a-package",
        over="wire",
        kinds=("cpu",),
        open_end=open_end,
    )


def not_measured(library: str, reason: str) -> str:
    return f"Transfers by {library} over wire were not measured: {reason}."


def test_buffers_move_between_processes_both_ways() -> None:
    moved = measure_transfers("cpu", SIZES)
    assert [(m.what, m.way) for m in moved] == [
        (what, way) for what in SIZES for way in ("gloo send", "shared memory copy")
    ]
    assert moved[0].nbytes == 1000
    assert moved[2].nbytes == 16 << 20, "cut"
    assert all(m.seconds > 0 for m in moved)


def test_libraries_that_fail_cost_the_others_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    ways = (
        way("Absent", Shared, module="no_such_module"),
        way("Unloadable", does_not_load),
        way("Refused", Refused),
        way("Dead", dies),
        way("Wrong", Wrong),
        way("Good", Shared),
    )
    moved, notes = measure_libraries("cpu", SIZES, ways)
    assert [(m.what, m.way, m.nbytes) for m in moved] == [
        ("kv", "Good over wire", 1000),
        ("weights", "Good over wire", 16 << 20),
    ]
    assert all(m.seconds > 0 for m in moved)
    last = "the last line of its log"
    assert notes == [
        not_measured("Absent", "no module no_such_module is installed (pip install a-package)"),
        not_measured("Unloadable", "ImportError: libabsent.so.1: cannot open shared object file"),
        not_measured("Refused", f"RuntimeError: cannot register ({last}: E1 not this memory)"),
        not_measured("Dead", f"its process was killed by SIGKILL ({last}: F2 check failed)"),
        not_measured("Wrong", "it read other bytes than were offered, in a buffer of 1000"),
    ]
    assert capfd.readouterr() == ("", ""), "results go to standard output, libraries do not"


def test_a_library_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity_pair, "LIMIT_S", 1.0)
    moved, notes = measure_libraries("cpu", SIZES, [way("Stuck", hangs)])
    assert (moved, notes) == ([], [not_measured("Stuck", "it did not answer within 1 s")])


def test_one_reason_for_two_ways_of_a_library_is_one_sentence() -> None:
    absent = way("Absent", Shared, module="no_such_module")
    elsewhere = replace(absent, over="NVLink", kinds=("cuda",))
    _, notes = measure_libraries("cpu", SIZES, [absent, elsewhere, replace(absent, over="air")])
    assert notes == [
        "Transfers by Absent over wire and air were not measured: "
        "no module no_such_module is installed (pip install a-package)."
    ]


@pytest.mark.parametrize(
    "real", [w for w in WAYS if "cpu" in w.kinds], ids=lambda w: f"{w.library} {w.over}"
)
def test_an_installed_library_moves_buffers_between_processes(real: Way) -> None:
    if find_spec(real.module) is None:
        pytest.skip(f"{real.package} is not installed")
    moved, notes = measure_libraries("cpu", SIZES, [real])
    if any(f"{kind}Error: " in note for note in notes for kind in ("Import", "OS")):
        pytest.skip(notes[0])
    assert notes == []
    assert [(m.what, m.nbytes) for m in moved] == [("kv", 1000), ("weights", 16 << 20)]
    assert all(m.seconds > 0 for m in moved)


def test_libraries_are_recorded_when_the_collectives_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(kind: str, sizes: dict[str, int]) -> list[Moved]:
        raise WorkerError("rank 1 died")

    moved = [Moved("kv", "Good over wire", 1 << 20, 1e-3)]
    monkeypatch.setattr(fidelity_transfer, "measure_transfers", fails)
    monkeypatch.setattr(fidelity_transfer, "measure_libraries", lambda *_: (moved, ["A note."]))
    record = Record(Subject(name="n", model="m", scale="tiny", dtype="float32"), tmp_path)
    add_transfers(record, "cpu", SIZES, link_bytes_per_s=2e9)
    failed, row = record.rows["transfers"]
    assert failed == {"state": "failed", "reason": "rank 1 died"}
    assert row["achieved_over_link"] == pytest.approx((1 << 20) / 1e-3 / 2e9)
    assert record.notes == [fidelity_transfer.ONE_WAY, "A note."]


class FakeEngine:
    """An engine that starts, or answers as it is told."""

    code = 0

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        return self.code


def install(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    engine = SimpleNamespace(TransferEngine=FakeEngine, **attributes)
    monkeypatch.setitem(sys.modules, "mooncake", SimpleNamespace(engine=engine))
    monkeypatch.setattr("os.environ", {"MC_FORCE_MNNVL": "0", "MC_FORCE_TCP": "0"})


def test_mooncake_is_left_no_other_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks whether a variable is there and not at its value."""
    install(monkeypatch, SUPPORT_INTRA_NVLINK=True)
    Mooncake("nvlink_intra")
    assert os.environ == {"MC_INTRANODE_NVLINK": "1"}
    Mooncake("tcp")
    assert os.environ == {"MC_FORCE_TCP": "1"}


def test_a_mooncake_without_nvlink_does_not_stand_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(DependencyError, match="nvlink_intra"):
        Mooncake("nvlink_intra")


def test_a_mooncake_that_does_not_start_says_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr(FakeEngine, "code", -1)
    with pytest.raises(WorkerError, match="initialize answered -1"):
        Mooncake("tcp")
