"""Files: atomic, complete, with errors that name file and field."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kllm.errors import DataError
from kllm.results import store
from kllm.results.schema import Series
from tests.results import samples


def test_saved_result_loads_equal(tmp_path: Path) -> None:
    result = samples.tune()
    path = store.save(result, tmp_path / "deep" / "folder")
    assert path.name == "tune-r1.json"
    assert store.load(path) == result


def test_long_series_goes_to_csv_and_comes_back(tmp_path: Path) -> None:
    rows = [{"i": n, "x": n / 7, "state": "ok", "gap": None} for n in range(501)]
    result = samples.bench(series=(Series.of("requests", rows, {"x": "ms"}),))
    path = store.save(result, tmp_path / "r.json")
    assert (tmp_path / "r.requests.csv").read_text().startswith("i,x,state,gap\n0,0.0,ok,\n")
    assert json.loads(path.read_text())["series"][0]["rows"] is None
    assert store.load(path) == result


def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    """A report for /dev/stdout would otherwise replace the device, as root does what it says."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_bytes)
        store.write_atomic(pipe, b"report")
        assert read.result(timeout=10) == b"report"
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_run_that_measured_nothing_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    journal = store.RunJournal(tmp_path / "mine" / "new" / "newer", samples.bench())
    journal.discard()
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    store.write_atomic(path, b"old")

    def power_cut(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", power_cut)
    with pytest.raises(KeyboardInterrupt):
        store.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_unwritable_place_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        store.save(samples.bench(), tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{", "truncated"), (b'{"run_id": 3}', "run_id"), (b"[]", "object"), (b"{}", "run_id")],
)
def test_unreadable_result_names_file_and_field(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        store.load(path)
    assert "bad.json" in str(caught.value)
    assert words in str(caught.value)


def test_a_file_that_does_not_end_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_FILE_BYTES", 1 << 20)
    with pytest.raises(DataError, match="/dev/zero holds more than 1 MiB"):
        store.load(Path("/dev/zero"))


def test_missing_csv_is_named(tmp_path: Path) -> None:
    rows = [{"i": n} for n in range(501)]
    path = store.save(samples.bench(series=(Series.of("rows", rows),)), tmp_path / "r.json")
    (tmp_path / "r.rows.csv").unlink()
    with pytest.raises(DataError, match=r"r\.rows\.csv"):
        store.load(path)


def test_journal_of_a_killed_run_gives_back_every_measurement(tmp_path: Path) -> None:
    header = samples.bench(metrics={}, series=())
    journal = store.RunJournal(tmp_path, header)
    journal.record("tpot_ms", 2.0, unit="ms", direction="lower")
    journal.record("tpot_ms", float("nan"), unit="ms", direction="lower")
    journal.row("sweep", {"batch": 1, "step_ms": float("inf")})
    with journal.path.open("a") as torn:
        torn.write('{"metric": "tpot_ms", "val')
    found = store.recover(journal.path)
    assert found.metrics["tpot_ms"].values == (2.0,)
    assert found.metrics["tpot_ms"].dropped == 1
    assert found.series[0].rows == ((1, "inf"),)
    assert "did not finish" in found.notes[-1]


def test_finished_journal_disappears(tmp_path: Path) -> None:
    result = samples.bench()
    with store.RunJournal(tmp_path, result) as journal:
        path = journal.finish(result)
    assert store.list_results(tmp_path) == [path]
    assert not journal.path.exists()


def test_damaged_line_before_the_end_is_reported(tmp_path: Path) -> None:
    with store.RunJournal(tmp_path, samples.bench(metrics={}, series=())) as journal:
        with journal.path.open("a") as file:
            file.write("garbage\n")
        journal.row("sweep", {"batch": 1})
    with pytest.raises(DataError, match="line 2 is damaged"):
        store.recover(journal.path)
