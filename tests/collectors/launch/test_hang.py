"""Hangs of running jobs: what is said, what is not called a hang, what is left on disk."""

import json
import os
from pathlib import Path

import pytest

from tests.collectors.conftest import collect, forks
from tests.reports import hang_with
from tracekit.collectors.launch.hang_answers import write_departure
from tracekit.collectors.launch.hang_watcher import HangWatcher
from tracekit.collectors.record.wire_format import HANG_REQUEST, LAST_WORDS_SUFFIX, PULSE, PULSE_SUFFIX, rank_stem


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


class Explainer:
    """Writes the report that it is given at once."""

    def __init__(self):
        self.started = 0
        self.report = hang_with({"rank": 1}).to_dict()

    def start(self):
        self.started += 1

    def explain(self, folder, *_):
        if self.report is None:
            return
        (folder / "report.txt").write_text("HANG  rank 1\n")
        (folder / "report.json").write_text(json.dumps(self.report))

    def alive(self):
        return self.report is not None

    def close(self):
        pass


@pytest.fixture
def explainer():
    return Explainer()


@pytest.fixture
def watcher(tmp_path, clock, explainer):
    (tmp_path / "attempt-000").mkdir()
    return HangWatcher(tmp_path, hang_after_s=20.0, reports=tmp_path / "reports", explainer=explainer, now=clock)


def pulse(folder, rank, count):
    """What a rank shows."""
    path = folder / "attempt-000" / f"{rank_stem(rank)}{PULSE_SUFFIX}"
    path.write_bytes(PULSE.pack(count, os.getpid(), 0, 2))


def ranks(*arguments):
    """The command that runs `hangs.py` on two ranks."""
    return forks(2, "hangs.py", *arguments)


def requests(folder):
    """The folders that ranks were asked to answer to."""
    request = folder / "attempt-000" / HANG_REQUEST
    return [Path(request.read_text()).name] if request.exists() else []


def test_ranks_are_asked_once_nobody_has_moved_for_the_stated_time(watcher, clock, tmp_path):
    for rank in (0, 1):
        pulse(tmp_path, rank, 5)
    for clock.now in (1.0, 15.0, 20.5):
        watcher.tick()
    assert requests(tmp_path) == []
    clock.now = 21.5
    watcher.tick()
    assert requests(tmp_path) == ["hang-001"]


def test_a_job_in_which_one_rank_moves_is_slow_not_hung(watcher, clock, tmp_path):
    pulse(tmp_path, 0, 5)
    for clock.now in range(0, 200, 10):
        pulse(tmp_path, 1, int(clock.now))
        watcher.tick()
    assert requests(tmp_path) == []


def test_before_the_first_rank_has_begun_there_is_no_hang(watcher, clock, tmp_path):
    for clock.now in (0.0, 1000.0, 2000.0):
        watcher.tick()
    assert requests(tmp_path) == []


def stand_still(watcher, clock, until):
    """Let the time pass, a tick a second, with ranks that do not move."""
    ends = []
    while clock.now < until:
        clock.now += 1.0
        ends.append(watcher.tick())
    return any(ends)


def test_what_explains_hangs_starts_when_half_the_time_is_over(watcher, clock, explainer, tmp_path):
    pulse(tmp_path, 0, 5)
    stand_still(watcher, clock, 10.0)
    assert explainer.started == 0
    stand_still(watcher, clock, 12.0)
    assert explainer.started
    assert requests(tmp_path) == []


def test_a_hang_is_said_once_and_the_report_kept(watcher, clock, tmp_path, capsys):
    stored = []
    watcher.keep = stored.append
    pulse(tmp_path, 0, 5)
    assert not stand_still(watcher, clock, 100.0)
    err = capsys.readouterr().err
    assert err.count("HANG  rank 1") == 1
    (kept,) = tmp_path.glob("reports/hang-*")
    assert {path.name for path in kept.iterdir()} == {"report.txt", "report.json"}
    assert [(text.lines, [row.rank for row in text.report.culprits]) for text in stored] == [(("HANG  rank 1",), [1])]


def test_a_command_is_to_end_where_that_is_asked(watcher, clock, tmp_path):
    watcher.stop = True
    pulse(tmp_path, 0, 5)
    assert stand_still(watcher, clock, 30.0)


def test_a_rank_in_a_checkpoint_is_named_and_no_hang_for_ten_times_as_long(watcher, clock, explainer, tmp_path, capsys):
    explainer.report = hang_with({"rank": 1, "phase": "checkpoint"}).to_dict()
    pulse(tmp_path, 0, 5)
    stand_still(watcher, clock, 180.0)
    assert "but the job does not hang: rank 1 is in a checkpoint" in capsys.readouterr().err
    stand_still(watcher, clock, 260.0)
    assert "HANG  rank 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        (("checkpoint", "compilation"), "rank 0 is in a checkpoint; rank 1 is in a compilation"),
        (4 * ("checkpoint",), "; ".join(f"rank {rank} is in a checkpoint" for rank in range(3))),
        (("checkpoint", "step"), None),
    ],
    ids=["two", "four", "one of two"],
)
def test_only_if_all_who_are_waited_for_are_in_long_phases_is_it_no_hang(
    phases, words, watcher, clock, explainer, tmp_path, capsys
):
    """Three of them are named, again every 20 s or so: ten times as long as a hang ends at 200 s."""
    explainer.report = hang_with(*({"rank": rank, "phase": phase} for rank, phase in enumerate(phases))).to_dict()
    pulse(tmp_path, 0, 5)
    stand_still(watcher, clock, 180.0)
    said = capsys.readouterr().err
    patient = [line.partition("but the job does not hang: ")[2] for line in said.splitlines() if "not hang" in line]
    assert patient == ([] if words is None else 8 * [words])
    assert ("HANG  rank 1" in said) == (words is None)


