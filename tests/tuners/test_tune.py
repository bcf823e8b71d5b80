"""Tuning survives Ctrl-C, kill -9 of itself and of its children, and leaves no process behind."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from kllm import hardware
from kllm.config import EngineConfig
from kllm.errors import ConfigError, DataError, KllmError
from kllm.recipes import schema as recipes
from kllm.results import compare as comparing
from kllm.results import store
from kllm.tuners.resume import STORED
from kllm.tuners.setup import Request
from kllm.tuners.storage import open_storage
from kllm.tuners.trial import WorkerRunner
from kllm.tuners.tune import Options, Tuned, Watcher, tune

ROOT = Path(__file__).parents[2]
PARK = '{"2048": "", "*": "wait"}'  # every run waits once it has begun, but for the default budget


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ceilings are measured once for all tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KLLM_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def run(output: Path, deeds: str = "{}", slo: str = "ttft=2s,tpot=50ms", **options) -> Tuned:
    """`tune` in this process, with fake workers."""
    runner = WorkerRunner(command=(sys.executable, "-m", "tests.tuners.fake_worker", deeds))
    request = Request(config=EngineConfig(model="deepseek-v4", scale="tiny", device="cpu"), slo=slo)
    settings = {"trials": 8} | options
    return tune(request, Options(output=output, **settings), runner=runner)


def test_study_ends_with_recipe_result_and_report(tmp_path: Path) -> None:
    tuned = run(tmp_path)
    assert tuned.files is not None
    assert tuned.files.recipe is not None
    loaded = store.load(tuned.files.result)
    assert loaded.kind == "tune"
    assert loaded.verdict
    assert loaded.boundary
    assert {"trials", "importance"} <= {series.name for series in loaded.series}
    assert recipes.load(str(tuned.files.recipe)).results == [loaded.run_id]
    assert "Parameters that mattered" in tuned.files.report.read_text()


def test_dying_workers_are_failed_trials_and_the_study_goes_on(tmp_path: Path) -> None:
    tuned = run(tmp_path, '{"2048": "", "*": "die"}')
    assert tuned.result is not None
    trials = tuned.result.find_series("trials")
    assert trials is not None
    rows = trials.to_dicts()
    failed = [row for row in rows if row["state"] == "failed"]
    assert 0 < len(failed) < len(rows)
    assert all("SIGKILL" in row["reason"] for row in failed)
    assert tuned.best is not None


def test_default_settings_that_cannot_run_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(KllmError, match=r"default settings cannot run.*kernel is broken"):
        run(tmp_path, '{"2048": "exit"}')


def test_slo_that_nothing_meets_says_what_is_attainable(tmp_path: Path) -> None:
    tuned = run(tmp_path, slo="ttft=1ms", trials=6)
    assert tuned.best is None
    assert tuned.sentence.startswith("no setting meets TTFT 1 ms for 90% of requests; the closest")
    assert tuned.files is not None
    assert tuned.files.recipe is None
    assert store.load(tuned.files.result).verdict == tuned.sentence


def test_several_objectives_give_a_front(tmp_path: Path) -> None:
    runner = WorkerRunner(command=(sys.executable, "-m", "tests.tuners.fake_worker"))
    request = Request(
        config=EngineConfig(model="deepseek-v4", scale="tiny", device="cpu"),
        objectives=("throughput", "latency"),
    )
    tuned = tune(request, Options(output=tmp_path, trials=8), runner=runner)
    assert tuned.result is not None
    front = tuned.result.find_series("pareto")
    assert front is not None
    names = [column.name for column in front.columns]
    assert names == ["number", "metric.e2e_p50_ms", "metric.output_tokens_per_s"]


def test_study_of_another_workload_is_not_continued(tmp_path: Path) -> None:
    run(tmp_path, trials=1)
    runner = WorkerRunner(command=(sys.executable, "-m", "tests.tuners.fake_worker"))
    request = Request(
        config=EngineConfig(model="deepseek-v4", scale="tiny", device="cpu"), workload="batch"
    )
    with pytest.raises(ConfigError, match=r"workload.isl was 16-128, now 32"):
        tune(request, Options(output=tmp_path, resume=True), runner=runner)


def resume(output: Path, request: Request, *given: str) -> Tuned:
    runner = WorkerRunner(command=(sys.executable, "-m", "tests.tuners.fake_worker"))
    options = Options(output=output, trials=3, resume=True, given=frozenset(given))
    return tune(request, options, runner=runner)


def test_resumed_study_has_its_options_from_the_storage(tmp_path: Path) -> None:
    first = run(tmp_path, trials=1, slo="ttft=3s")
    again = resume(tmp_path, Request(config=EngineConfig(model=STORED)))
    assert again.study == first.study
    assert again.setup.identity() == first.setup.identity()
    assert again.result is not None
    trials = again.result.find_series("trials")
    assert trials is not None
    assert len(trials.rows or ()) == 3


def test_option_that_the_study_was_not_made_with_is_named(tmp_path: Path) -> None:
    run(tmp_path, trials=1)
    config = EngineConfig(model="deepseek-v4", scale="full")
    asked = Request(config=config, workload="batch", num_requests=7)
    with pytest.raises(ConfigError) as raised:
        resume(tmp_path, asked, "--model", "--workload", "--requests")
    assert "begun with --workload chat, --requests not given" in str(raised.value)
    assert "cannot go on with --workload batch, --requests 7;" in str(raised.value)
    assert "--scale" not in str(raised.value)  # it was not given


def test_two_studies_of_one_question_can_be_compared(tmp_path: Path) -> None:
    results = [run(tmp_path / name, study=name).result for name in ("one", "two")]
    one, two = (result for result in results if result is not None)
    found = comparing.compare([one], [two])
    assert "goodput_tokens_per_s" in [row.metric for row in found.rows]
    assert one.extra["study"] == "one"
    other = run(tmp_path / "three", slo="ttft=1s,tpot=50ms").result
    assert other is not None
    with pytest.raises(ConfigError, match="slo"):
        comparing.compare([one], [other])


def test_run_above_the_ceilings_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(
        hardware.ceilings("cpu"), read_bytes_per_s=1.0, matmul_flops_per_s={"float32": 1}
    )
    monkeypatch.setattr(hardware, "ceilings", lambda device: slow)
    said: list[str] = []

    class Notes(Watcher):
        def note(self, sentence: str) -> None:
            said.append(sentence)

    runner = WorkerRunner(command=(sys.executable, "-m", "tests.tuners.fake_worker"))
    request = Request(config=EngineConfig(model="deepseek-v4", scale="tiny", device="cpu"))
    tune(request, Options(output=tmp_path, trials=1), watcher=Notes(), runner=runner)
    assert sum("kllm doctor --fresh" in sentence for sentence in said) == 1


def test_output_that_cannot_be_written_is_refused_before_anything_runs() -> None:
    with pytest.raises(DataError, match="choose another with --output"):
        run(Path("/proc/nothing"))


@pytest.mark.timeout(60)
def test_interrupt_of_the_pilot_run_ends_at_once_and_leaves_no_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing yet that waiting for the run would save."""
    pipe = tmp_path / "parked"
    os.mkfifo(pipe)
    monkeypatch.setenv("FAKE_PARKED", str(pipe))

    def press() -> None:
        pipe.read_text()  # the worker is in the middle of the run, and stays there
        os.kill(os.getpid(), signal.SIGINT)

    others = psutil.Process().children()
    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, '{"*": "wait"}')
    assert psutil.Process().children() == others
    assert open_storage(f"journal:{tmp_path / 'tune.journal'}").get_all_studies() == []


