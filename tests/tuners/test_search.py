"""Studies lose nothing, repeat nothing, and go on after everything."""

import json
import multiprocessing
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import optuna
import psutil
import pytest
from optuna.trial import TrialState

from kllm.errors import ConfigError, DataError
from kllm.tuners.interrupt import Interrupt
from kllm.tuners.outcome import Outcome
from kllm.tuners.params import CONSTRAINTS, PARAMS
from kllm.tuners.prior import Guess, Prior
from kllm.tuners.sampler import Evidence, PointSampler, oversized
from kllm.tuners.search import Search
from kllm.tuners.space import Space, Value
from kllm.tuners.storage import open_storage
from kllm.tuners.study import Trial, newest_study, open_study
from tests.tuners import fake

IDENTITY = {"model": "m", "workload": {"isl": 256}, "space": {"max_batch": [1, 2]}}


def measure(settings: Mapping[str, Value], best: Trial | None) -> Outcome:
    return fake.run(settings)


def small_space() -> Space:
    return Space(
        PARAMS,
        CONSTRAINTS,
        site=fake.SITE,
        base=fake.BASE,
        fixed={"kv_dtype": "auto", "page_size": 0, "max_batch": 16},
    )


def search_in(storage: optuna.storages.BaseStorage, run=measure, resume=False, **more) -> Search:
    space = more.pop("space", None) or fake.space()
    sampler = PointSampler(space, fake.GOAL, prior=more.pop("prior", None), seed=1)
    study = open_study(
        storage, "s", goal=fake.GOAL, identity=IDENTITY, resume=resume, sampler=sampler
    )
    return Search(study, space, fake.GOAL, sampler, run, **more)


@pytest.fixture
def journal(tmp_path: Path) -> str:
    return f"journal:{tmp_path / 'study.journal'}"


def points(search: Search) -> list[str]:
    return [repr(sorted(t.settings.items())) for t in search.trials() if t.state != "interrupted"]


def test_default_settings_run_first() -> None:
    search = search_in(optuna.storages.InMemoryStorage())
    search.run(trials=1)
    assert search.trials()[0].settings == search.space.default


def test_trials_are_counted_over_all_runs_of_a_study(journal: str) -> None:
    first = search_in(open_storage(journal))
    assert "all 3 trials" in first.run(trials=3)
    again = search_in(open_storage(journal), resume=True)
    again.run(trials=8)
    assert len(again.trials()) == 8
    assert len(set(points(again))) == 8
    best = again.best()
    assert best is not None
    assert fake.GOAL.feasible(best.metrics)


def test_small_space_is_tried_to_the_end_and_never_twice() -> None:
    search = search_in(optuna.storages.InMemoryStorage(), space=small_space())
    assert search.run(trials=1000) == "every valid combination was tried"
    assert len(set(points(search))) == len(points(search)) == len(search.space.points)


def test_space_of_one_point_is_one_trial() -> None:
    fixed = {"kv_dtype": "auto", "page_size": 0, "max_batch": 16, "token_budget": 64}
    space = Space(PARAMS, CONSTRAINTS, site=fake.SITE, base=fake.BASE, fixed=fixed)
    search = search_in(optuna.storages.InMemoryStorage(), space=space)
    search.run(trials=10)
    assert len(search.trials()) == 1


def test_failed_points_are_not_suggested_again_and_keep_their_reason() -> None:
    def run(settings: Mapping[str, Value], best: Trial | None) -> Outcome:
        if settings["token_budget"] in (64, 128):
            return Outcome(state="failed", reason="out of device memory")
        return fake.run(settings)

    search = search_in(optuna.storages.InMemoryStorage(), run, space=small_space())
    search.run(trials=1000)
    failed = [t for t in search.trials() if t.state == "failed"]
    assert {t.settings["token_budget"] for t in failed} == {64, 128}
    assert {t.reason for t in failed} == {"out of device memory"}
    assert len(set(points(search))) == len(points(search)) == len(search.space.points)


def test_stopped_trial_is_never_the_best() -> None:
    def run(settings: Mapping[str, Value], best: Trial | None) -> Outcome:
        outcome = fake.run(settings)
        if best is None:
            return outcome
        return Outcome(state="stopped", reason="x", run_s=0.001, ticks=outcome.ticks)

    search = search_in(optuna.storages.InMemoryStorage(), run)
    search.run(trials=5)
    best = search.best()
    assert best is not None
    assert best.number == 0
    assert [t.state for t in search.trials()][1:] == ["stopped"] * 4


