"""Incidents across windows: what opens one, what goes on, what closes it."""

from __future__ import annotations

import dataclasses
import math
import os
import pwd
import re
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from prometheus_client import generate_latest

from tests.dashboards.page_text import Pages
from tests.dashboards.watched import analysed, trace
from tests.handmade import findings_of, run
from tests.reports import hang_with, report_with
from tests.test_store_windows import window
from tracekit.live.incident_words import advice, lasted
from tracekit.live.metrics import StoreMetrics, remembered
from tracekit.live.receivers import DeliveryLog
from tracekit.live.watch import StoreChanges, Watch
from tracekit.report.conclusions import CauseInWords
from tracekit.report.report import Report
from tracekit.store import Store
from tracekit.store.care import damages, prune, repair
from tracekit.store.incidents import (
    HANG,
    Incident,
    IncidentChange,
    current_user,
    followed,
    muted_until,
    read_changes,
    write_change,
)

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SLOW = CauseInWords(
    "bad-worker", "compute", "rank 3: slow", "rank 3", "slow", "look", "replace it", (3,), ("node-a",), (), 0.02, 0.2,
    0.9, None, 5.0,
)  # fmt: skip
LATE = replace(SLOW, kind="late-data-loading", part="data-loading", what="data comes late", ranks=(), hosts=())


def verdict(*sightings: CauseInWords, kind: str = "straggler", trustworthy: bool = True) -> Report:
    report = report_with(verdict={"kind": kind}, trust={"trustworthy": trustworthy})
    return replace(report, answer=replace(report.answer, accounts=sightings))


HEALTHY = verdict(kind="balanced")


def after(*windows: Report) -> list[Incident]:
    """All incidents of a job with these windows, a minute each."""
    known: dict[int, Incident] = {}
    for number, shown in enumerate(windows):
        before = [one for one in known.values() if not one.settled]
        for one in followed(before, "job", number, shown, NOON + timedelta(minutes=number)):
            stored = dataclasses.replace(one, incident_id=one.incident_id or len(known) + 1)
            known[stored.incident_id] = stored
    return list(known.values())


def test_a_cause_is_one_incident_from_the_first_window_that_shows_it_to_the_second_that_does_not() -> None:
    worse = replace(SLOW, what="rank 3: slower", ranks=(2, 3))
    (incident,) = after(HEALTHY, verdict(SLOW), verdict(worse), HEALTHY, HEALTHY)
    assert (incident.opened_window, incident.seen_window, incident.closed_window) == (1, 2, 4)
    assert (incident.opened_at, incident.closed_at) == (NOON + timedelta(minutes=1), NOON + timedelta(minutes=4))
    assert incident.cause == worse


def test_a_cause_that_comes_and_goes_is_one_incident() -> None:
    (incident,) = after(verdict(SLOW), HEALTHY, verdict(SLOW), HEALTHY, verdict(SLOW))
    assert (incident.seen_window, incident.clear, incident.closed_at) == (4, 0, None)


def test_another_cause_at_the_same_ranks_is_the_same_incident_and_the_costliest_is_its_cause() -> None:
    """What is found to slow a rank down may change from window to window."""
    other = replace(LATE, ranks=(3, 4), cost_s=0.03)
    (incident,) = after(verdict(SLOW), verdict(other, SLOW), HEALTHY, verdict(SLOW))
    assert (incident.opened_window, incident.seen_window, incident.cause) == (0, 3, SLOW)
    assert after(verdict(SLOW), verdict(other, SLOW))[0].cause == other


def test_a_place_that_is_slow_again_before_it_was_gone_as_long_as_it_lasted_opens_its_incident_again() -> None:
    slow, gone = [verdict(SLOW)] * 5, [HEALTHY] * 4
    (closed,) = after(*slow, *gone)
    assert (closed.closed_window, closed.clear, closed.settled) == (6, 4, False)
    assert closed.closed_because == "no longer seen since window 5"
    (again,) = after(*slow, *gone, verdict(SLOW))
    assert (again.closed_at, again.seen_window, again.clear, again.windows) == (None, 9, 0, 10)
    (cured,) = after(*slow, *gone, HEALTHY)
    assert (cured.settled, cured.closed_because) == (True, "cured, gone since window 5")
    assert [one.opened_window for one in after(*slow, *gone, HEALTHY, verdict(SLOW))] == [0, 10]
    small = verdict(replace(SLOW, share=0.04))
    assert after(*slow, *gone, small)[0].closed_window == 6  # it takes as much as to open one


