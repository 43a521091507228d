"""`tracekit watch` as a command: of a run until it ends, of a store until it is stopped."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import tracekit
from benchmarks.writtenrun import WrittenRun
from tests.cases import case
from tests.handmade import run, slow_trace
from tests.live.test_notify import PATIENCE_S, receiving
from tests.test_store_windows import window
from tracekit.base.errors import StoreError
from tracekit.collectors.launch.collect import CollectOptions, _check_targets
from tracekit.collectors.launch.live import WatchOptions
from tracekit.commands.watch import _check_directory
from tracekit.live.metrics import serving_metrics
from tracekit.live.receivers import DeliveryLog, Notifier
from tracekit.live.run import LiveOptions, LiveRun
from tracekit.live.watch import Changes, StoreChanges, Watch
from tracekit.live.windows import WindowSize
from tracekit.store import Store

GPU_FOLDER = Path(__file__).resolve().parents[2] / "sample_traces" / "gpu_slow_input"


def test_a_run_is_watched_to_its_end(tmp_path: Path) -> None:
    written = WrittenRun(tmp_path / "run", 4)
    written.run(range(1, 26), slow={3: 2.0})
    written.end()
    ran = run("watch", tmp_path / "run", "--store", tmp_path / "jobs.store", "--window-steps", "10")
    assert (ran.code, ran.out) == (0, "")
    lines = ran.err.splitlines()
    headline = "straggler: rank 3 on node-0000 costs"
    assert lines[0].startswith("tracekit: run, window 0, steps 1 to 25: 46.2% lost, ")
    assert headline in lines[0]
    assert lines[1].startswith("tracekit: INCIDENT 1 of run opened: rank 3 on node-0000: computes 100% slower")
    assert [line.split(":")[1].strip() for line in lines[2:6]] == ["Since", "Who", "Do", "More to check"]
    assert lines[2].split(": ", 2)[2].startswith("step 1, 2023-11-14 ")
    assert lines[6].startswith("tracekit: incident 1 of run closed after 0 min ")
    assert ", the job ended: rank 3 on node-0000" in lines[6]
    assert len(lines) == 7


@pytest.mark.slow
def test_news_of_incidents_are_asked_for_and_not_all_there_ever_were(tmp_path: Path) -> None:
    """One that was open before the first look is no news until it closes; one that is over is not read again."""
    store = Store(tmp_path / "jobs.store")
    store.append(window(0, "old", analysed=True))
    store.end_watch("old")
    store.append(window(0, analysed=True))
    news = StoreChanges(store)
    assert news.look() == Changes()
    store.append(window(0, "new", analysed=True))
    store.end_watch("new")
    found = news.look()
    assert [one.job for one in found.opened] == ["new"]
    assert [one.job for one in found.closed] == ["new"]
    for number in (1, 2):  # what is open has a lower number than what is over
        store.append(window(number, analysed=True))
        assert news.look().opened == ()
    store.end_watch("live")
    assert [one.job for one in news.look().closed] == ["live"]
    with store.reading() as catalogue:
        asked = catalogue.live.incidents(after=2, numbers={2})
    assert [one.incident_id for one in asked] == [3, 2]
    assert news.look() == Changes()


def test_a_store_that_cannot_be_read_for_a_while_is_one_line(tmp_path: Path) -> None:
    """Whatever the number of looks meanwhile; a store that is written by others ends the watch."""
    store, said = Store(tmp_path / "jobs.store"), list[str]()
    store.append(window(0))
    run_of_nothing = LiveRun(LiveOptions(tmp_path / "run", store.path, "job", WindowSize(steps=5)), said.append)
    watching, news = Watch(store, run_of_nothing, None, said.append), StoreChanges(store)
    catalogue = store.path / "catalog.duckdb"
    whole = catalogue.read_bytes()
    for _ in range(2):
        catalogue.write_bytes(b"no catalogue")
        watching._report(news)
        watching._report(news)
        catalogue.write_bytes(whole)
        watching._report(news)
    assert len(said) == 2, said
    assert all(line.startswith(str(store.path)) for line in said)
    catalogue.write_bytes(b"no catalogue")
    with pytest.raises(StoreError):
        Watch(store, None, None, said.append)._report(StoreChanges(store))


def test_a_receiver_that_cannot_be_reached_is_two_lines_and_everything_is_stored(tmp_path: Path) -> None:
    with receiving() as receiver:
        url = receiver.url  # nobody listens there once it has ended
    written = WrittenRun(tmp_path / "run", 4)
    written.run(range(1, 11), slow={3: 2.0})
    written.end()
    ran = run("watch", tmp_path / "run", "--store", tmp_path / "jobs.store", "--window-steps", "10", "--notify", url)
    assert ran.code == 0
    lines = [line for line in ran.err.splitlines() if "--notify" in line]
    where = url.removeprefix("http://").partition("/")[0]
    assert len(lines) == 2
    assert lines[0].startswith(f"tracekit: --notify: {where} cannot be reached: ")
    assert lines[1].endswith(f"message did not reach {where}") or lines[1].endswith(f"messages did not reach {where}")
    assert len(Store(tmp_path / "jobs.store").windows("run")) == 1


def test_what_cannot_be_watched_is_said(tmp_path: Path) -> None:
    Store(tmp_path / "jobs.store").append(window(0))
    (tmp_path / "file").write_text("no run")
    os.utime(tmp_path / "file", (0, 0))  # nobody writes to it
    (tmp_path / "run").mkdir()
    for arguments, reason in (
        (("{}/jobs.store", "--window-steps", "5"), "a store already holds windows"),
        (("{}/run", "--window-steps", "5", "--window-seconds", "5"), "cannot be combined"),
        (("{}/file",), "a text file, not a running job; watch the folder of `tracekit collect --segments`, a log of"),
        (("{}/run", "--notify", "nobody"), "--notify 'nobody'; expected an address"),
        (("{}/run", "--metrics-port", "1", "--metrics-host", "203.0.113.1"), "cannot listen on 203.0.113.1, port 1"),
        (("{}/nothing-yet", "--store", "{}/file"), "file: not a tracekit store"),
    ):
        asked = [word.format(tmp_path) for word in arguments]
        ran = run("watch", "--store", tmp_path / "other.store", *asked)
        assert (ran.code, reason in ran.message) == (2, True), ran.err


def test_what_another_command_shows_is_refused_with_it_however_new(tmp_path: Path) -> None:
    slow_trace().write_parquet(tmp_path / "job.parquet")
    (tmp_path / "report.json").write_text(tracekit.job_of(slow_trace()).report.to_json())
    shutil.copytree(GPU_FOLDER, tmp_path / "traces")
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / "dump_0").write_bytes(pickle.dumps({"version": "2.10", "pg_config": {}, "entries": []}))
    for name, what in (
        ("job.parquet", "a trace, not a running job; type `tracekit whatif {}`"),
        ("report.json", "a report, not a running job; `tracekit whatif {}` shows it"),
        ("traces", "traces of torch.profiler, not a running job; type `tracekit whatif {}`"),
        ("dumps", "flight-recorder dumps of a hang, not a running job; type `tracekit hang {}`"),
    ):
        with case(name):
            path = tmp_path / name
            ran = run("watch", path, "--store", tmp_path / "jobs.store")
            assert (ran.code, ran.out) == (2, "")
            assert ran.message == f"tracekit: {path}: {what.format(path)}"
    assert not (tmp_path / "jobs.store").exists()


@pytest.mark.parametrize("content", [None, (), ("README",)])
def test_a_folder_into_which_a_job_may_still_write_is_waited_for(
    content: tuple[str, ...] | None, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for name in content or ():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("of the job")
    if content == ():
        folder.mkdir()
    _check_directory(LiveOptions(folder, tmp_path / "jobs.store", "job", WindowSize(steps=5)))


def test_a_store_that_others_write_is_watched(tmp_path: Path) -> None:
    """Its news are told and posted; what was there before is no news."""
    store, said, stop = Store(tmp_path / "jobs.store"), [], threading.Event()
    heard = threading.Semaphore(0)

    def tell(line: str) -> None:
        said.append(line)
        heard.release()

    with receiving() as receiver:
        notifier = Notifier(receiver.url)
        watching = Watch(store, None, None, tell, notifier)
        thread = threading.Thread(target=watching.until_ended, args=(stop,))
        thread.start()
        store.append(window(0, analysed=True))
        receiver.wait_for(1)
        with serving_metrics("127.0.0.1", 0, store, watching, "") as (port, _):
            metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S).read().decode()
        store.end_watch("live")
        receiver.wait_for(1)
        for _ in range(6):
            assert heard.acquire(timeout=PATIENCE_S)
        stop.set()
        thread.join()
    assert [row["status"] for message in receiver.got for row in message["incidents"]] == ["opened", "closed"]
    assert said[0].startswith("live, window 0, steps 0 to 1: 27.4% lost, straggler: ")
    assert said[1].startswith("INCIDENT 1 of live opened: ")
    assert said[-1].startswith("incident 1 of live closed after ")
    assert 'tracekit_job_slowdown_ratio{training_job="live"} 1.148' in metrics
    assert 'tracekit_watch_notifications_total{outcome="sent"} 1.0' in metrics
    again: list[Any] = []
    stop.clear()
    quiet = Watch(store, None, None, again.append)
    threading.Timer(0, stop.set).start()
    quiet.until_ended(stop)
    assert again == []


def look_once(store: Store, url: str) -> None:
    """A watch that tells `url` what it has to, and ends."""
    stop = threading.Event()
    stop.set()
    told = DeliveryLog(store, url)
    Watch(store, None, None, print, Notifier(url, arrived=told.note), told).until_ended(stop)


def test_what_a_killed_watch_did_not_tell_is_told_by_the_next_and_only_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    store.append(window(0, analysed=True))  # and the watch is killed before it tells of the incident

    with receiving() as receiver:
        look_once(store, receiver.url)
        look_once(store, receiver.url)
        store.end_watch("live")
        look_once(store, receiver.url)
        look_once(store, receiver.url)
    assert [row["status"] for message in receiver.got for row in message["incidents"]] == ["opened", "closed"]
    assert run("store", "check", "--store", store.path).code == 0


@pytest.mark.slow
def test_an_incident_that_came_and_went_while_nobody_watched_is_told_once_as_past(tmp_path: Path) -> None:
    """But not what was over before this receiver was ever told anything."""
    store = Store(tmp_path / "jobs.store")
    store.append(window(0, "before", analysed=True))
    store.end_watch("before")

    with receiving() as receiver:
        look_once(store, receiver.url)
        store.append(window(0, "between", analysed=True))
        store.end_watch("between", "ended with exit code 1")
        look_once(store, receiver.url)
        look_once(store, receiver.url)
    rows = [row for message in receiver.got for row in message["incidents"]]
    assert [(row["job"], row["status"], row["closed_because"]) for row in rows] == [
        ("between", "closed", "the job ended with exit code 1")
    ]


def test_where_a_receiver_begins_is_noted_once_the_store_is_there(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    told = DeliveryLog(store, "http://host/hook")
    watching, news = Watch(store, None, None, print, None, told), StoreChanges(store)
    assert told.undelivered(None) == ([], [])
    watching._report(news)
    store.append(window(0, analysed=True))
    watching._report(news)
    store.end_watch("live")
    assert [one.job for one in DeliveryLog(store, "http://host/hook").undelivered(None)[1]] == ["live"]


def test_what_does_not_go_with_live_is_said_before_the_command_starts(tmp_path: Path) -> None:
    for arguments, reason in (
        (("--window-steps", "5"), "--window-steps=5 needs --live"),
        (("--live", "--no-store"), "--live stores its windows"),
        (("--live", "--nccl"), "NCCL's events can be read only at its end"),
    ):
        ran = run("collect", *arguments, "--store", tmp_path / "jobs.store", "--", "touch", "started", cwd=tmp_path)
        assert (ran.code, reason in ran.message) == (2, True), ran.err
        assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("options", [{"live": WatchOptions()}, {"nccl": 1}])
def test_live_and_nccl_go_by_themselves(options: dict[str, Any]) -> None:
    _check_targets(CollectOptions(("true",), **options))
