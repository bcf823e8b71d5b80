"""The machine's description and its measured ceilings."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from kllm import env, hardware
from kllm.errors import CapacityError, DataError
from kllm.hardware import measured as module
from kllm.hardware.links import COLLECTIVES, GPU_SIZES, LinkCeilings, measure_links


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("KLLM_HOME", str(tmp_path / "home"))
    env.read.cache_clear()
    yield tmp_path / "home"
    env.read.cache_clear()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small buffers and few repeats: the figures mean little, the path is the real one."""
    monkeypatch.setattr(module, "CPU_BUFFER_BYTES", 8 << 20)
    monkeypatch.setattr(module, "CPU_MATRIX", 128)
    monkeypatch.setattr(module, "PROBE_MATRIX", 64)
    monkeypatch.setattr(module, "BUDGET_S", 0.02)


def test_fingerprint_is_plain_data_and_the_same_each_time() -> None:
    first = hardware.fingerprint()
    assert json.loads(json.dumps(first)) == first == hardware.fingerprint()
    assert first["cores"] >= 1
    assert first["libraries"]["torch"] == torch.__version__


def test_fingerprint_holds_the_clocks_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = hardware.Gpu(
        name="G", memory_bytes=2 << 30, driver="1.2", max_sm_clock_mhz=2000.0, capability=(9, 0)
    )
    machine = hardware.detect()
    changed = {name: getattr(machine, name) for name in hardware.Machine.__slots__}
    monkeypatch.setattr(
        "kllm.hardware.machine.detect", lambda: hardware.Machine(**{**changed, "gpus": (gpu, gpu)})
    )
    gpus = hardware.fingerprint(clocks=((300.0, 1980.0),))["gpus"]
    assert gpus[0] == {
        "name": "G",
        "memory_gib": 2.0,
        "driver": "1.2",
        "sm_clock_mhz": (300.0, 1980.0),
    }
    assert gpus[1]["sm_clock_mhz"] is None


def test_missing_libraries_say_how_to_install_them() -> None:
    for library in hardware.detect().missing:
        assert library.version is None
        assert library.install
        assert library.purpose


@pytest.mark.usefixtures("quick")
def test_ceilings_are_measured_once_and_read_back(home: Path) -> None:
    first = hardware.ceilings("cpu")
    assert first.copy_bytes_per_s > 1e8
    assert first.read_bytes_per_s > 1e8
    assert first.matmul("float32") > 1e8
    assert first.links is None
    [path] = home.iterdir()
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "launch_s": 123.0}))
    assert hardware.ceilings("cpu").launch_s == 123.0
    assert hardware.ceilings("cpu", fresh=True).launch_s < 1.0


@pytest.mark.usefixtures("quick")
def test_cached_ceilings_tell_when_they_were_measured(home: Path) -> None:
    assert hardware.cached_ceilings("cpu") is None
    found = hardware.ceilings("cpu")
    assert hardware.cached_ceilings("cpu") == found
    assert found.measured_at is not None
    assert found.measured_at in found.beaten
    assert "kllm doctor --fresh" in found.beaten
    [path] = home.iterdir()
    old = json.loads(path.read_text())
    del old["measured_at"]  # as an older kLLM wrote it
    path.write_text(json.dumps(old))
    assert "in the cache" in hardware.ceilings("cpu").beaten


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("content", ["", "{", '{"device": "cpu"}', "[]"])
def test_a_damaged_cache_is_measured_again(home: Path, content: str) -> None:
    hardware.ceilings("cpu")
    [path] = home.iterdir()
    path.write_text(content)
    assert hardware.ceilings("cpu").copy_bytes_per_s > 0
    assert json.loads(path.read_text())["device"] == "cpu"


@pytest.mark.usefixtures("quick")
def test_a_home_that_cannot_be_written_is_a_sentence(home: Path) -> None:
    home.write_text("a file where the folder should be")
    with pytest.raises(DataError, match="KLLM_HOME"):
        hardware.ceilings("cpu")


def test_unmeasured_dtypes_run_at_the_float32_rate() -> None:
    found = hardware.Ceilings(
        device="cpu",
        copy_bytes_per_s=1.0,
        read_bytes_per_s=1.0,
        matmul_flops_per_s={"float32": 5.0, "bfloat16": 7.0},
        launch_s=1.0,
    )
    assert (found.matmul("bfloat16"), found.matmul("float16")) == (7.0, 5.0)


@pytest.mark.gpu
def test_gpu_ceilings_are_in_the_order_of_the_data_sheet() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    found = hardware.measure_ceilings("cuda")
    assert found.matmul("bfloat16") > 3 * found.matmul("float32")
    assert found.read_bytes_per_s > 1e11


@pytest.mark.multi_gpu
def test_links_get_faster_with_size() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs")
    found = measure_links()
    for points in found.curves.values():
        assert len(points) == len(GPU_SIZES)
        (small, first_s), (large, last_s) = points[0], points[-1]
        assert large / last_s > 10 * small / first_s


def test_links_between_processes_are_measured_by_collective_and_size() -> None:
    sizes = (1 << 12, 1 << 20)
    found = measure_links("cpu", sizes)
    assert (found.ranks, found.backend) == (2, "gloo")
    assert set(found.curves) == set(COLLECTIVES)
    for points in found.curves.values():
        assert [sent for sent, _ in points] == list(sizes), "each sends what was asked for"
        assert all(seconds > 0 for _, seconds in points)
    assert found.latency_s == found.curves["ring_shift"][0][1]
    assert LinkCeilings.from_json(json.loads(json.dumps(asdict(found)))) == found


def test_one_gpu_has_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(CapacityError, match="this machine has 1"):
        measure_links("cuda")


@pytest.mark.usefixtures("quick")
def test_links_are_measured_when_asked_for_and_stay_in_the_cache(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = ((4096.0, 1e-5), (65536.0, 2e-5))
    found = LinkCeilings(ranks=2, backend="gloo", curves=dict.fromkeys(COLLECTIVES, points))
    measured: list[str] = []

    def measure(kind: str) -> LinkCeilings:
        measured.append(kind)
        return found

    monkeypatch.setattr(module, "measure_links", measure)
    assert hardware.ceilings("cpu").links is None
    assert hardware.ceilings("cpu", links=True).links == found
    assert hardware.ceilings("cpu").links == found
    assert measured == ["cpu"]
    assert hardware.ceilings("cpu", fresh=True).links == found
    assert measured == ["cpu", "cpu"]
