"""The machine's description and its measured ceilings."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
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
    said = hardware.mark_beaten(found)
    assert found.measured_at in said
    assert "kllm doctor --fresh" in said
    [path] = home.iterdir()
    old = json.loads(path.read_text())
    del old["measured_at"]  # as an older kLLM wrote it
    path.write_text(json.dumps(old))
    undated = hardware.cached_ceilings("cpu")
    assert undated is not None
    assert "in the cache" in hardware.mark_beaten(undated)


def at_load(monkeypatch: pytest.MonkeyPatch, load: float | None) -> None:
    """As a process that starts under this load of each core sees the machine."""
    monkeypatch.setattr(module, "load_at_start", lambda: load)


def spoil(home: Path, **changes: object) -> None:
    """Change what is in the cache."""
    [path] = home.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.usefixtures("quick")
def test_ceilings_of_a_busy_moment_are_measured_again_in_a_calm_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_load(monkeypatch, 0.8)
    hardware.ceilings("cpu")
    spoil(home, read_bytes_per_s=1.0, copy_bytes_per_s=1e18)
    assert hardware.ceilings("cpu").read_bytes_per_s == 1.0, "no better moment yet"
    at_load(monkeypatch, 0.1)
    found = hardware.ceilings("cpu")
    assert found.read_bytes_per_s > 1e8
    assert found.copy_bytes_per_s == 1e18, "the better of both"
    assert found.load == 0.1
    spoil(home, read_bytes_per_s=1.0)
    assert hardware.ceilings("cpu").read_bytes_per_s == 1.0, "calm ones are final"


@pytest.mark.usefixtures("quick")
def test_ceilings_that_a_run_beats_are_measured_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_load(monkeypatch, 0.1)
    hardware.ceilings("cpu")
    spoil(home, read_bytes_per_s=1.0)
    beaten = hardware.ceilings("cpu")
    assert "faster than the measured ceilings" in hardware.mark_beaten(beaten)
    assert hardware.ceilings("cpu").read_bytes_per_s > 1e8
    again = hardware.cached_ceilings("cpu")
    hardware.mark_beaten(beaten)
    assert hardware.cached_ceilings("cpu") == again, "others than those that were beaten"


@pytest.mark.usefixtures("quick")
def test_a_run_that_beats_ceilings_in_a_cache_that_cannot_be_written_says_so(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, data: dict[str, object]) -> None:
        raise DataError("cannot be stored")

    found = hardware.ceilings("cpu")
    monkeypatch.setattr(module, "_write", fails)
    assert "faster than the measured ceilings" in hardware.mark_beaten(found)


def test_the_load_of_cores_does_not_make_figures_of_a_gpu_doubtful() -> None:
    found = hardware.Ceilings(
        device="cuda",
        copy_bytes_per_s=1.0,
        read_bytes_per_s=1.0,
        matmul_flops_per_s={"float32": 1.0},
        launch_s=1.0,
        load=5.0,
    )
    assert not found.doubtful
    assert replace(found, beaten=True).doubtful
    assert replace(found, device="cpu").doubtful
    assert not replace(found, device="cpu", load=0.1).doubtful


def test_a_round_in_a_busy_moment_is_made_up_for_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each figure is taken from its own best round."""
    curve = dict.fromkeys(COLLECTIVES, ((4096.0, 2e-5), (65536.0, 2e-5)))
    quick_curve = dict.fromkeys(COLLECTIVES, ((4096.0, 1e-5), (65536.0, 3e-5)))
    one = hardware.Ceilings(
        device="cpu",
        copy_bytes_per_s=2.0,
        read_bytes_per_s=1.0,
        matmul_flops_per_s={"float32": 1.0, "float16": 4.0},
        launch_s=1.0,
        links=LinkCeilings(ranks=2, backend="gloo", curves=curve),
    )
    other = replace(
        one,
        copy_bytes_per_s=1.0,
        read_bytes_per_s=2.0,
        matmul_flops_per_s={"float32": 3.0},
        launch_s=2.0,
        links=LinkCeilings(ranks=2, backend="gloo", curves=quick_curve),
        load=0.2,
    )
    rounds = iter((one, one, other))
    monkeypatch.setattr(module, "_round", lambda *_: next(rounds))
    best = module.measure_ceilings("cpu")
    assert (best.copy_bytes_per_s, best.read_bytes_per_s, best.launch_s) == (2.0, 2.0, 1.0)
    assert best.matmul_flops_per_s == {"float32": 3.0, "float16": 4.0}
    assert best.load == 0.2
    links = module.best_of(one, other).links
    assert links is not None
    assert links.curves["all_reduce"] == ((4096.0, 1e-5), (65536.0, 2e-5))


def test_the_load_is_that_of_each_core_when_the_process_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = hardware.detect().cores
    module.load_at_start.cache_clear()
    monkeypatch.setattr("os.getloadavg", lambda: (2.0 * cores, 0.0, 0.0))
    assert module.load_at_start() == 2.0
    monkeypatch.setattr("os.getloadavg", lambda: (9.0 * cores, 0.0, 0.0))
    assert module.load_at_start() == 2.0, "the rest is this process's own work"
    module.load_at_start.cache_clear()


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