def test_interrupt_of_the_final_comparison_leaves_a_study_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kllm.tuners.tune.compare", interrupt)
    tuned = run(tmp_path, trials=1)
    assert tuned.interrupted
    assert tuned.result is None
    assert tuned.best is not None


class Tune:
    """A running fake_tune."""

    def __init__(self, output: Path, deeds: str, *flags: str) -> None:
        self.pipe = output / "parked"
        if not self.pipe.exists():
            os.mkfifo(self.pipe)
        env = os.environ | {"FAKE_PARKED": str(self.pipe), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.tuners.fake_tune", str(output), deeds, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=env,
        )
        self.lines: list[list[str]] = []

    def wait_for(self, wanted: Callable[[list[str]], bool]) -> list[str]:
        """Read lines until one fits."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.split())
            if wanted(self.lines[-1]):
                return self.lines[-1]
        assert self.process.stderr is not None
        raise AssertionError(f"ended early: {self.lines} {self.process.stderr.read()}")

    def wait_until_parked(self) -> None:
        """Until a worker waits in the middle of its run."""
        assert self.pipe.read_text() == "parked\n"

    def wait(self) -> int:
        """Read what is left; the exit code."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        # Not `communicate`: it would miss what `wait_for` has read ahead.
        out, err = self.process.stdout.read(), self.process.stderr.read()
        self.process.wait(60)
        self.lines += [line.split() for line in out.splitlines()]
        assert "Traceback" not in err, err
        return self.process.returncode

    def said(self, first: str) -> list[list[str]]:
        """Lines that begin with a word."""
        return [line for line in self.lines if line[0] == first]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Tune]]:
    """Starts tunings in one folder and ends what is left of them."""
    made: list[Tune] = []

    def begin(deeds: str, *flags: str) -> Tune:
        made.append(Tune(tmp_path, deeds, *flags))
        return made[-1]

    yield begin
    for one in made:
        one.process.kill()
        one.process.communicate()