def test_a_fault_through_a_hundred_windows_is_one_incident_closed_within_two_of_its_end() -> None:
    seen = (verdict(replace(SLOW, ranks=(3, *extra))) for extra in [(), (4,)] * 50)
    (incident,) = after(*seen, *[HEALTHY] * 300)
    assert (incident.opened_window, incident.seen_window, incident.closed_window) == (0, 99, 101)


def test_another_part_and_other_ranks_are_other_incidents() -> None:
    other = replace(SLOW, ranks=(7,))
    opened = after(verdict(SLOW, LATE), verdict(other, LATE))
    assert [(one.cause.part, one.cause.ranks, one.clear) for one in opened] == [
        ("compute", (3,), 1),
        ("data-loading", (), 0),
        ("compute", (7,), 0),
    ]


def test_a_cause_opens_an_incident_at_5_percent_of_the_step_and_keeps_it_open_at_half_of_that() -> None:
    small, smaller = replace(SLOW, share=0.04), replace(SLOW, share=0.02)
    assert after(verdict(small)) == []
    assert after(verdict(SLOW), verdict(small), verdict(small))[0].seen_window == 2
    assert after(verdict(SLOW), verdict(smaller), verdict(smaller))[0].closed_window == 2


def test_a_window_that_loses_nothing_or_cannot_be_trusted_opens_nothing() -> None:
    assert after(verdict(SLOW, kind="balanced"), verdict(SLOW, kind="contradiction")) == []
    assert after(verdict(SLOW, trustworthy=False)) == []


def test_a_window_that_cannot_be_trusted_closes_nothing() -> None:
    doubtful = verdict(trustworthy=False)
    (incident,) = after(verdict(SLOW), HEALTHY, doubtful, doubtful)
    assert (incident.clear, incident.closed_at) == (1, None)


def test_a_hang_is_over_with_the_first_window_that_has_a_step_begun_after_it() -> None:
    """Windows that were recorded before it are analysed while the job hangs."""
    hang = Incident(1, "job", replace(SLOW, kind=HANG, part=HANG), NOON, None, None)
    for recorded in (None, NOON - timedelta(seconds=30), NOON):
        (still,) = followed([hang], "job", 5, HEALTHY, NOON + timedelta(minutes=1), recorded)
        assert still == hang
    (closed,) = followed([hang], "job", 6, HEALTHY, NOON + timedelta(minutes=2), NOON + timedelta(minutes=1))
    assert (closed.closed_window, closed.closed_at) == (6, NOON + timedelta(minutes=2))


def test_the_job_that_ends_before_an_incident_could_come_back_settles_it() -> None:
    (closed,) = after(verdict(SLOW), verdict(SLOW), verdict(SLOW), HEALTHY, HEALTHY)
    assert not closed.settled
    assert dataclasses.replace(closed, job_ending="ended with exit code 0").settled


def test_an_incident_that_windows_no_longer_show_when_its_job_ends_says_so() -> None:
    (incident,) = after(verdict(SLOW), HEALTHY)
    ended = dataclasses.replace(incident, closed_at=NOON, job_ending="ended with exit code 0")
    assert ended.closed_because == "no longer seen since window 1; the job ended with exit code 0"


# ---- in a store


