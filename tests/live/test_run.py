"""A running recording becomes windows in a store; what is wrong with it is said, and the rest goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NoReturn
from unittest import mock

import numpy as np
import polars as pl
import pytest

from benchmarks.writtenrun import MS, WrittenRun
from tests.analysis.metrics.test_testimony import Broken
from tests.handmade import little_space, run
from tests.live.beside import Beside
from tracekit.base.errors import FormatError, StoreError, StoreTakenError
from tracekit.bill.account import run_of_job
from tracekit.collectors.record.wire_format import HEADER, MAGIC, RECORD, VERSION, Category
from tracekit.collectors.run_directory.follow import AttemptFollower
from tracekit.collectors.run_directory.launchers import announce_end
from tracekit.live.incident_words import advice
from tracekit.live.run import LiveRun, log_traceback
from tracekit.store import Store, WindowPart
from tracekit.store.care import prune
from tracekit.store.folder import WATCH_ERRORS


def test_windows_are_stored_as_they_end_and_a_slow_rank_is_an_incident(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    beside = Beside(tmp_path, clock)
    beside.look()
    written.run(range(11))  # step 0 warms up
    beside.look()
    assert beside.windows() == [(1, 10)]
    assert beside.store.incidents() == ()
    written.run(range(11, 21), slow={3: 2.0})
    beside.look()
    written.run(range(21, 26), slow={3: 2.0})
    beside.look()
    (incident,) = beside.store.incidents(only_open=True)
    assert (incident.cause.ranks, incident.cause.hosts, incident.opened_window) == ((3,), ("node-0001",), 1)
    # computes of 120 ms in a step of 130 ms, 60 ms in one of 70 ms
    assert incident.cause.share == pytest.approx(60 / 130, rel=1e-6)
    written.end()
    assert beside.run.ended()
    beside.run.finish()
    assert beside.windows() == [(1, 10), (11, 20), (21, 25)]
    history = beside.store.history("job")
    assert history["verdict"].to_list() == ["balanced", "straggler", "straggler"]
    assert history["recorded_s"].to_list() == pytest.approx([0.070, 0.130, 0.130])
    assert [one.closed_at is not None for one in beside.store.incidents()] == [True]
    assert beside.said == []


def test_a_run_is_not_added_to_the_job_of_another(tmp_path: Path, clock: list[float]) -> None:
    """Two folders, one name: the second is refused, and the first can be watched again."""
    folders = [tmp_path / name for name in ("first", "second")]
    besides = []
    for folder, started_ns in zip(folders, (1, 2), strict=True):
        written = WrittenRun(folder / "run", 2)
        started = json.loads((folder / "run" / "run.json").read_text()) | {"started_ns": started_ns}
        (folder / "run" / "run.json").write_text(json.dumps(started))
        written.run(range(11))
        besides.append(Beside(folder, clock, store=tmp_path / "jobs.store"))
    besides[0].look()
    before = run_of_job(besides[0].store, "job")
    with pytest.raises(StoreError, match=r"jobs.store: has job 'job' of another run; choose another --name"):
        besides[1].look()
    assert run_of_job(besides[0].store, "job") == before
    Beside(folders[0], clock, store=tmp_path / "jobs.store").look()
    assert besides[0].windows() == [(1, 10)]


def test_a_window_asks_metrics_about_its_culprit_and_goes_on_without_an_answer(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    beside = Beside(tmp_path, clock, metrics=Broken(pl.DataFrame()))
    beside.look()
    written.run(range(11), slow={3: 2.0})
    beside.look()
    (incident,) = beside.store.incidents(only_open=True)
    assert incident.cause.metrics
    assert "node-0001 not testable with these metrics: " in incident.cause.metrics
    assert ("Metrics", incident.cause.metrics) in [*advice(incident)]
    assert beside.said == []


def test_a_dead_rank_holds_up_a_window_for_the_stated_time_and_its_lack_is_said(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    beside = Beside(tmp_path, clock)
    written.run(range(1, 11))
    beside.look()
    written.run(range(11, 21), without=(2,))
    beside.look(4.9)
    assert beside.windows() == [(1, 10)]
    beside.look(0.2)
    assert beside.windows() == [(1, 10), (11, 20)]
    assert beside.said == ["steps 11 to 20: 1 of 4 ranks are missing: rank 2"]
    assert beside.store.load("job").metadata["missing_ranks"] == [2]
    written.run(range(21, 31), without=(2,))
    beside.look()  # nobody waits for it again
    assert beside.windows()[-1] == (21, 30)


def test_records_that_come_behind_their_window_are_counted(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    beside = Beside(tmp_path, clock)
    records = written._step(2, 5, 1.0, 1000.0)
    written.run(range(1, 11), without=(2,))
    beside.look(5)
    written.write(2, records.tobytes())
    written.run(range(11, 21))
    beside.look()
    assert (beside.windows(), beside.run.counts.late_records) == ([(1, 10), (11, 20)], len(records))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda run: run.write(1, b"\xff" * RECORD.size), "record 0 has the unknown category 255"),
        (lambda run: run.tell(1, [("process", run._facts(1, 4)[0][1])]), "two processes write as rank 1"),
        (lambda run: run.write(1, stepped_back()), "in step 12 its clock stepped back by 1.5 s"),
        (lambda run: (run.attempt_directory / "rank-000001.facts").write_bytes(b"{" * 9999 + b"\n"), "damaged line"),
    ],
    ids=["garbage", "two-jobs", "clock", "facts"],
)
def test_a_rank_that_writes_garbage_is_left_out_in_one_line(
    harm: object, reason: str, tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    beside = Beside(tmp_path, clock)
    written.run(range(1, 11))
    beside.look()
    harm(written)
    written.run(range(11, 31))
    beside.look(6)
    written.run(range(31, 41))
    beside.look(6)
    left_out, *missing = [line for line in beside.said if "in order again" not in line]
    assert ("rank 1 is in order again; it is read from step 41 on" in beside.said) == ("category" in reason)
    assert reason in left_out
    assert missing == [f"steps {steps}: 1 of 4 ranks are missing: rank 1" for steps in ("11 to 30", "31 to 40")]
    assert beside.windows() == [(1, 10), (11, 30), (31, 40)]


@pytest.mark.slow
def test_a_rank_whose_records_are_in_order_again_for_a_window_is_read_again(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    """As after one flipped bit; whatever is garbage four times is left out for good."""
    beside = Beside(tmp_path, clock)
    written.run(range(1, 11))
    beside.look()
    harms = {11: (0, 0xFF), 41: (7, 0x40), 71: (RECORD.size - 2, 0x7F), 101: (0, 0xFF)}
    missing = []
    for first in range(11, 131, 10):
        before = written.segment(1).stat().st_size
        written.run(range(first, first + 10))
        if first in harms:
            at, bits = harms[first]
            content = bytearray(written.segment(1).read_bytes())
            content[before + at] |= bits
            written.segment(1).write_bytes(content)
        beside.look(6)
        missing.append(beside.store.load("job").metadata["missing_ranks"])
    assert missing == [[1], [1], []] * 3 + [[1], [1], [1]]
    said = [line for line in beside.said if "missing" not in line]
    back = [line for line in said if "in order again" in line]
    assert back == [f"rank 1 is in order again; it is read from step {step} on" for step in (31, 61, 91)]
    assert len([line for line in said if "is left out from step" in line]) == 4
    assert len(said) == 7
    assert beside.windows()[-1] == (121, 130)


def stepped_back() -> bytes:
    return RECORD.pack(Category.COMPUTE, 0, 1, 12, 0, -1, -1, 3000 * MS, 1500 * MS, 0, 10_000)


def test_a_window_that_cannot_be_analysed_is_said_and_the_next_one_is(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    """Half of the ranks tell another mesh than the rest until they tell theirs."""
    beside = Beside(tmp_path, clock)
    for rank in (1, 2):
        broken = written.attempt_directory / f"rank-{rank:06d}.facts"
        whole = broken.read_text()
        broken.write_text(whole.replace('["dp"]', '["pp"]'))
    written.run(range(1, 11))
    beside.look()
    (line,) = beside.said
    assert line.startswith("steps 1 to 10: cannot be analysed: ranks ")
    assert beside.run.counts.failed == 1
    for rank in (1, 2):
        beside.run._follower.ranks[rank].facts["mesh"].clear()
        written.tell(rank, [("mesh", json.loads(whole.splitlines()[1])["value"])])
    written.run(range(11, 21))
    beside.look()
    assert beside.windows() == [(11, 20)]


def test_clocks_that_cannot_be_read_cost_a_line_and_no_window(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    beside = Beside(tmp_path, clock)
    samples = tmp_path / "run" / "clock-node-0001.samples"
    samples.symlink_to(samples.name)  # ELOOP, as ESTALE of a shared folder
    for first in (1, 11):
        written.run(range(first, first + 10))
        with mock.patch.object(LiveRun, "_faulty", side_effect=AssertionError("no rank is to blame")):
            beside.look()
    assert beside.windows() == [(1, 10), (11, 20)]
    (line,) = beside.said
    assert line.startswith("clocks are corrected as before: ")
    samples.unlink()
    samples.write_text("{")
    written.run(range(21, 31))
    beside.look()
    assert beside.windows()[-1] == (21, 30)
    assert "clock-node-0001.samples: damaged" in beside.said[-1]


def test_a_rank_with_which_no_window_can_be_made_is_left_out(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    beside = Beside(tmp_path, clock)
    broken = written.attempt_directory / "rank-000001.facts"
    broken.write_text(broken.read_text().replace('["dp"]', '["pp"]'))
    written.run(range(1, 11))
    beside.look()
    (line,) = beside.said
    assert line.startswith(
        "rank 1 is left out from step 11 on: with it, steps 1 to 10 cannot be analysed: rank 1 built"
    )
    assert beside.windows() == [(1, 10)]
    assert beside.store.load("job").metadata["missing_ranks"] == [1]


def test_a_bug_in_the_analysis_costs_the_findings_of_one_window(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    beside = Beside(tmp_path, clock)
    written.run(range(1, 11))
    with mock.patch("tracekit.live.run.PipelineJob.stored", side_effect=ZeroDivisionError("float division\nby zero")):
        beside.look()
    written.run(range(11, 21))
    beside.look()
    (line,) = beside.said
    assert line == (
        "steps 1 to 10: the analysis failed, which is a bug of tracekit (ZeroDivisionError: float division by zero);"
        " the window is stored without findings: report the bug with the output of `tracekit store export`"
        f" (traceback in {beside.store.path / 'watch-errors.log'})"
    )
    kept = (beside.store.path / "watch-errors.log").read_text()
    assert "steps 1 to 10\nTraceback" in kept
    assert "ZeroDivisionError: float division" in kept
    assert run("store", "check", "--store", beside.store.path).code == 0
    assert [one.slowdown is not None for one in beside.store.windows("job")] == [False, True]
    assert beside.run.counts.unanalysed == 1


def test_ranks_of_another_job_in_the_folder_are_left_out(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    written.tell(7, written._facts(7, 16))
    beside = Beside(tmp_path, clock)
    written.run(range(1, 11))
    beside.look()
    (line,) = beside.said
    assert line.startswith("rank 7 is left out: ")
    assert "it saw 16 ranks, the others 4" in line
    assert beside.windows() == [(1, 10)]


def test_a_watch_that_was_killed_goes_on_where_the_store_ends(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    written.run(range(1, 16))
    Beside(tmp_path, clock).look()
    again = Beside(tmp_path, clock)
    again.look()
    written.run(range(16, 21))
    again.look()
    assert again.windows() == [(1, 10), (11, 20)]


@pytest.mark.slow
def test_a_watch_goes_on_where_the_store_ends_though_the_ops_were_pruned(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    written.run(range(1, 11))
    beside = Beside(tmp_path, clock)
    beside.look()
    prune(beside.store, most_bytes=1)
    assert WindowPart.OPS not in beside.store.windows("job")[0].files
    written.run(range(11, 21))
    again = Beside(tmp_path, clock)
    again.look()
    assert again.windows() == [(1, 10), (11, 20)]


@pytest.mark.slow
def test_the_tail_of_an_attempt_that_ended_while_nobody_watched_is_analysed(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    written.run(range(1, 11))
    Beside(tmp_path, clock).look()
    written.run(range(11, 15))
    WrittenRun(tmp_path / "run", 4, attempt=1).run(range(1, 4))
    WrittenRun(tmp_path / "run", 4, attempt=2).run(range(1, 11))
    again = Beside(tmp_path, clock)
    again.look()
    assert again.windows() == [(1, 10), (11, 14), (1, 3), (1, 10)]


@pytest.mark.slow
def test_another_attempt_of_the_job_goes_on_in_the_same_job(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    beside = Beside(tmp_path, clock)
    written.run(range(1, 15))
    beside.look()
    restarted = WrittenRun(tmp_path / "run", 4, attempt=1)
    restarted.run(range(1, 11))
    beside.look()
    assert beside.windows() == [(1, 10), (11, 14), (1, 10)]


def test_two_watches_of_one_job_are_an_error_of_the_second(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    first, second = Beside(tmp_path, clock), Beside(tmp_path, clock)
    second.run.poll()
    written.run(range(1, 11))
    first.look()
    with pytest.raises(StoreTakenError, match="another process is adding windows to job 'job'"):
        second.look()
    assert first.windows() == [(1, 10)]


def test_a_store_that_is_moved_away_is_waited_for_and_no_other_takes_its_place(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    """As by a disk that is unmounted."""
    beside = Beside(tmp_path, clock)
    written.run(range(1, 11))
    beside.look()
    beside.store.path.rename(tmp_path / "away")
    written.run(range(11, 21))
    beside.look()
    assert not beside.store.path.exists()
    assert len(beside.said) == 1
    assert "has 0 of the 1 windows of job 'job' that were stored there; restore the original" in beside.said[0]
    (tmp_path / "away").rename(beside.store.path)
    beside.look(60)
    assert beside.said[1:] == ["windows are stored again"]
    assert beside.windows() == [(1, 10), (11, 20)]


def test_segments_of_another_version_are_a_few_lines_whatever_the_number_of_ranks(
    tmp_path: Path, clock: list[float]
) -> None:
    written = WrittenRun(tmp_path / "run", 32)
    written.run(range(1, 11))
    for rank in range(32):
        content = written.segment(rank).read_bytes()
        newer = HEADER.pack(MAGIC, VERSION + 1, RECORD.size, rank, 0, 1000 + rank)
        written.segment(rank).write_bytes(newer + content[HEADER.size :])
    beside = Beside(tmp_path, clock)
    beside.look()
    assert beside.said[0].startswith("rank 0 is left out from step 1 on: ")
    assert f"not a segment that this tracekit reads (version {VERSION + 1}); upgrade tracekit" in beside.said[0]
    assert beside.said[8:] == [
        "and 24 more lines like these, about other ranks",
        "every rank is left out; there will be no windows until the job is restarted",
    ]
    assert beside.run.counts.left_out == 32


def test_a_full_disk_delays_windows_and_loses_none(tmp_path: Path, written: WrittenRun, clock: list[float]) -> None:
    beside = Beside(tmp_path, clock)
    beside.look()
    for first in (1, 11):
        written.run(range(first, first + 10))
        with little_space(20_000):
            beside.look()
    beside.look(60)
    failed, again = beside.said  # however often it was tried
    assert failed.startswith("a window cannot be stored: ")
    assert again == "windows are stored again"
    assert (beside.windows(), beside.run.queue.lost) == ([(1, 10), (11, 20)], 0)


def test_a_window_that_cannot_be_stored_is_tried_again_after_delays_that_double(
    tmp_path: Path, written: WrittenRun, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = Beside(tmp_path, clock)
    beside.look()
    began_s, tried_s = clock[0], list[float]()

    def full(*_: object, **__: object) -> NoReturn:
        tried_s.append(clock[0] - began_s)
        raise StoreError("no space")

    monkeypatch.setattr(Store, "append", full)
    written.run(range(1, 11))
    for _ in range(300):
        beside.look(1)
    delays_s = np.diff(tried_s)
    assert delays_s[:6].tolist() == [1, 2, 4, 8, 16, 32]
    assert set(delays_s[6:]) == {60}


def test_of_more_windows_than_memory_may_hold_the_oldest_are_lost_and_counted(
    tmp_path: Path, written: WrittenRun, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracekit.live.windows.MOST_UNSTORED", 2)
    beside = Beside(tmp_path, clock)
    beside.look()
    for first in (1, 11, 21, 31):
        written.run(range(first, first + 10))
        with little_space(20_000):
            beside.look(60)
            beside.look(60)
    beside.look(60)
    failed, *dropped, again = beside.said
    assert failed.endswith("trying again after growing delays, keeping at most 2 windows")
    assert dropped == ["2 windows wait to be stored; the oldest is dropped"] * 2
    assert again == "windows are stored again"
    assert (beside.windows(), beside.run.queue.lost) == ([(21, 30), (31, 40)], 2)


def test_the_log_of_bugs_begins_anew_once_it_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracekit.live.run.MOST_LOG_BYTES", 40)
    for title in ("first", "second", "third"):
        assert log_traceback(tmp_path, title, ValueError("x")) == f" (traceback in {tmp_path / WATCH_ERRORS})"
        assert title in (tmp_path / WATCH_ERRORS).read_text()
        assert (tmp_path / WATCH_ERRORS).read_text().count("ValueError: x") == 1
    monkeypatch.setattr("tracekit.live.run.MOST_LOG_BYTES", 1 << 20)
    log_traceback(tmp_path, "fourth", ValueError("x"))
    assert (tmp_path / WATCH_ERRORS).read_text().count("ValueError: x") == 2
    assert log_traceback(tmp_path / "nowhere", "fifth", ValueError("x")) == ""
    assert log_traceback(tmp_path, "no bug", FormatError("x")) == ""


def test_segments_that_are_stored_are_removed_and_forgotten_where_asked(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    beside = Beside(tmp_path, clock, consume=True)
    written.run(range(11))
    for rank in range(4):
        written.segment(rank).rename(written.segment(rank).with_suffix(".ops"))
    beside.look()
    assert list(written.attempt_directory.glob("*.ops")) == []
    assert beside.run._follower is not None
    assert {path for path in beside.run._follower._files if not path.endswith(".facts")} == set()
    assert beside.windows() == [(1, 10)]


@pytest.mark.parametrize("ranks", [2, 16])
def test_a_look_at_an_idle_job_compares_no_ranks_and_opens_no_files(
    ranks: int, tmp_path: Path, clock: list[float]
) -> None:
    """Its cost grows with the number of ranks, not with its square."""
    written, beside = WrittenRun(tmp_path / "run", ranks), Beside(tmp_path, clock)
    written.run(range(1, 6))
    beside.look()
    follower = beside.run._follower
    assert follower is not None
    good = AttemptFollower.good
    with (
        mock.patch.object(AttemptFollower, "good", mock.PropertyMock(side_effect=lambda: good.fget(follower))) as asked,
        mock.patch.object(Path, "open", side_effect=AssertionError("an idle look opens a file")),
    ):
        beside.run._update()
    assert asked.call_count <= 3


def test_memory_holds_the_steps_that_are_not_over(tmp_path: Path, written: WrittenRun, clock: list[float]) -> None:
    beside = Beside(tmp_path, clock)
    written.run(range(1, 36))
    beside.look()
    assert beside.windows() == [(1, 30)]  # three windows that were over at once
    assert beside.run._follower is not None
    held = [sum(map(len, rank.pending)) for rank in beside.run._follower.ranks.values()]
    assert held == [5 * len(written._step(0, 0, 1.0, 1.0))] * 4


def test_a_launcher_that_was_killed_ends_the_watch_once_the_ranks_are_quiet(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    beside = Beside(tmp_path, clock)
    written.run(range(1, 5))
    beside.look()
    written.end()
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    (tmp_path / "run" / f"launcher-{os.uname().nodename}-{child}.running").touch()
    assert not beside.run.ended()
    clock[0] += 299
    written.run(range(5, 7))  # torchrun outlives it
    beside.look(299)
    assert not beside.run.ended()
    clock[0] += 300
    assert beside.run.ended()


def test_a_launcher_of_another_host_counts_as_dead_without_a_sign_of_life(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    beside = Beside(tmp_path, clock)
    written.run(range(1, 5))
    beside.look()
    assert not beside.run.ended()
    clock[0] += 299
    os.utime(tmp_path / "run" / "launcher-elsewhere-1.running", (1, 1))  # a job that hangs, with a launcher that lives
    assert not beside.run.ended()
    clock[0] += 299
    assert not beside.run.ended()
    clock[0] += 1
    assert beside.run.ended()
    assert beside.said[-1].startswith("no launcher of the run is alive, and no rank has written anything for 300 s")
    beside.run.finish()
    assert beside.said[-1] == "the job ended: its launcher died"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codes", "words"),
    [
        ([0], "ended with exit code 0"),
        ([0, 3, 1], "ended with exit code 3 on node-1"),
        ([None], "ended"),
    ],
)
def test_how_the_job_ended_is_said_where_its_incidents_are(
    codes: list[int | None], words: str, tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    """Of several nodes, by the first that failed."""
    beside = Beside(tmp_path, clock)
    written.run(range(1, 11), slow={3: 2.0})
    beside.look()
    (tmp_path / "run" / "launcher-elsewhere-1.running").unlink()
    for node, code in enumerate(codes):
        presence = tmp_path / "run" / f"launcher-node-{node}-7.running"
        presence.touch()
        announce_end(presence, code)
        os.utime(presence.with_suffix(".done"), ns=(node, node))
    assert beside.run.ended()
    beside.run.finish()
    (incident,) = beside.store.incidents("job")
    assert incident.closed_because == f"the job {words}"
    assert beside.said == ([] if codes in ([0], [None]) else [f"the job {words}"])
    with beside.store.reading() as catalogue:
        assert catalogue.live.live_jobs()["ending"].to_list() == [words if codes != [None] else None]
    said = run("store", "incidents", "--store", beside.store.path).out
    assert f", the job {words}\n" in said
    title = run("store", "top", "--store", beside.store.path, "--once").out.splitlines()[0]
    assert f", {words} at " in title


def test_a_folder_that_fails_for_a_moment_costs_nothing(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    beside = Beside(tmp_path, clock)
    written.run(range(1, 4))
    beside.look()
    whole, hidden = written.segment(1), tmp_path / "hidden"
    whole.rename(hidden)
    whole.symlink_to(whole.name)  # ELOOP, as ESTALE of a shared folder
    beside.look()
    whole.unlink()
    hidden.rename(whole)
    (tmp_path / "run").rename(tmp_path / "away")
    (tmp_path / "run").symlink_to("run")
    beside.look()
    (tmp_path / "run").unlink()
    (tmp_path / "away").rename(tmp_path / "run")
    written.run(range(4, 11))
    beside.look(20)
    assert [line.split(": ")[-1] for line in beside.said] == [
        "Too many levels of symbolic links; trying again for 300 s",
        "Too many levels of symbolic links; trying again for 300 s",
        "rank 1 can be read again",
        f"{tmp_path / 'run'} can be read again",
    ]
    assert beside.windows() == [(1, 10)]
    assert beside.store.load("job").metadata["missing_ranks"] == []


def test_a_folder_that_cannot_be_read_for_long_ends_the_watch(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    beside = Beside(tmp_path, clock)
    beside.look()
    (tmp_path / "run").rename(tmp_path / "away")
    beside.run.poll()
    clock[0] += 300
    with pytest.raises(FormatError, match="No such file or directory, for 300 s; watch it again once it can be read"):
        beside.run.poll()


def ended_beside_a_broken_store(tmp_path: Path, written: WrittenRun, clock: list[float]) -> tuple[Beside, Path, bytes]:
    """A run of 15 steps that has ended; the catalogue, which cannot be read, and what was in it."""
    beside = Beside(tmp_path, clock)
    written.run(range(1, 16), slow={3: 2.0})
    beside.look()
    written.end()
    catalogue = beside.store.path / "catalog.duckdb"
    whole = catalogue.read_bytes()
    catalogue.write_bytes(b"no catalogue")
    return beside, catalogue, whole


def test_the_end_of_a_job_that_cannot_be_stored_is_tried_again(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    beside, catalogue, whole = ended_beside_a_broken_store(tmp_path, written, clock)
    waited: list[float] = []

    def wait(delay_s: float) -> None:
        waited.append(delay_s)
        if len(waited) == 2:
            catalogue.write_bytes(whole)

    beside.run.finish(wait)
    assert waited == [1.0, 2.0]
    assert beside.windows() == [(1, 10), (11, 15)]
    assert beside.store.incidents("job", only_open=True) == ()
    assert len(beside.store.incidents("job")) == 1


def test_an_end_that_is_never_stored_is_an_error_and_the_next_watch_stores_it(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    beside, catalogue, whole = ended_beside_a_broken_store(tmp_path, written, clock)
    waited: list[float] = []
    with pytest.raises(StoreError, match=r"does not know that job 'job' has ended: .*; run `tracekit watch /"):
        beside.run.finish(waited.append)
    assert waited == [1.0, 2.0, 4.0, 8.0, 16.0]
    catalogue.write_bytes(whole)
    again = Beside(tmp_path, clock)
    again.look()
    again.run.finish(waited.append)
    assert (again.windows()[-1][1], again.store.incidents("job", only_open=True)) == (15, ())