def numbers(tune: Tune) -> list[tuple[str, str]]:
    return [(line[1], line[2]) for line in tune.said("ended")]


def test_killed_tuning_leaves_no_worker_and_resumes_with_nothing_lost(start, tmp_path) -> None:
    first = start(PARK)
    first.wait_until_parked()
    first.wait_for(lambda line: line[0] == "started" and line[1] != "0")
    worker = psutil.Process(int(first.lines[-1][2]))
    first.process.kill()
    first.wait()
    assert psutil.wait_procs([worker], timeout=10)[1] == []
    again = start("{}", "--resume")
    assert again.wait() == 0
    (resumed,) = again.said("resumed")
    assert resumed[2] == "1"
    assert numbers(again)[0][0] == resumed[1]  # the interrupted point comes first
    ran = [state for _, state in numbers(first) + numbers(again) if state != "pruned"]
    assert len(ran) == 8


def test_first_interrupt_finishes_the_running_trial(start) -> None:
    tune = start("{}", "--trials=100000")
    tune.wait_for(lambda line: line[:2] == ["ended", "2"])
    tune.process.send_signal(signal.SIGINT)
    assert tune.wait() == 130
    assert any("press Ctrl-C again" in " ".join(line) for line in tune.said("note"))
    assert tune.said("started")[-1][1] in [n for n, _ in numbers(tune)]
    assert tune.said("best")[0][1] != "None"


def test_second_interrupt_stops_at_once_and_stores_the_trial_as_interrupted(start) -> None:
    tune = start(PARK)
    tune.wait_until_parked()
    tune.process.send_signal(signal.SIGINT)
    tune.wait_for(lambda line: line[:2] == ["note", "Stopping"])
    tune.process.send_signal(signal.SIGINT)
    assert tune.wait() == 130
    assert tune.said("started")[-1][1] not in [n for n, _ in numbers(tune)]
    assert tune.said("best")[0][1] != "None"


def test_sigterm_stops_at_once_and_the_study_goes_on(start) -> None:
    first = start(PARK)
    first.wait_until_parked()
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 130
    again = start("{}", "--resume")
    assert again.wait() == 0
    assert first.said("started")[-1][1] not in [n for n, _ in numbers(first)]
    ran = [state for _, state in numbers(first) + numbers(again) if state != "pruned"]
    assert len(ran) == 8
