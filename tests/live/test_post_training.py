"""A growing recording of post-training becomes windows in a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.analysis.rl.logs import ENDS, lines, write
from tests.handmade import run
from tracekit import rl
from tracekit.base.errors import FormatError
from tracekit.base.paths import Look
from tracekit.collectors.importers.rl_logs import looks_like_rl, read_rl
from tracekit.collectors.record import rl_recorder as recorder
from tracekit.live.post_training import LivePostTraining
from tracekit.live.run import LiveOptions
from tracekit.live.windows import WindowSize
from tracekit.sources.load import load_from_store
from tracekit.store import Store

FOUR_STEPS = WindowSize(steps=4)


class Watched:
    """A watched recording, in windows of four steps; `said`: the lines that were told."""

    def __init__(self, source: Path, clock: list[float], size: WindowSize = FOUR_STEPS) -> None:
        self.said: list[str] = []
        self.store = Store(source.parent / "jobs.store")
        options = LiveOptions(source, self.store.path, "job", size)
        self.run, self._clock = LivePostTraining(options, self.said.append), clock

    def look(self, after_s: float = 1.0) -> None:
        """Look now and again after some time."""
        self.run.poll()
        self._clock[0] += after_s
        self.run.poll()

    def windows(self) -> list[tuple[int, int]]:
        return [(one.first_step, one.last_step) for one in self.store.windows("job")]


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(recorder, "_recorder", None)
    yield tmp_path / "records"
    if recorder._recorder is not None:
        recorder._recorder.close()


def train(records: Path, clock: list[float], steps: Iterable[int], sync_s: float) -> None:
    """A process of a real loop, whose work is the turning of the clock: 5.5 s of generation, 4 s of training."""
    rl.record(records)
    for step in steps:
        with rl.phase("generate", step=step):
            submit = rl.now()
            for tokens, took_s in ENDS.items():
                clock[0] += submit + took_s - rl.now()
                rl.trajectory(f"{step}-{tokens}", step=step, engine="a", submit=submit, tokens=tokens, version=step)
        with rl.phase("train", step=step):
            clock[0] += 4.0
        with rl.phase("sync", step=step):
            clock[0] += sync_s
    recorder._recorder.close()


def verl(steps: Iterable[int], step_s: float = 100.0) -> str:
    return "".join(
        f"step:{step} - timing_s/gen:60.0 - timing_s/update_actor:30.0 - timing_s/step:{step_s}\n" for step in steps
    )


def test_a_loop_is_watched_and_its_slow_sync_is_an_incident(tmp_path: Path, records: Path, clock: list[float]) -> None:
    """A sync of 0.1 s in a step of 9.6 s, later of 5.5 s in one of 15 s; before step 7, the loop waits for 1 s."""
    watched = Watched(records, clock)
    train(records, clock, range(5), 0.1)
    watched.look()
    assert watched.windows() == [(0, 3)]  # step 4 is over once a later one is
    assert watched.store.incidents() == ()
    train(records, clock, range(5, 7), 5.5)
    watched.look()
    assert watched.windows() == [(0, 3)]
    train(records, clock, range(7, 9), 5.5)
    watched.look()
    assert watched.windows() == [(0, 3), (4, 7)]
    history = watched.store.history("job")
    assert history["recorded_s"].to_list() == pytest.approx([9.6, 15.5])
    (incident,) = watched.store.incidents(only_open=True)
    assert (incident.cause.kind, incident.opened_window) == ("sync", 1)
    assert incident.cause.share == pytest.approx(5.5 / 15.5)
    report = load_from_store("job", store=watched.store.path).report
    assert report.step_times().steps.tolist() == [6, 7]  # after two that warm up
    assert watched.said == []


def test_a_watch_goes_on_after_the_last_stored_step_and_ends_with_the_rest(records: Path, clock: list[float]) -> None:
    train(records, clock, range(6), 1.0)
    Watched(records, clock).look()
    train(records, clock, range(6, 11), 1.0)
    again = Watched(records, clock)
    again.look()
    assert again.windows() == [(0, 3), (4, 7)]
    assert again.said == ["windows of 'job' go on after step 3; give another run another --name"]
    clock[0] += 298.9
    assert not again.run.ended()
    clock[0] += 0.2
    assert again.run.ended()
    again.run.finish()
    assert again.windows() == [(0, 3), (4, 7), (8, 10)]
    assert again.said[1:] == [f"{records}: nothing was written for 300 s: the run has ended"]
    assert {one.closed_because for one in again.store.incidents()} == {"the job ended"}


def test_an_unfinished_last_line_is_no_error_and_in_no_window(tmp_path: Path, clock: list[float]) -> None:
    """A step of 100 s, of which only `10` is written yet; a line of JSON without its end."""
    log, whole = tmp_path / "train.log", verl(range(9))
    watched = Watched(log, clock)
    cut = len(verl(range(8))) - len("0.0\n")
    log.write_text(whole[:cut])
    watched.look()
    assert watched.windows() == [(0, 3)]
    log.write_text(whole)
    watched.look()
    assert watched.windows() == [(0, 3), (4, 7)]
    report = load_from_store("job", store=watched.store.path).report
    assert report.step_times().recorded.tolist() == [100.0] * 4
    assert report.step_times().steps.tolist() == [4, 5, 6, 7]
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "started.jsonl").touch()
    file = write(tmp_path / "records" / "a.jsonl", lines(5))
    file.write_text(file.read_text()[:-9])
    jsonl = Watched(tmp_path / "records", clock)
    jsonl.run.poll()
    assert list(jsonl.run._took_s) == [0, 1, 2, 3]
    assert watched.said == jsonl.said[1:] == []


@pytest.mark.parametrize(
    ("size", "windows"),
    [
        (WindowSize(steps=4), [(1, 4), (5, 8), (9, 10)]),
        (WindowSize(seconds=250.0, fewest=2), [(1, 3), (4, 6), (7, 9), (10, 10)]),
        (WindowSize(seconds=1.0, fewest=5), [(1, 5), (6, 10)]),
    ],
)
def test_steps_that_are_already_there_become_windows_of_the_same_size(
    tmp_path: Path, clock: list[float], size: WindowSize, windows: list[tuple[int, int]]
) -> None:
    """Ten steps of 100 s; of a log, what is left at the end is stored if it has three steps."""
    (tmp_path / "train.log").write_text(verl(range(1, 11)))
    watched = Watched(tmp_path / "train.log", clock, size)
    for _ in range(4):
        watched.look()
    clock[0] += 1000.0
    assert watched.run.ended()
    watched.run.finish()
    assert watched.windows() == [(first, last) for first, last in windows if last - first > 1]


def test_a_restarted_run_has_windows_of_its_own_from_where_it_began_again(tmp_path: Path, clock: list[float]) -> None:
    """Ten steps of 100 s, then again from step 6 on in 90 s: windows of the first attempt stay, and nothing of it goes
    into those of the second. A watch that is started again knows what is stored.
    """
    log = tmp_path / "train.log"
    log.write_text(verl(range(10)))
    watched = Watched(log, clock)
    watched.look()
    watched.look()
    assert watched.windows() == [(0, 3), (4, 7)]
    log.write_text(verl(range(10)) + verl(range(6, 11), 90.0))
    watched.look()
    assert watched.windows() == [(0, 3), (4, 7), (6, 9)]
    assert watched.said == ["step 6 is logged again: windows of the new attempt begin there"]
    assert watched.store.history("job")["recorded_s"].to_list() == [100.0, 100.0, 90.0]
    log.write_text(verl(range(10)) + verl(range(6, 15), 90.0))
    again = Watched(log, clock)
    again.look()
    assert again.windows() == [(0, 3), (4, 7), (6, 9), (10, 13)]
    assert again.said == ["windows of 'job' go on after step 9; give another run another --name"]


def test_steps_without_the_time_of_the_generation_are_named(tmp_path: Path, clock: list[float]) -> None:
    """Steps 3 and 4 lack it, and so does the newest, which may be half written."""
    log = tmp_path / "train.log"
    log.write_text("".join(
        line if step not in (3, 4, 9) else line.replace("timing_s/gen:60.0 - ", "")
        for step, line in enumerate(verl(range(10)).splitlines(keepends=True))
    ))  # fmt: skip
    watched = Watched(log, clock)
    watched.look()
    assert watched.windows() == [(0, 5)]
    log.write_text(log.read_text() + verl(range(10, 12)))
    watched.look()
    left_out = "without a whole record: left out"
    assert watched.said == [f"steps 3-4 {left_out}", f"step 9 {left_out}"]
    assert load_from_store("job", store=watched.store.path).report.left_out == [9]


def test_a_folder_with_logs_of_several_runs_is_an_error(tmp_path: Path) -> None:
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_text(verl(range(5)))
    ran = run("watch", tmp_path, "--store", tmp_path / "jobs.store")
    assert (ran.code, ran.message.count("\n")) == (2, 0)
    assert "watch one of them" in ran.message
    assert "a.log" in ran.message


def test_what_cannot_be_read_is_said_once_and_read_once_it_can_be(tmp_path: Path, clock: list[float]) -> None:
    log = tmp_path / "train.log"
    log.write_text("loading\n")
    watched = Watched(log, clock)
    watched.look()
    log.write_text("loading\nloaded\n")
    watched.look(1e6)
    assert len(watched.said) == 1
    assert "no line is as verl" in watched.said[0]
    assert not watched.run.ended()  # the first step may take long
    log.write_text("loading\nloaded\n" + verl(range(5)))
    watched.look()
    assert watched.windows() == [(0, 3)]
    log.rename(tmp_path / "away")
    watched.look()
    (tmp_path / "away").rename(log)
    watched.look()
    assert watched.said[1:] == [
        f"{log}: cannot be read: No such file or directory; trying again for 300 s", f"{log} can be read again",
    ]  # fmt: skip
    log.unlink()
    with pytest.raises(FormatError, match="cannot be read"):
        watched.look(301)


@pytest.mark.slow
def test_a_long_recording_is_read_for_a_twentieth_of_the_time(tmp_path: Path, clock: list[float]) -> None:
    log = tmp_path / "train.log"
    log.write_text(verl(range(5)))
    watched, reads = Watched(log, clock), list[float]()

    def slow(paths: list[Path]) -> object:
        clock[0] += 2.0
        reads.append(clock[0])
        return read_rl(paths)

    with mock.patch("tracekit.live.post_training.read_rl", slow):
        for step in range(100):
            watched.look()
            log.write_text(verl(range(step + 6)))
    assert reads == [1002.0, 1044.0, 1086.0]  # 2 s each, 40 s apart, in the 106 s that the looks take


def test_ten_quiet_steps_are_the_end_of_a_run_of_long_steps(tmp_path: Path, clock: list[float]) -> None:
    log = tmp_path / "train.log"
    log.write_text(verl(range(2)))  # too few for a window
    watched = Watched(log, clock)
    watched.look()
    clock[0] += 998
    assert not watched.run.ended()
    clock[0] += 1
    assert watched.run.ended()
    watched.run.finish()
    assert watched.store.jobs() == ()


def test_the_command_waits_for_the_first_record(tmp_path: Path) -> None:
    records = tmp_path / "records"

    def looks(look: Look) -> bool:
        found = looks_like_rl(look)
        records.mkdir(exist_ok=True)
        write(records / "a.jsonl", lines(9))
        return found

    with (
        mock.patch("tracekit.collectors.importers.rl_logs.looks_like_rl", looks),
        mock.patch.multiple("tracekit.live.post_training", QUIET_S=0.0, QUIET_STEPS=0),
    ):
        ran = run("watch", records, "--store", tmp_path / "jobs.store", "--window-steps", "5")
    told = ran.err.splitlines()
    assert (ran.code, ran.out, told[0]) == (0, "", f"tracekit: {records}: no recording there yet; waiting")
    headline = "13.6% lost, sync: the weight sync costs 9% of the step"
    assert f"records, window 0, steps 0 to 4: {headline}" in ran.err
    assert f"records, window 1, steps 5 to 8: {headline}" in ran.err
    assert "INCIDENT 1 of records opened: the sync takes 1.00 s of each step" in ran.err
    for wrong in (("--window-steps", "2"), ("--consume",)):
        assert run("watch", records, "--store", tmp_path / "jobs.store", *wrong).code == 2
