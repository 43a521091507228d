"""A running recording becomes windows in a store; what is wrong with it is said, and the rest goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.writtenrun import MS, WrittenRun
from tests.handmade import little_space
from tests.live.beside import Beside
from tracekit.collectors.runtime.wire_format import RECORD, Category
from tracekit.errors import StoreTakenError


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


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda run: run.write(1, b"\xff" * RECORD.size), "record 0 is of category 255"),
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
    left_out, *missing = beside.said
    assert left_out.startswith("rank 1 is left out from step 11 on: ")
    assert reason in left_out
    assert missing == [f"steps {steps}: 1 of 4 ranks are missing: rank 1" for steps in ("11 to 30", "31 to 40")]
    assert beside.windows() == [(1, 10), (11, 30), (31, 40)]


def stepped_back() -> bytes:
    return RECORD.pack(Category.COMPUTE, 0, 1, 12, 0, -1, -1, 3000 * MS, 1500 * MS, 0, 10_000)


def test_a_window_that_cannot_be_analysed_is_said_and_the_next_one_is(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    """A rank tells another mesh than its peers until it tells theirs."""
    beside = Beside(tmp_path, clock)
    broken = written.attempt_directory / "rank-000001.facts"
    whole = broken.read_text()
    broken.write_text(whole.replace('["dp"]', '["pp"]'))
    written.run(range(1, 11))
    beside.look()
    (line,) = beside.said
    assert line.startswith("steps 1 to 10: cannot be analysed: ")
    assert beside.run.counts.failed == 1
    beside.run._follower.ranks[1].facts["mesh"].clear()
    written.tell(1, [("mesh", json.loads(whole.splitlines()[1])["value"])])
    written.run(range(11, 21))
    beside.look()
    assert beside.windows() == [(11, 20)]


def test_ranks_of_another_job_in_the_folder_are_left_out(
    tmp_path: Path, written: WrittenRun, clock: list[float]
) -> None:
    written.tell(7, written._facts(7, 16))
    beside = Beside(tmp_path, clock)
    written.run(range(1, 11))
    beside.look()
    assert beside.said == [
        "rank 7 is left out: it saw 16 ranks, the others 4: segments of two jobs in one folder; the others go on"
    ]
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
    with pytest.raises(StoreTakenError, match="another process adds windows to job 'job'"):
        second.look()
    assert first.windows() == [(1, 10)]


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
    assert (beside.windows(), beside.run.counts.lost) == ([(1, 10), (11, 20)], 0)


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


def test_memory_holds_the_steps_that_are_not_over(tmp_path: Path, written: WrittenRun, clock: list[float]) -> None:
    beside = Beside(tmp_path, clock)
    written.run(range(1, 36))
    beside.look()
    assert beside.windows() == [(1, 30)]  # three windows that were over at once
    assert beside.run._follower is not None
    held = [sum(map(len, rank.pending)) for rank in beside.run._follower.ranks.values()]
    assert held == [5 * len(written._step(0, 0, 1.0, 1.0))] * 4


def test_a_launcher_that_was_killed_ends_the_watch(tmp_path: Path, written: WrittenRun, clock: list[float]) -> None:
    beside = Beside(tmp_path, clock)
    assert not beside.run.ended()
    written.end()
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    (tmp_path / "run" / f"launcher-{os.uname().nodename}-{child}.running").touch()
    assert beside.run.ended()
