"""Questions answered in the background: progress, one replay for many people, and what goes wrong."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from tests.handmade import HEALTHY_STEP_S, IDEAL_STEP_S, KEPT_STEP_S, SLOW_STEP_S, run, slow_trace
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.errors import StoreError
from tracekit.dashboards.browser.data import replays
from tracekit.dashboards.browser.data.queries import Results, Stored
from tracekit.dashboards.browser.data.replays import (
    Pending,
    Phase,
    QueryAction,
    Rejected,
    Replays,
    WhatifAnswer,
    WhatifQuery,
)

LONG_S = 60.0  # far more than a hand-made job takes: an answer ends the wait


@pytest.fixture(scope="module")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the slow job."""
    folder = tmp_path_factory.mktemp("analysed")
    slow_trace().write_parquet(folder / "slow.parquet")
    ran = run("import", folder / "slow.parquet", "--store", folder / "jobs.store")
    assert ran.code == 0, ran.err
    return folder / "jobs.store"


@pytest.fixture
def results(analysed: Path, tmp_path: Path) -> Results:
    return Results(shutil.copytree(analysed, tmp_path / analysed.name))


@pytest.fixture
def stored(results: Results) -> Stored:
    return results.stored("slow job")


class Held(Results):
    """Results whose traces are read only when the test says so."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.go = threading.Event()
        self.reading_began = threading.Event()
        self.reads = 0

    def job_of(self, stored: Stored) -> PipelineJob:
        self.reads += 1
        self.reading_began.set()
        self.go.wait()
        return super().job_of(stored)


@pytest.mark.parametrize(
    ("query", "step_s"),
    [
        (WhatifQuery("worker=1,0"), HEALTHY_STEP_S),
        (WhatifQuery("worker=1,0 + all * 2"), 2 * HEALTHY_STEP_S),
        (WhatifQuery("all", QueryAction.SCALE, 2.0), 2 * SLOW_STEP_S),
        (WhatifQuery("all", QueryAction.SCALE, 1.0), SLOW_STEP_S),
    ],
)
def test_the_answer_is_the_one_worked_out_by_hand(results, stored, query: WhatifQuery, step_s: float) -> None:
    answer = Replays(results).ask(stored, query, wait_s=LONG_S)
    assert isinstance(answer, WhatifAnswer)
    assert (answer.step_time_s, answer.recorded_s) == pytest.approx((step_s, SLOW_STEP_S))
    assert answer.slowdown is None
    assert answer.saved_s == pytest.approx(SLOW_STEP_S - step_s)
    assert answer.saved_gpu_hours_per_day == pytest.approx((1 - step_s / SLOW_STEP_S) * 4 * 24)
    assert answer.error_s == pytest.approx(0, abs=1e-9)  # equal steps, and the replay reproduces the recording


def test_what_is_kept_has_the_slowdown_of_the_paper(results, stored) -> None:
    answer = Replays(results).ask(stored, WhatifQuery("worker=1,0", QueryAction.KEEP), wait_s=LONG_S)
    assert isinstance(answer, WhatifAnswer)
    assert (answer.step_time_s, answer.slowdown) == pytest.approx((KEPT_STEP_S, KEPT_STEP_S / IDEAL_STEP_S))


def test_a_question_tells_what_is_under_way_until_its_answer_is_there(results, stored) -> None:
    held = Held(results.path)
    asking = Replays(held)
    query = WhatifQuery("worker=1,0")
    assert isinstance(asking.ask(stored, query), Pending)
    held.reading_began.wait()
    assert asking.ask(stored, query) == Pending(Phase.READING)
    held.go.set()
    assert isinstance(asking.ask(stored, query, wait_s=LONG_S), WhatifAnswer)


def test_many_people_who_ask_the_same_share_one_replay(results, stored) -> None:
    held = Held(results.path)
    asking = Replays(held)
    for _ in range(20):
        asking.ask(stored, WhatifQuery("worker=1,0"))
    held.go.set()
    first = asking.ask(stored, WhatifQuery("worker=1,0"), wait_s=LONG_S)
    assert asking.ask(stored, WhatifQuery("worker=1,0")) is first
    assert held.reads == 1


def test_a_selection_without_ops_is_refused_in_words(results, stored) -> None:
    rejected = Replays(results).ask(stored, WhatifQuery("stage=7"), wait_s=LONG_S)
    assert isinstance(rejected, Rejected)
    assert rejected.selection
    assert "matches no op; the job has stage 0-1" in rejected.message


def test_a_store_that_is_gone_is_refused_and_asked_again_the_next_time(results, stored) -> None:
    asking = Replays(results)
    away = results.path.with_suffix(".away")
    results.path.rename(away)
    rejected = asking.ask(stored, WhatifQuery("worker=1,0"), wait_s=LONG_S)
    assert isinstance(rejected, Rejected)
    assert not rejected.selection
    assert "is the store still there?" in rejected.message
    away.rename(results.path)
    assert isinstance(asking.ask(stored, WhatifQuery("worker=1,0"), wait_s=LONG_S), WhatifAnswer)


def test_a_job_removed_from_the_store_is_refused(results, stored, tmp_path: Path) -> None:
    slow_trace(name="another").write_parquet(tmp_path / "another.parquet")
    assert run("import", tmp_path / "another.parquet", "--store", tmp_path / "other.store").code == 0
    shutil.rmtree(results.path)
    (tmp_path / "other.store").rename(results.path)
    rejected = Replays(results).ask(stored, WhatifQuery("worker=1,0"), wait_s=LONG_S)
    assert isinstance(rejected, Rejected)
    assert "no job named 'slow job'" in rejected.message


def test_a_job_too_large_for_the_server_is_refused_before_it_is_read(results, stored, monkeypatch) -> None:
    monkeypatch.setattr(replays, "MOST_OPS", 10)
    rejected = Replays(results).ask(stored, WhatifQuery("worker=1,0"))
    assert isinstance(rejected, Rejected)
    assert "96 ops, more than the 10 that this server loads; ask with `tracekit whatif" in rejected.message


def test_a_job_that_memory_cannot_hold_is_refused(results, stored, monkeypatch) -> None:
    def full(stored: Stored) -> PipelineJob:
        raise MemoryError

    monkeypatch.setattr(results, "job_of", full)
    rejected = Replays(results).ask(stored, WhatifQuery("worker=1,0"), wait_s=LONG_S)
    assert isinstance(rejected, Rejected)
    assert "does not fit into this server's memory" in rejected.message


def test_a_question_that_takes_too_long_is_refused_and_may_be_asked_again(results, stored, monkeypatch) -> None:
    asking = Replays(results)
    for query in (
        WhatifQuery("worker=1,0"),
        WhatifQuery("worker=1,0 + slowest=3% * 0.5"),
        WhatifQuery("kind=~x.*", QueryAction.KEEP),
        WhatifQuery("fix=repair-link"),
    ):
        with monkeypatch.context() as short:
            short.setattr(replays, "LONGEST_S", 1e-9)
            rejected = asking.ask(stored, query, wait_s=LONG_S)
        assert rejected == Rejected(
            "it took longer than 1e-09 s; ask for less at a time, such as `worker=1,2` or `step=100-105`"
        )
    assert isinstance(asking.ask(stored, WhatifQuery("worker=1,0"), wait_s=LONG_S), WhatifAnswer)


def test_a_failure_of_our_own_is_no_stack_trace(results, stored, monkeypatch, caplog) -> None:
    def broken(stored: Stored) -> PipelineJob:
        raise KeyError(stored.name)

    monkeypatch.setattr(results, "job_of", broken)
    rejected = Replays(results).ask(stored, WhatifQuery("worker=1,0"), wait_s=LONG_S)
    assert rejected == Rejected("An error of tracekit itself; the server's log has the details.")
    assert "a replay failed" in caplog.text


def test_more_questions_than_may_wait_are_refused(results, stored, monkeypatch) -> None:
    monkeypatch.setattr(replays, "MOST_WAITING", 3)
    held = Held(results.path)
    asking = Replays(held)
    said = [asking.ask(stored, WhatifQuery(f"step={step}")) for step in range(5)]
    held.go.set()
    assert [type(status) for status in said] == [Pending] * 3 + [Rejected] * 2


def test_a_question_that_nobody_waits_for_any_more_is_dropped(results, stored, monkeypatch) -> None:
    monkeypatch.setattr(replays, "ABANDONED_S", -1.0)
    held = Held(results.path)
    asking = Replays(held)
    assert isinstance(asking.ask(stored, WhatifQuery("worker=1,0")), Pending)
    asking._pool.shutdown(wait=True)
    assert held.reads == 0


def test_the_last_answers_are_kept_and_older_ones_given_up(results, stored, monkeypatch) -> None:
    monkeypatch.setattr(replays, "ANSWERS_KEPT", 1)
    asking = Replays(results)
    first = asking.ask(stored, WhatifQuery("worker=1,0"), wait_s=LONG_S)
    asking.ask(stored, WhatifQuery("stage=0"), wait_s=LONG_S)
    asking.ask(stored, WhatifQuery("stage=1"), wait_s=LONG_S)
    again = asking.ask(stored, WhatifQuery("worker=1,0"), wait_s=LONG_S)
    assert again == first
    assert again is not first


def test_what_the_store_says_is_wrong_is_passed_on(results, stored, monkeypatch) -> None:
    def gone(stored: Stored) -> PipelineJob:
        raise StoreError("the shelf is empty")

    monkeypatch.setattr(results, "job_of", gone)
    assert Replays(results).ask(stored, WhatifQuery("all"), wait_s=LONG_S) == Rejected("the shelf is empty")