def test_a_watch_that_fails_says_so_once_and_the_command_goes_on(watcher, clock, explainer, tmp_path, capsys):
    explainer.report = []
    pulse(tmp_path, 0, 5)
    assert not stand_still(watcher, clock, 60.0)
    assert capsys.readouterr().err.count("hang detection has stopped") == 1


def test_answers_that_cannot_be_analysed_are_said_to_be_there_and_end_nothing(
    watcher, clock, explainer, tmp_path, capsys
):
    watcher.stop, explainer.report = True, None
    pulse(tmp_path, 0, 5)
    assert not stand_still(watcher, clock, 30.0)
    assert "could not be analysed" in capsys.readouterr().err


def leaves(attempt, rank, taken_ns, **about):
    """The last words of a rank."""
    words = {"version": "2.10", "entries": [], "tracekit": {"rank": rank, "taken_ns": taken_ns, **about}}
    (attempt / f"{rank_stem(rank)}{LAST_WORDS_SUFFIX}").write_text(json.dumps(words))


@pytest.mark.parametrize(
    ("words", "ended_ns", "named"),
    [
        ({1: {"taken_ns": 5}, 0: {"taken_ns": 7, "error": "Connection closed by peer"}}, {}, [0, 1]),
        ({0: {"taken_ns": 7, "error": "Connection closed by peer"}}, {101: 5, 102: 8}, [0, 1]),
        ({1: {"taken_ns": 5, "error": "ValueError"}, 0: {"taken_ns": 7, "error": "Connection closed"}}, {}, None),
        ({1: {"taken_ns": 5}}, {102: 6}, None),
        ({}, {}, None),
    ],
    ids=["exit", "killed", "own error", "nobody failed", "nothing known"],
)
def test_who_left_first_without_an_error_is_named_where_others_failed_behind_it(tmp_path, words, ended_ns, named):
    """Rank r has process 100 + r. What the ranks wrote goes into the folder; a killed one is described in its place."""
    for rank in range(3):
        (tmp_path / f"{rank_stem(rank)}{PULSE_SUFFIX}").write_bytes(PULSE.pack(1, 100 + rank, 0, 3))
    for rank, about in words.items():
        leaves(tmp_path, rank, **about)
    (tmp_path / "hang").mkdir()
    found = write_departure(tmp_path, tmp_path / "hang", ended_ns)
    written = sorted(int(path.stem.removeprefix("rank_")) for path in (tmp_path / "hang").iterdir())
    assert (found, written) == (named is not None, named or [])


def test_where_a_rank_left_and_others_fail_nobody_waits_for_the_limit(watcher, clock, tmp_path):
    for rank in (0, 1):
        pulse(tmp_path, rank, 5)
    watcher.tick()
    leaves(tmp_path / "attempt-000", 1, 5)
    leaves(tmp_path / "attempt-000", 0, 7, error="Connection closed by peer")
    watcher._departures.ended_ns[os.getpid()] = 9
    clock.now = 1.0
    watcher.tick()
    assert requests(tmp_path) == ["hang-001"]


def test_ranks_are_followed_from_the_next_tick_on_after_they_begin(watcher, clock, tmp_path):
    """Of one that leaves before it is followed, nobody knows when it left."""
    for rank in (0, 1):
        watcher.tick()
        pulse(tmp_path, rank, 5)
    watcher.tick()
    assert set(watcher._pulses) == {0, 1}
    pulse(tmp_path, 0, 6)
    watcher.tick()
    assert watcher._pulses[0].count == 5  # all have begun: it looks less often


@pytest.mark.slow
def test_a_rank_that_exits_without_a_word_is_named_instead_of_those_that_fail(tmp_path):
    """A real job: gloo makes the other rank fail, and what starts the ranks sees only that. It trains for some seconds
    before: of ranks that are gone before the launcher has looked, nobody knows who left first.
    """
    process = collect(tmp_path, ranks("_exit", "1"), "--hang-after", "30", COMPUTE_S=1).process
    assert process.returncode
    (folder,) = tmp_path.glob("hang-*")
    (culprit,) = json.loads((folder / "report.json").read_text())["culprits"]
    assert (culprit["rank"], culprit["class"]) == (1, "process gone or interpreter locked")
    assert "operations fail because a rank left" in process.stderr


@pytest.mark.slow
def test_a_long_checkpoint_is_no_hang_and_a_locked_interpreter_is_one(tmp_path):
    """A real job of two ranks. Rank 1 first saves for long, then locks the interpreter: no Python runs in it any more,
    so its stack comes by signal.
    """
    process = collect(tmp_path, ranks("checkpoint-gil", "1"), "--hang-after", "2", "--on-hang", "stop").process
    assert process.returncode != 0
    assert "but the job does not hang: rank 1 is in a checkpoint" in process.stderr
    (folder,) = tmp_path.glob("hang-*")
    report = json.loads((folder / "report.json").read_text())
    (culprit,) = report["culprits"]
    assert (culprit["rank"], culprit["class"]) == (1, "process gone or interpreter locked")
    assert any(frame.endswith(" breaks") for frame in culprit["stack"])
    assert [one["rank"] for one in report["waiting"]] == [0]
    assert "rank 1 on" in process.stderr
    assert "stopping the command" in process.stderr