def test_hopeless_points_are_pruned_with_the_model_reason_and_cost_no_trial() -> None:
    space = fake.space()

    def predicted(settings: Mapping[str, Value]) -> Guess:
        # Right about the batch and sure of it: small batches are hopeless.
        return Guess(value=float(settings["max_batch"]), slo_ratio=0.5)

    def run(settings: Mapping[str, Value], best: Trial | None) -> Outcome:
        outcome = fake.run(settings, noise=0)
        factor = 64 / float(settings["max_batch"])
        rows = tuple(r._replace(ttft_s=0.1, tpot_s=0.01) for r in outcome.requests)
        return replace(outcome, run_s=10 * factor, requests=rows)

    prior = Prior.of(space, predicted)
    search = search_in(optuna.storages.InMemoryStorage(), run, space=space, prior=prior)
    search.run(trials=12)
    pruned = [t for t in search.trials() if t.state == "pruned"]
    assert search.ran() == 12
    assert all("hopeless by the cost model" in t.reason for t in pruned)
    assert all(int(t.settings["max_batch"]) < 64 for t in pruned)


def too_large_from(budget: int):
    """Measures, but token budgets from this on do not fit the memory."""

    def measure(settings: Mapping[str, Value], best: Trial | None) -> Outcome:
        if int(settings["token_budget"]) >= budget:
            return Outcome(state="failed", reason="out of device memory", too_large=True)
        return fake.run(settings)

    return measure


def test_what_is_larger_than_what_did_not_fit_is_not_run() -> None:
    pinned = {"kv_dtype": "auto"}
    few = Space(PARAMS, CONSTRAINTS, site=fake.SITE, base=fake.BASE, fixed=pinned)
    search = search_in(optuna.storages.InMemoryStorage(), too_large_from(4096), space=few)
    search.run(trials=14)
    trials = search.trials()
    failed = [t for t in trials if t.state == "failed"]
    assert {t.settings["token_budget"] for t in failed} <= {4096}
    space = search.space
    huge = [p for p in range(len(space.points)) if space.settings(p)["token_budget"] == 4096]
    assert 0 < len(failed) <= 5 < len(huge)
    for late in failed[2:]:  # each was smaller in the batch than all but one of those before
        before = [t for t in failed if t.number < late.number]
        assert sum(t.settings["max_batch"] <= late.settings["max_batch"] for t in before) < 2


def test_failure_of_a_smaller_point_does_not_rule_out_what_is_known_to_run() -> None:
    space = fake.space()
    at = [space.find({"token_budget": b, "max_batch": 8}) for b in (512, 1024, 4096)]
    also = space.find({"token_budget": 512, "max_batch": 8, "page_size": 32})
    other = space.find({"token_budget": 1024, "max_batch": 8, "page_size": 64})
    seen = Evidence(frozenset(), (), ((at[2], {}),), frozenset(), (at[0], also))
    found = oversized(space, seen)
    assert at[1] in found  # the same but for the budget, and 512 did not fit
    assert other not in found  # something as large did run


def test_model_that_knows_nothing_is_no_prior() -> None:
    for value in (float("nan"), 3.0):
        guess = Guess(value=value, slo_ratio=0.5)
        assert Prior.of(fake.space(), lambda settings, guess=guess: guess) is None


def test_resuming_another_study_names_every_difference(journal: str) -> None:
    search_in(open_storage(journal)).run(trials=1)
    sampler = PointSampler(fake.space(), fake.GOAL)
    other = IDENTITY | {"model": "n", "workload": {"isl": 512}}
    with pytest.raises(ConfigError, match=r"model was m, now n; workload.isl was 256, now 512"):
        open_study(
            open_storage(journal),
            "s",
            goal=fake.GOAL,
            identity=other,
            resume=True,
            sampler=sampler,
        )


def test_existing_study_is_not_continued_by_accident(journal: str) -> None:
    search_in(open_storage(journal)).run(trials=1)
    with pytest.raises(ConfigError, match="--resume"):
        search_in(open_storage(journal))


def test_nothing_to_resume_is_said(journal: str) -> None:
    with pytest.raises(ConfigError, match="no study 's' to resume"):
        search_in(open_storage(journal), resume=True)
    with pytest.raises(ConfigError, match="no study of m to resume"):
        newest_study(open_storage(journal), "m")
    with pytest.raises(ConfigError, match="no study to resume"):
        newest_study(open_storage(journal))


def test_newest_study_of_the_model_is_found(journal: str) -> None:
    storage = open_storage(journal)
    search_in(storage).run(trials=1)
    assert newest_study(storage, "m") == newest_study(storage) == "s"


def test_foreign_study_is_refused(journal: str) -> None:
    optuna.create_study(storage=open_storage(journal), study_name="s")
    with pytest.raises(ConfigError, match="not made by kllm tune"):
        search_in(open_storage(journal), resume=True)