def test_windows_of_a_store_open_and_close_incidents(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    store.append(window(0))  # not analysed
    assert store.incidents() == ()
    store.append(window(1, analysed=True))
    (incident,) = store.incidents("live", only_open=True)
    assert (incident.opened_window, incident.cause.ranks, incident.cause.part) == (1, (1,), "compute")
    assert store.incidents("other") == ()
    title, what, since, *_ = run("store", "incidents", "--store", store.path, env={"COLUMNS": "200"}).out.splitlines()
    assert title.startswith("1  live: open for 0 min")
    assert what.split(maxsplit=1) == ["What", incident.cause.what]
    assert since.split(maxsplit=1)[1].startswith("step 2, 2023-11-14 ")
    windows = run("store", "windows", "live", "--store", store.path).out
    assert re.search(r"1 +\d+ to \d+ +27\.\d% +rank 1 costs 27% of each step", windows)
    store.append(window(2, analysed=True))
    assert [(one.seen_window, lasted(one)) for one in store.incidents()] == [(2, "1 h 0 min")]  # by the run's clock
    store.end_watch("live")
    assert lasted(store.incidents()[0]) == "1 h 0 min"
    assert [(one.closed_at is None, one.closed_window) for one in store.incidents()] == [(False, None)]
    assert run("store", "incidents", "--store", store.path, "--open").out == ""
    (closed,) = store.incidents()
    title = run("store", "incidents", "--store", store.path, env={"COLUMNS": "200"}).out.splitlines()[0]
    assert title.endswith(f": lasted 1 h 0 min, {closed.closed_because}")
    assert store.history("live", 2)["number"].to_list() == [1, 2]


def test_an_incident_of_a_run_that_says_no_time_lasted_for_its_steps(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    for _ in range(2):
        store.append(analysed(trace(slow=True)))
    assert [lasted(one) for one in store.incidents()] == ["4 steps"]


@pytest.mark.slow
def test_an_incident_of_a_store_opens_again_under_its_number_and_that_is_news(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    changes, log = StoreChanges(store), DeliveryLog(store, "http://127.0.0.1/")
    assert (changes.look().opened, log.undelivered(None)) == ((), ([], []))
    said = []
    for slow in (True, True, True, False, False, True):
        store.append(analysed(trace(slow=slow)))
        found = changes.look()
        news = [(one.incident_id, "opened") for one in found.opened] + [
            (one.incident_id, "closed") for one in found.closed
        ]
        log.note(news)
        assert log.undelivered(None) == ([], [])
        said += news
    (incident,) = store.incidents()
    number = incident.incident_id
    assert said == [(number, "opened"), (number, "closed"), (number, "opened")]
    assert (incident.opened_window, incident.seen_window, incident.closed_at) == (0, 5, None)


def test_what_people_do_about_an_incident_is_kept_and_shown_and_mutes_its_messages(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    store.append(window(0, analysed=True))
    (incident,) = store.incidents()
    number = incident.incident_id
    for options in ((), ("--owner", "ann"), ("--mute", "4h", "--note", "<b>node is\n bad")):
        assert run("store", "handle", str(number), "--store", store.path, *options, env={"USER": "bob"}).code == 0
    first, second, third = store.handled(number)
    assert (first.by, first.owner, second.owner, third.note) == ("bob", None, "ann", "<b>node is\n bad")
    assert third.muted_until == third.changed_at + 4 * 3600
    ran = run("store", "incidents", "--store", store.path, env={"COLUMNS": "200"})
    shown = [line for line in ran.out.splitlines() if "Handled" in line]
    assert [line.partition(" UTC, ")[2].partition(" until")[0] for line in shown] == [
        "bob: acknowledged",
        "bob: owner ann",
        "bob: muted",
    ]
    assert "<b>node is" in Pages(store.path).text("/incidents")
    assert muted_until((first, second, third), third.changed_at + 60) == third.changed_at + 4 * 3600
    assert muted_until((first, third), third.changed_at + 5 * 3600) is None
    assert (
        muted_until(
            (third, IncidentChange(third.changed_at + 1, "ann", muted_until=third.changed_at + 1)),
            third.changed_at + 60,
        )
        is None
    )
    sent: list[int] = []
    notifier = SimpleNamespace(send=lambda opened, closed: sent.extend(one.incident_id for one in [*opened, *closed]))
    for told in ([], [number]):
        Watch(store, None, None, print, notifier, DeliveryLog(store, "http://h/"))._send_undelivered()
        DeliveryLog(store, "http://h/").note([])
        assert sent == told
        run("store", "handle", str(number), "--store", store.path, "--mute", "0m")


def test_what_cannot_be_done_about_an_incident_is_said_in_a_line(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    store.append(window(0, analysed=True))
    for options, said in (
        (("99",), "no incident 99; `tracekit store incidents` lists them"),
        (("1", "--mute", "soon"), "--mute 'soon'; expected a number of days, hours or minutes"),
        (("1", "--note", "x" * 1001), "at most 1,000 characters"),
        (("0",), "0 is not in the range"),
    ):
        ran = run("store", "handle", *options, "--store", store.path)
        assert ran.code == 2, options
        assert said in ran.message
    (store.path / "handled").mkdir(exist_ok=True)
    (store.path / "handled" / "1").write_bytes(b'{"at":1,"by":"ann"}\n\xff{\n[]\n{"at":2,"by":"bob","note":"n"}\n{"at"')
    assert [(one.by, one.note) for one in store.handled(1)] == [("ann", None), ("bob", "n")]
    assert run("store", "check", "--store", store.path).code == 0


def test_changes_of_two_people_at_once_are_all_kept(tmp_path: Path) -> None:
    (tmp_path / "handled").mkdir()
    note = "x" * 1000
    with ProcessPoolExecutor(2) as pool:
        for each in [pool.submit(_write_many, tmp_path, who, note) for who in ("ann", "bob")]:
            each.result()
    found = read_changes(tmp_path, 7)
    assert sorted((one.by, one.changed_at) for one in found) == [
        (who, at) for who in ("ann", "bob") for at in range(200)
    ]


def _write_many(store: Path, who: str, note: str) -> None:
    for at in range(200):
        write_change(store, 7, IncidentChange(at, who, note=note))


STANDS = hang_with(
    {"rank": 5, "host": "node-b", "evidence": ["its peers issued it"]},
    headline="rank 5 on node-b never issued all_reduce 12",
    first_step="read its stack",
)


def metrics_of(store: Store) -> str:
    return generate_latest(StoreMetrics(remembered(store))).decode()


def test_a_hang_is_an_incident_until_a_later_step_is_in_a_window_or_the_job_ends(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    store.add_hang("live", ["HANG"], STANDS)
    store.add_hang("live", ["HANG"], STANDS)  # a second report on the same
    (incident,) = store.incidents(only_open=True)
    assert (incident.cause.kind, incident.cause.ranks, incident.cause.hosts) == (HANG, (5,), ("node-b",))
    assert (incident.cause.what, incident.cause.check) == (STANDS.headline, STANDS.first_step)
    assert incident.cause.who == "rank 5 on node-b"
    assert store.jobs() == ()  # a job that hangs at once has no window
    store.add([window(0)])
    assert [job.name for job in store.jobs()] == ["live"]
    store.append(window(1, analysed=True))  # recorded before
    assert 'cause="hang"' in metrics_of(store)
    hours = math.ceil((time.time() - window(0).trace.step_starts[0]) / 3600) + 1
    store.append(window(hours, analysed=True))
    assert HANG not in [one.cause.kind for one in store.incidents(only_open=True)]
    assert 'cause="hang"' not in metrics_of(store)
    store.add_hang("stuck", ["HANG"], STANDS)
    store.end_watch("stuck")
    assert store.incidents("stuck", only_open=True) == ()


def test_a_hang_that_is_over_says_which_window_goes_on(tmp_path: Path) -> None:
    hung = Incident(1, "live", replace(SLOW, kind=HANG), NOON, None, None)
    assert (hung.closed_because, hung.windows) == (None, 0)
    over = dataclasses.replace(hung, closed_at=NOON, closed_window=7)
    assert (over.closed_because, over.settled) == ("steps go on in window 7", True)
    assert dataclasses.replace(hung, closed_at=NOON, job_ending="was killed").closed_because == "the job was killed"


def test_what_is_no_hang_is_stored_and_opens_no_incident(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    store.add_hang("live", ["NO HANG"], replace(hang_with(), hang=False))
    assert [stored.job for stored in store.hangs()] == ["live"]
    assert store.incidents() == ()


def test_a_hang_without_a_culprit_advises_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    store.add_hang("live", ["HANG"], hang_with())
    (incident,) = store.incidents(only_open=True)
    assert incident.cause.check == ""
    assert dict(advice(incident)) == {"Who": "nobody can be told yet"}


def test_reports_on_hangs_are_checked_repaired_and_pruned(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    store.add_hang("live", ["HANG"], STANDS)
    damaged = store.path / "hangs" / "19990101-000000-000000-00000000.json"
    damaged.write_text("{")
    (found,) = damages(store)
    assert found.startswith(f"{damaged}: not a report on a hang")
    (line,) = repair(store, findings_of)
    assert line == f"removed; {found}"
    assert (list(damages(store)), len(store.hangs("live"))) == ([], 1)
    assert prune(store, older_than=timedelta(days=1)) == []
    (line,) = prune(store, older_than=timedelta(0))
    assert "removed the report on a hang" in line
    assert (store.hangs(), len(store.incidents("live"))) == ((), 1)


def test_a_user_without_a_variable_has_the_name_of_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    assert current_user() == pwd.getpwuid(os.getuid()).pw_name
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a number that no account has
    assert current_user() == f"user {os.getuid()}"
