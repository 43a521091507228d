"""The bill of a run directory: by hand to the last digit, of real processes, and of bad input."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from shutil import rmtree

import pytest

from benchmarks.writtenrun import EPOCH_S
from tests.bill.attempts import Attempt, command
from tests.handmade import run
from tracekit.bill.bill_of_run import bill_of_run
from tracekit.collectors.record.wire_format import Category

#: Seconds by part and cause.
Seconds = dict[tuple[str, str], float]


def seconds(directory: Path) -> Seconds:
    """The bill, whose rows add up to its wall clock and are never negative."""
    bill = bill_of_run(directory)
    found: Seconds = defaultdict(float)
    for row in bill.rows.iter_rows(named=True):
        assert row["seconds"] > 0
        found[row["part"], row["cause"]] += row["seconds"]
    assert sum(found.values()) == pytest.approx(sum(bill.wall_s.values()), rel=1e-9)
    return {key: round(value, 9) for key, value in found.items()}


def restarted(directory: Path, *, resumed: int = 0, code: int = 0) -> None:
    """Two ranks. The command starts at 0 s, their first processes at 10 s, and step 0 ends at 14 s.

    Steps of 1 s up to 20 s, of which rank 0 spends 0.1 s on data; a checkpoint of rank 0 from 20 to 23 s, in a step up
    to 24 s; two more steps up to 26 s; at 26.5 s the ranks are killed. The second attempt begins at 36.5 s; its first
    step, `resumed`, ends at 40 s, ten more at 50 s, in one of which rank 1 evaluates for 0.5 s; its last record is a
    checkpoint from 50 to 52 s. The command ends at 53 s.
    """
    first = Attempt(directory, begins_s=10.0)
    first.step(0, 10.0, 14.0)
    for number in range(1, 7):
        first.step(number, 13.0 + number, 14.0 + number, {0: [("data-load", 13.0 + number, 13.1 + number)]})
    first.step(7, 20.0, 24.0, {0: [("checkpoint", 20.0, 23.0)]})
    first.step(8, 24.0, 25.0)
    first.step(9, 25.0, 26.0)
    first.records(0, 10, [("forward-compute", Category.COMPUTE, 0, 26.0, 26.5)])
    second = Attempt(directory, attempt=1, begins_s=36.5)
    second.step(resumed, 36.5, 40.0)
    for number in range(1, 11):
        work = {1: [("evaluation", 44.0, 44.5)]} if number == 5 else {}
        second.step(resumed + number, 39.0 + number, 40.0 + number, work)
    second.records(0, resumed + 11, [("checkpoint", Category.CHECKPOINT, 0, 50.0, 52.0)])
    command(directory, 0.0, 53.0)
    second.end(code)


def test_every_second_of_a_restarted_run_is_billed_to_the_last_digit(tmp_path: Path) -> None:
    """The checkpoint is complete at 23 s, so 3.5 s until 26.5 s are lost; 6 x 0.9 s and 10 x 1 s less 0.5 s are left
    of the other steps.
    """
    restarted(tmp_path)
    assert seconds(tmp_path) == {
        ("start-up", "before the first process"): 10.0,
        ("start-up", "until the first step has ended"): 4.0,
        ("useful", "training"): 6 * 0.9 + 10 - 0.5,
        ("input", "input"): 0.6,
        ("checkpoints", "checkpoints"): 3.0 + 2.0,
        ("evaluation", "evaluation"): 0.5,
        ("restarts", "lost work"): 3.5,
        ("restarts", "down"): 10.0,
        ("restarts", "until the first step has ended"): 3.5,
        ("unknown", "after the last record"): 1.0,
    }


def test_where_the_script_numbers_its_steps_they_show_what_is_done_again(tmp_path: Path) -> None:
    """The second attempt begins with step 4: from 17 s on all is lost, the checkpoint, too."""
    restarted(tmp_path, resumed=4)
    found = seconds(tmp_path)
    assert found["restarts", "lost work"] == 9.5
    assert found["useful", "training"] == round(3 * 0.9 + 10 - 0.5, 9)
    assert found["checkpoints", "checkpoints"] == 2.0


def test_a_failed_command_loses_what_follows_its_last_checkpoint(tmp_path: Path) -> None:
    """That ends with the last record; what an earlier checkpoint kept stays useful."""
    one = Attempt(tmp_path, begins_s=0.0)
    for number in range(6):
        one.step(number, number, number + 1.0, {1: [("checkpoint", 3.0, 3.1)]} if number == 3 else {})
    one.end(-9)
    assert seconds(tmp_path) == {
        ("start-up", "until the first step has ended"): 1.0,
        ("useful", "training"): 2.0,
        ("checkpoints", "checkpoints"): 0.1,
        ("restarts", "lost work"): 2.9,
    }


def test_without_a_recorded_checkpoint_nobody_knows_what_a_restart_lost(tmp_path: Path) -> None:
    """Four whole steps were kept or lost; the fifth, half done, is lost."""
    first = Attempt(tmp_path, begins_s=0.0)
    for number in range(5):
        first.step(number, number, number + 1.0)
    first.records(1, 5, [("forward-compute", Category.COMPUTE, 0, 5.0, 5.5)])
    second = Attempt(tmp_path, attempt=1, begins_s=7.0)
    for number in range(3):
        second.step(number, 7.0 + number, 8.0 + number)
    second.end(0)
    assert seconds(tmp_path) == {
        ("start-up", "until the first step has ended"): 1.0,
        ("unknown", "kept or lost: no checkpoint shows it"): 4.0,
        ("restarts", "lost work"): 0.5,
        ("restarts", "down"): 1.5,
        ("restarts", "until the first step has ended"): 1.0,
        ("useful", "training"): 2.0,
    }


def test_stragglers_are_what_the_analysis_says_by_kind_of_cause(tmp_path: Path) -> None:
    """Rank 3 computes 0.6 s longer in each of 20 steps, which are 1.6 s long."""
    one = Attempt(tmp_path, 4, begins_s=0.0, labels={"label_team": "llm"})
    one.step(0, 0.0, 1.6)
    for number in range(1, 21):
        one.step(number, 1.6 * number, 1.6 * (number + 1), slow={3: 0.6})
    one.end(0)
    found = seconds(tmp_path)
    assert found["stragglers", "bad-worker"] == pytest.approx(20 * 0.6, rel=1e-3)
    rows = bill_of_run(tmp_path).rows
    assert set(rows["team"]) == {"llm"}
    assert rows["gpu_hours"].sum() == pytest.approx(4 * 21 * 1.6 / 3600)


def test_time_in_which_the_host_keeps_all_ranks_waiting_is_not_useful(tmp_path: Path) -> None:
    """0.3 s of every step of 1 s."""
    one = Attempt(tmp_path, begins_s=0.0)
    for number in range(11):
        one.step(number, number, number + 1.0, idle_s=0.3)
    one.end(0)
    found = seconds(tmp_path)
    assert (found["host", "host-bound-launch"], found["useful", "training"]) == (3.0, 7.0)


def test_steps_that_were_not_recorded_are_unknown(tmp_path: Path) -> None:
    """`--every 2`, and a step whose records were dropped: steps 3, 5 and 6."""
    one = Attempt(tmp_path, begins_s=0.0)
    for number in range(6):
        one.step(number, number, number + 1.0, recorded=number not in (3, 5))
    one.step(7, 7.0, 8.0)
    one.end(0)
    assert seconds(tmp_path) == {
        ("start-up", "until the first step has ended"): 1.0,
        ("useful", "training"): 4.0,
        ("unknown", "steps that were not recorded"): 3.0,
    }


def test_two_restarts_within_one_step_and_an_attempt_without_a_step(tmp_path: Path) -> None:
    """All of them is restart: the second attempt, which ends 1 s after it began, and the third up to its first step."""
    first = Attempt(tmp_path, begins_s=0.0)
    for number in range(3):
        first.step(number, number, number + 1.0, {0: [("checkpoint", 2.0, 2.1)]} if number == 2 else {})
    second = Attempt(tmp_path, attempt=1, begins_s=5.0)
    second.records(0, 0, [("forward-compute", Category.COMPUTE, 0, 5.0, 6.0)])
    third = Attempt(tmp_path, attempt=2, begins_s=9.0)
    for number in range(2):
        third.step(number, 9.0 + number, 10.0 + number)
    third.end(0)
    found = seconds(tmp_path)
    assert found["restarts", "without a step"] == 1.0
    assert found["restarts", "down"] == 2.0 + 3.0
    assert found["restarts", "until the first step has ended"] == 1.0
    assert found["restarts", "lost work"] == 0.9


def test_attempts_that_overlap_are_billed_once(tmp_path: Path) -> None:
    """A rank of the first attempt goes on after the second has begun at 3 s: the second counts from then on."""
    first = Attempt(tmp_path, begins_s=0.0)
    for number in range(6):
        first.step(number, number, number + 1.0, {0: [("checkpoint", 1.0, 1.1)]} if number == 1 else {})
    second = Attempt(tmp_path, attempt=1, begins_s=3.0)
    for number in range(4):
        second.step(number, 3.0 + number, 4.0 + number)
    second.end(0)
    found = seconds(tmp_path)
    assert sum(found.values()) == 7.0
    assert found["restarts", "lost work"] == 1.9
    assert "attempt 1 begins before the last record of attempt 0: from then on it counts" in bill_of_run(tmp_path).notes


def test_a_clock_that_goes_back_makes_no_time_negative(tmp_path: Path) -> None:
    """The host starts again, with its wall clock an hour back, and the command is said to end before it began."""
    first = Attempt(tmp_path, begins_s=5000.0)
    for number in range(3):
        first.step(number, 5000.0 + number, 5001.0 + number)
    second = Attempt(tmp_path, attempt=1, begins_s=10.0, ahead_s=1000.0)
    for number in range(3):
        second.step(number, 10.0 + number, 11.0 + number)
    command(tmp_path, 6000.0, 100.0)
    second.end(0)
    found = seconds(tmp_path)
    assert sum(found.values()) == 6.0
    assert found["useful", "training"] == 2.0
    first_note, second_note = bill_of_run(tmp_path).notes
    assert first_note.startswith("the clock went back before attempt 1")
    assert second_note.startswith("the clock went back while the command ran")


def test_the_clocks_of_a_host_that_sets_its_wall_clock_do_not_count(tmp_path: Path) -> None:
    """Between the attempts, the wall clock is set back by 3000 s: 4 s have passed by the monotonic clock."""
    first = Attempt(tmp_path, begins_s=100.0)
    for number in range(3):
        first.step(number, 100.0 + number, 101.0 + number)
    second = Attempt(tmp_path, attempt=1, begins_s=107.0, ahead_s=-3000.0)
    for number in range(3):
        second.step(number, 107.0 + number, 108.0 + number)
    second.end(0)
    assert seconds(tmp_path)["restarts", "down"] == 4.0
    assert bill_of_run(tmp_path).notes == ()


def test_an_attempt_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    """From the end of the one before to the beginning of the next: 3 to 9 s."""
    for attempt, begins_s in ((0, 0.0), (1, 4.0), (2, 9.0)):
        one = Attempt(tmp_path, attempt=attempt, begins_s=begins_s)
        for number in range(3):
            one.step(number, begins_s + number, begins_s + number + 1.0)
    one.end(0)
    for facts in (tmp_path / "attempt-001").glob("*.facts"):
        facts.write_text("garbage\n")
    assert seconds(tmp_path)["unknown", "an attempt that cannot be read"] == 6.0
    (note,) = bill_of_run(tmp_path).notes
    assert note.startswith("attempt 1 cannot be read: ")
    rmtree(tmp_path / "attempt-001")
    assert seconds(tmp_path)["unknown", "an attempt that cannot be read"] == 6.0
    assert bill_of_run(tmp_path).notes == ("attempt 1 cannot be read: its folder is missing",)


def test_a_hang_is_idle_time(tmp_path: Path) -> None:
    """The launcher asked the ranks for their state after their last record."""
    one = Attempt(tmp_path, begins_s=0.0)
    for number in range(3):
        one.step(number, number, number + 1.0)
    (tmp_path / "attempt-000" / "hang-request").write_text("hang-1")
    command(tmp_path, 0.0, 603.0)
    one.end(-9)
    assert seconds(tmp_path)["idle", "hang"] == 600.0


def test_weeks_begin_on_monday_in_utc_whatever_the_local_clock_does(tmp_path: Path) -> None:
    """A run over the night to Monday, 30 March 2026, in which Berlin sets its clocks forward: 3 h before, 5 h after."""
    monday = 1_774_828_800  # date -u -d 2026-03-30 +%s
    ahead_s = monday - 3 * 3600 - EPOCH_S
    first = Attempt(tmp_path, begins_s=0.0, ahead_s=ahead_s)
    first.step(0, 0.0, 8 * 3600.0)
    first.end(0)
    shown = json.loads(run("bill", tmp_path, "--json", env={"TZ": "Europe/Berlin"}).out)
    weeks = {row["week"]: row["seconds"] for row in shown["rows"]}
    assert weeks == {"2026-03-23": pytest.approx(3 * 3600), "2026-03-30": pytest.approx(5 * 3600)}


def test_a_run_that_goes_on_is_billed_up_to_its_last_record(tmp_path: Path) -> None:
    one = Attempt(tmp_path, begins_s=0.0)
    for number in range(3):
        one.step(number, number, number + 1.0)
    assert seconds(tmp_path)["useful", "training"] == 2.0
    assert bill_of_run(tmp_path).notes == ("the run has not ended: its bill ends with its last record",)


@pytest.mark.parametrize("by", ["part", "cause", "week", "team", "job"])
def test_the_terminal_fits_80_columns_and_totals_the_wall_clock(tmp_path: Path, by: str) -> None:
    """53 s of two ranks are 0.0294 GPU-hours, at 1000 each 29.44."""
    restarted(tmp_path)
    ran = run("bill", tmp_path, "--by", by, "--gpu-hour", "1000", env={"COLUMNS": "80"})
    assert ran.code == 0, ran.err
    *lines, command_line = ran.out.splitlines()  # which is to be copied
    assert command_line == f"Next   tracekit whatif {tmp_path}"
    assert max(map(len, lines)) <= 80
    total = next(line for line in ran.out.splitlines() if "wall clock" in line).split()
    assert total[2:4] == ["0.0147", "0.0294"]
    assert total[-1] == "29.44"


def test_csv_has_every_row_with_its_price(tmp_path: Path) -> None:
    restarted(tmp_path)
    lines = run("bill", tmp_path, "--csv", "--gpu-hour", "2").out.splitlines()
    assert lines[0] == "job,team,week,part,cause,seconds,gpu_hours,cost"
    assert len(lines) == 1 + len(seconds(tmp_path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file or folder"),
        ("", "an empty folder, not a trace"),
        ('{"command": ["x"], "options": {"first_step": 1}}', "no attempt has begun"),
        ('{"command": ["x"], "options": {"first_step": 1}, "started_ns": "soon"}', "got `str` - at `$.started_ns`"),
    ],
)
def test_what_is_no_run_is_one_clear_line(tmp_path: Path, content: str | None, words: str) -> None:
    place = tmp_path / "run"
    if content is not None:
        place.mkdir()
    if content:
        (place / "run.json").write_text(content)
    ran = run("bill", place)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert len(ran.err.splitlines()) == 1