def test_interrupt_ends_after_the_running_trial() -> None:
    interrupt = Interrupt()

    def run(settings: Mapping[str, Value], best: Trial | None) -> Outcome:
        interrupt.asked = True
        return fake.run(settings)

    search = search_in(optuna.storages.InMemoryStorage(), run, interrupt=interrupt)
    assert search.run(trials=10) == "interrupted"
    assert [t.state for t in search.trials()] == ["complete"]


def test_trial_cut_short_is_stored_and_run_again_on_resume(journal: str) -> None:
    def run(settings: Mapping[str, Value], best: Trial | None) -> Outcome:
        if best is not None:
            raise KeyboardInterrupt
        return fake.run(settings)

    search = search_in(open_storage(journal), run)
    with pytest.raises(KeyboardInterrupt):
        search.run(trials=10)
    cut = search.trials()[1]
    assert (cut.state, cut.reason) == ("interrupted", "interrupted; run again")
    again = search_in(open_storage(journal), resume=True)
    again.run(trials=3)
    assert again.trials()[2].settings == cut.settings
    assert [t.state for t in again.trials()] == ["complete", "interrupted", "complete", "complete"]


def abandon(search: Search, owner: dict | None) -> dict[str, Value]:
    """Leave a trial as a process that dies in the middle of it does."""
    trial = search.study.ask(search.sampler.distributions)
    if owner:
        trial.set_user_attr("owner", owner)
    return trial.params


def owner(pid: int, started: float) -> dict:
    return {"host": socket.gethostname(), "pid": pid, "started": started}


def test_trial_of_a_dead_process_is_run_again_once(journal: str) -> None:
    search = search_in(open_storage(journal))
    search.run(trials=2)
    dead = owner(os.getpid(), 1.0)  # the number is in use again, by a younger process
    params = abandon(search, dead)
    again = search_in(open_storage(journal), resume=True)
    again.run(trials=3)
    assert again.trials()[2].state == "interrupted"
    assert again.study.trials[3].params == params
    assert again.trials()[3].state == "complete"


def test_point_that_ends_its_process_twice_is_given_up(journal: str) -> None:
    dead = owner(os.getpid(), 1.0)
    abandon(search_in(open_storage(journal)), dead)
    second = search_in(open_storage(journal), resume=True)
    assert second.recover() == 1
    abandon(second, dead)
    third = search_in(open_storage(journal), resume=True)
    assert third.recover() == 0
    assert "interrupted twice" in third.trials()[1].reason
    third.run(trials=3)
    assert len(set(points(third))) == len(points(third))


def test_running_trial_of_a_living_process_is_left_alone(journal: str) -> None:
    search = search_in(open_storage(journal))
    abandon(search, owner(os.getpid(), psutil.Process().create_time()))
    other = search_in(open_storage(journal), resume=True)
    assert other.recover() == 0
    other.run(trials=3)
    assert other.study.trials[0].state == TrialState.RUNNING
    assert len(set(points(other))) == len(points(other)) == 3


def run_many(url: str, count: int) -> None:
    search_in(open_storage(url), resume=True, space=small_space()).run(trials=count)


def test_processes_that_share_a_study_never_repeat_a_point(journal: str) -> None:
    search = search_in(open_storage(journal), space=small_space())
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=run_many, args=(journal, 1000)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [w.exitcode for w in workers] == [0, 0]
    ran = [t for t in search.trials() if t.state == "complete"]
    assert len(ran) == len(small_space().points)
    assert len({repr(t.settings) for t in ran}) == len(ran)


def test_journal_with_a_torn_line_goes_on(journal: str) -> None:
    search_in(open_storage(journal)).run(trials=2)
    path = Path(journal.removeprefix("journal:"))
    path.write_bytes(path.read_bytes() + b'{"op_code":5,"wor')
    again = search_in(open_storage(journal), resume=True)
    again.run(trials=3)
    assert [t.state for t in again.trials()] == ["complete"] * 3
    for line in path.read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:////nonexistent/folder/study.db",
        "postgresql+psycopg2://nobody@localhost:1/x",
        "redis://localhost",
        "what://x",
        "journal:/proc/nothing/study.journal",
    ],
)
def test_storage_that_cannot_be_reached_is_one_sentence(url: str) -> None:
    with pytest.raises(DataError, match="storage") as caught:
        open_storage(url)
    assert "\n" not in str(caught.value)


def test_sqlite_works_as_well(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    search_in(open_storage(url)).run(trials=2)
    again = search_in(open_storage(url), resume=True)
    again.run(trials=3)
    assert [t.state for t in again.trials()] == ["complete"] * 3


def test_trial_of_another_version_names_itself() -> None:
    bad = Trial(number=7, settings={}, state="complete", reason="", metrics={}, stored={"state": 1})
    with pytest.raises(DataError, match="trial 7"):
        _ = bad.outcome
