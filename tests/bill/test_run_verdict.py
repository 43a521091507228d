"""The verdict of a run: what its windows lost, by cause and place, by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from msgspec import structs, to_builtins

from benchmarks.writtenrun import EPOCH_S, WrittenRun
from tests.bill.test_stored import stored, window
from tests.dashboards.watched import write_watched
from tests.handmade import HEALTHY_STEP_S, SLOW_STEP_S, findings_of, healthy_frame, run, slow_frame
from tests.live.beside import Beside
from tests.older_stores import as_version_6
from tests.reports import report_with
from tracekit.base.errors import ExitCode
from tracekit.base.text import ranks_text
from tracekit.bill.account import account_of, accused_of_run, bill_of_store, run_of, run_of_job
from tracekit.bill.placement import _start_up_s
from tracekit.commands.mcp import who, why_slow
from tracekit.dashboards.browser.ui.sentences import Tone, run_headline
from tracekit.dashboards.words import (
    cause_sentence,
    coverage_words,
    elsewhere_words,
    run_advice,
    run_kind,
    run_rows,
    run_sentence,
)
from tracekit.dashboards.words import since_words as since_of_run
from tracekit.live.incident_words import since_words, utc
from tracekit.report.conclusions import CauseInWords, LossKind, RunCause, RunVerdict, State
from tracekit.report.finding import kind_words
from tracekit.report.findings import Findings, Unanalysed
from tracekit.store import Incoming, Store
from tracekit.store.care import repair
from tracekit.trace.canonical import Trace

#: What a slow step loses to stage 0 of DP rank 1, and that rank.
LOST_S, SLOW_RANK = SLOW_STEP_S - HEALTHY_STEP_S, 1


def windows(*slow: bool, steps: int = 5) -> list[Trace]:
    """Windows of so many steps, one after another from step 1 on; `slow`: stage 0 of DP rank 1 is, in each."""
    traces, start_s = list[Trace](), 0.0
    for number, it_is in enumerate(slow):
        numbers = range(1 + number * steps, 1 + (number + 1) * steps)
        step_s = SLOW_STEP_S if it_is else HEALTHY_STEP_S
        traces.append(window((slow_frame if it_is else healthy_frame)(numbers), start_s, step_s))
        start_s += steps * step_s
    return traces


def verdict(folder: Path, traces: Sequence[Trace], **how: Any) -> RunVerdict:
    return run_of_job(stored(folder, traces, **how), "job")


def only(found: RunVerdict) -> RunCause:
    (cause,) = found.alarming
    return cause


def test_a_fault_that_is_over_is_told_with_its_place_its_steps_and_its_share_of_the_whole_run(tmp_path: Path) -> None:
    """Two of five windows are slow: 10 slow steps and 15 healthy ones."""
    found = verdict(tmp_path, windows(False, True, True, False, False))
    wall_s = 15 * HEALTHY_STEP_S + 10 * SLOW_STEP_S
    cause = only(found)
    assert (found.first_step, found.last_step, found.windows) == (1, 25, 5)
    assert (found.recorded_s, found.covered_share) == (pytest.approx(wall_s), pytest.approx(1.0))
    assert (cause.kind, cause.cause, cause.ranks) == ("straggler", "bad-worker", (SLOW_RANK,))
    assert cause.lost_s == pytest.approx(10 * LOST_S)
    assert cause.lost_share == pytest.approx(10 * LOST_S / wall_s)
    assert cause.gpu_hours_lost == pytest.approx(10 * LOST_S * 4 / 3600)
    assert (cause.first_step, cause.last_step, cause.windows) == (6, 15, 2)
    assert cause.since == pytest.approx(EPOCH_S + 5 * HEALTHY_STEP_S)
    assert cause.until == pytest.approx(EPOCH_S + 5 * HEALTHY_STEP_S + 10 * SLOW_STEP_S)
    assert cause.state is State.OVER
    assert cause.worst_share == pytest.approx(LOST_S / SLOW_STEP_S)


def test_a_fault_that_begins_and_ends_within_windows_begins_and_ends_at_its_steps(tmp_path: Path) -> None:
    """Windows of 6 steps: the last three of the first, and the first three of the third are slow."""
    traces, start_s = [], 0.0
    for numbers, slow in ((range(1, 7), (4, 5, 6)), (range(7, 13), range(7, 13)), (range(13, 19), (13, 14, 15))):
        parts = [slow_frame(slow), healthy_frame([step for step in numbers if step not in slow])]
        ops = pl.concat([part for part in parts if part.height]).sort("step", maintain_order=True)
        starts = {}
        for step in numbers:
            starts[step] = EPOCH_S + start_s
            start_s += SLOW_STEP_S if step in slow else HEALTHY_STEP_S
        traces.append(Trace.from_frame(ops, windows(False)[0].layout, name="job", step_starts=starts))
    cause = only(verdict(tmp_path, traces))
    assert (cause.first_step, cause.last_step) == (4, 15)
    assert cause.since == pytest.approx(EPOCH_S + 3 * HEALTHY_STEP_S)
    assert cause.until == pytest.approx(EPOCH_S + 3 * HEALTHY_STEP_S + 12 * SLOW_STEP_S)
    # The last step of the first window counts as long as its mean step.
    assert cause.lost_s == pytest.approx(12 * LOST_S, rel=0.01)


@pytest.mark.parametrize(
    ("slow", "ends", "state"),
    [
        ((False, True), False, State.OPEN),
        ((False, True, False), False, State.OPEN),  # as its incident, until a second window no longer shows it
        ((False, True, False, False), False, State.OVER),
        ((False, True), True, State.ENDED),
        ((True, False), True, State.OVER),
    ],
)
def test_a_fault_is_open_over_or_ended_with_its_job(
    slow: tuple[bool, ...], ends: bool, state: State, tmp_path: Path
) -> None:
    store = stored(tmp_path, windows(*slow))
    store.begin_watch("job", "collect")
    if ends:
        store.end_watch("job", "ended with exit code 0")
    assert only(run_of_job(store, "job")).state is state


def test_a_slow_rank_that_a_restart_moves_is_slow_at_two_places(tmp_path: Path, clock: list[float]) -> None:
    """Rank 3 loses 60 ms a step on node-0001, then 30 ms on node-0003, and node-0001 has another rank."""
    written, beside = WrittenRun(tmp_path / "run", 4, per_host=2), Beside(tmp_path, clock)
    beside.look()
    written.run(range(11), slow={3: 2.0})
    beside.look()
    restarted = WrittenRun(tmp_path / "run", 4, attempt=1, per_host=1)
    restarted._now_ms = written._now_ms + 1000
    restarted.run(range(11, 22), slow={3: 1.5})
    beside.look()
    old, new = run_of_job(beside.store, "job").alarming
    assert (old.hosts, old.state, new.hosts, new.state) == (("node-0001",), State.OVER, ("node-0003",), State.OPEN)
    accused = accused_of_run(beside.store, "job")
    assert accused is not None
    assert [(one.rank, one.host) for one in accused.culprits] == [(3, "node-0001"), (3, "node-0003")]
    assert "rank 3 on node-0003 cost " in run("whatif", "--store", beside.store.path, "--job", "job").out


def test_a_fault_that_comes_and_goes_is_one_cause_from_its_first_step_to_its_last(tmp_path: Path) -> None:
    found = verdict(tmp_path, windows(False, True, False, True, False, True))
    cause = only(found)
    assert (cause.first_step, cause.last_step, cause.windows, cause.clear_windows) == (6, 30, 3, 2)
    assert ", steps 6 to 30 in 3 of 5 windows, from " in run_sentence(found)
    assert cause.lost_s == pytest.approx(15 * LOST_S)


def test_what_a_run_lost_sums_to_its_bill(tmp_path: Path) -> None:
    """Of a job that was restarted: what its causes cost in steps that it did again is lost work on the bill."""
    traces = windows(False, True, False)
    again = window(healthy_frame(range(9, 14)), 1000.0, HEALTHY_STEP_S, attempt=1)
    store = stored(tmp_path, [*traces, again])
    found, bill = run_of_job(store, "job"), bill_of_store(store)
    by_cause = dict(bill.rows.group_by("cause").agg(pl.col("gpu_hours").sum()).iter_rows())
    cause = only(found)
    assert cause.redone_s == pytest.approx(2 * LOST_S)  # steps 9 and 10
    assert (cause.lost_s - cause.redone_s) * 4 / 3600 == pytest.approx(by_cause["bad-worker"])
    assert found.gpu_hours_lost == pytest.approx(sum(one.gpu_hours_lost for one in found.causes))
    assert found.lost_s == pytest.approx(sum(one.lost_s for one in found.causes))
    assert by_cause["lost work"] >= cause.redone_s * 4 / 3600


def test_a_run_says_how_much_of_it_the_verdict_covers(tmp_path: Path) -> None:
    """Of four windows one was not analysed, and the job stood still for as long as a healthy one takes."""
    traces = windows(True, False, False)
    late = window(healthy_frame(range(21, 26)), 5 * SLOW_STEP_S + 15 * HEALTHY_STEP_S, HEALTHY_STEP_S)
    found = verdict(tmp_path, [*traces, late], analysed=[0, 2, 3])
    # The last step of a window that was not analysed ends where it begins.
    wall_s = 5 * SLOW_STEP_S + 20 * HEALTHY_STEP_S
    assert found.covered_share == pytest.approx((5 * SLOW_STEP_S + 10 * HEALTHY_STEP_S) / wall_s)
    assert found.lost_share == pytest.approx(5 * LOST_S / wall_s)


def test_a_note_in_whose_words_a_clock_occurs_is_not_about_the_clocks_of_windows(tmp_path: Path) -> None:
    """One of two windows is not analysed; the name of the job has the word in it, and so has the note."""
    store, (slow, unanalysed) = Store(tmp_path / "jobs.store"), windows(True, False)
    store.append(Incoming(slow, "overclocked", "handmade", findings_of(slow)))
    store.append(Incoming(unanalysed, "overclocked", "handmade", None))
    verdict = run_of_job(store, "overclocked")
    assert verdict.notes == ("overclocked: window 1 is one of the windows that are not analysed",)
    assert (verdict.coverage_note, "overclocked" in coverage_words(verdict)) == (None, False)


def jumping(jumps_s: Sequence[float], slow: int) -> list[Trace]:
    """Windows of four steps, of which one is slow; the clock of each is ahead by so many seconds."""
    traces, start_s = list[Trace](), 0.0
    for number, ahead_s in enumerate(jumps_s):
        make, step_s = (slow_frame, SLOW_STEP_S) if number == slow else (healthy_frame, HEALTHY_STEP_S)
        traces.append(window(make(range(1 + 4 * number, 5 + 4 * number)), start_s + ahead_s, step_s))
        start_s += 4 * step_s
    return traces


DAY_S = 86_400.0


@pytest.mark.parametrize(
    "jumps_s",
    [
        (0.0, 0.0, DAY_S, 0.0, 0.0),  # one window a day ahead
        (0.0, 0.0, -500.0, 0.0, 0.0),  # or back
        (DAY_S, 0.0, 0.0, 0.0, 0.0),
        (0.0, 0.0, 0.0, 0.0, -500.0),
        (0.0, 0.0, 0.0, -500.0, -500.0),  # back from a window on
    ],
)
def test_windows_whose_clocks_disagree_are_placed_by_their_steps(jumps_s: tuple[float, ...], tmp_path: Path) -> None:
    """Whatever the clocks say, four of 20 steps are slow, and nothing lies between the windows."""
    found = verdict(tmp_path, jumping(jumps_s, slow=2))
    wall_s = 16 * HEALTHY_STEP_S + 4 * SLOW_STEP_S
    assert (found.wall_s, found.covered_share) == (pytest.approx(wall_s), pytest.approx(1.0))
    cause = only(found)
    assert (cause.first_step, cause.last_step, cause.lost_s) == (9, 12, pytest.approx(4 * LOST_S))
    assert cause.lost_share == pytest.approx(4 * LOST_S / wall_s)
    began_s = EPOCH_S + 8 * HEALTHY_STEP_S
    assert cause.since == (pytest.approx(began_s) if jumps_s[2] == 0 else None)
    (note,) = found.notes
    wrong = [number for number, ahead_s in enumerate(jumps_s) if ahead_s]
    assert note.startswith(f"job: {ranks_text(wrong, name='window')}: the clock contradicts")
    assert coverage_words(found) == note


def test_a_gap_that_no_clock_contradicts_counts_and_the_sentence_has_the_share_of_the_steps(tmp_path: Path) -> None:
    """The job may have stood still for the day that lies before its last windows."""
    found = verdict(tmp_path, jumping((0.0, 0.0, DAY_S, DAY_S), slow=2))
    steps_s = 12 * HEALTHY_STEP_S + 4 * SLOW_STEP_S
    assert (found.wall_s, found.covered_share) == (
        pytest.approx(steps_s + DAY_S),
        pytest.approx(steps_s / (steps_s + DAY_S)),
    )
    words = run_sentence(found)
    assert words.startswith(
        f"rank {SLOW_RANK} cost 0.0% of the run ({4 * LOST_S / steps_s:.1%} of its recorded steps), "
    )


def test_a_clock_ahead_of_that_of_the_store_gives_no_times(tmp_path: Path) -> None:
    """The last window says that it ran a day after it was stored."""
    ahead_s = time.time() - EPOCH_S + DAY_S
    found = verdict(tmp_path, jumping((0.0, 0.0, ahead_s), slow=2))
    assert found.wall_s == pytest.approx(8 * HEALTHY_STEP_S + 4 * SLOW_STEP_S)
    assert only(found).since is None


def test_a_run_starts_up_from_its_watch_to_its_first_window() -> None:
    """Watched from 100 s on; the window was stored at 150 s, and ended by then where its clock is ahead."""
    row = {"began_s": 100.0, "added_s": 150.0}
    seconds = ((120.0, 10.0, 20.0), (90.0, 10.0, 0.0), (200.0, 10.0, 40.0), (200.0, 80.0, 0.0))
    for begins_s, length_s, expected_s in seconds:
        assert _start_up_s(row, begins_s, length_s) == expected_s
    assert _start_up_s({**row, "began_s": None}, 120.0, 10.0) == 0.0


def test_a_watch_by_another_clock_adds_no_time_to_the_run(tmp_path: Path) -> None:
    """The windows are of 2023, the watch of today: between them, nobody recorded anything."""
    store = stored(tmp_path, windows(True, False))
    store.begin_watch("job", "collect")
    store.end_watch("job", "ended with exit code 0")
    found = run_of_job(store, "job")
    assert 0 <= found.wall_s - 5 * (HEALTHY_STEP_S + SLOW_STEP_S) < 60
    assert only(found).lost_share == pytest.approx(5 * LOST_S / found.wall_s)


def test_a_range_is_judged_by_its_windows_and_is_over_as_the_run_says(tmp_path: Path) -> None:
    """Of six windows, two of the range are slow; after it the fault goes on, so it is open."""
    store = stored(tmp_path, windows(False, True, True, False, True, True))
    begins_s = EPOCH_S + 5 * HEALTHY_STEP_S + 5 * SLOW_STEP_S
    account = account_of(store, "job")
    found = run_of(account.between(begins_s + 1, begins_s + 5 * SLOW_STEP_S + 1))
    assert (found.windows, found.of_windows, found.first_step, found.last_step) == (2, 6, 11, 20)
    wall_s = 5 * SLOW_STEP_S + 5 * HEALTHY_STEP_S
    cause = only(found)
    assert (cause.first_step, cause.last_step, cause.state) == (11, 15, State.OPEN)
    assert (found.wall_s, cause.lost_share) == (pytest.approx(wall_s), pytest.approx(5 * LOST_S / wall_s))
    assert run_sentence(found).startswith(f"rank {SLOW_RANK} cost {5 * LOST_S / wall_s:.1%} of the chosen range, steps")
    assert coverage_words(found) == "2 of 6 windows, steps 11 to 20"
    assert account.between(0, EPOCH_S - 1e6) is account


def test_windows_without_times_have_steps_and_no_moments(tmp_path: Path) -> None:
    cause = only(verdict(tmp_path, [window(slow_frame(range(4)), None, 0.0)]))
    assert (cause.first_step, cause.last_step, cause.since, cause.until) == (0, 3, None, None)
    assert cause.lost_share == pytest.approx(LOST_S / SLOW_STEP_S)


def test_another_job_of_the_store_is_not_in_it(tmp_path: Path) -> None:
    store = stored(tmp_path, windows(False, False))
    (other,) = windows(True)
    store.append(Incoming(other, "other", "handmade", None))
    assert run_of_job(store, "job").alarming == ()


def test_a_store_of_the_version_before_names_repair_which_brings_its_windows_up_to_date(tmp_path: Path) -> None:
    """Its first writer says it once, and does not analyse old windows: their number is not bounded."""
    store = stored(tmp_path, windows(False, True, False))
    before = run_of_job(store, "job")
    as_version_6(store)
    outdated = (
        f"{store.path}: reports on 3 windows are of another version of tracekit; `tracekit store repair --store"
        f" {store.path}` makes them anew\n"
    )
    assert run("import", "sample_traces/slow_worker.parquet", "--store", store.path).err.count(outdated) == 1
    with store.reading() as catalogue:
        assert (catalogue.older, {job for job, _ in catalogue.live.costs()}) == (False, {"slow-worker"})
    of_old = run_of_job(store, "job")
    assert (of_old.causes, of_old.recorded_s) == ([], 0.0)
    assert "tracekit store repair" in coverage_words(of_old)
    sql = run("store", "sql", "SELECT DISTINCT job FROM losses", "--store", store.path, "--csv")
    assert (sql.out.split(), sql.err) == (["job", "slow-worker"], f"`losses` is not complete: {outdated}")
    checked = run("store", "check", "--store", store.path)
    assert (checked.code, checked.out) == (3, f"{store.path}: all files are whole\n{outdated}")
    repaired = run("store", "repair", "--store", store.path)
    assert (repaired.out.count("made anew"), outdated in repaired.err) == (3, False)
    assert run("store", "check", "--store", store.path).code == 0
    assert run_of_job(store, "job") == before


def test_a_repair_of_an_older_store_that_ends_early_goes_on_with_the_next(tmp_path: Path) -> None:
    """Windows that are renewed stay so, and another writer comes between two analyses."""
    store = stored(tmp_path, windows(False, True, False))
    before = run_of_job(store, "job")
    as_version_6(store)
    analysed = list[int]()

    def analyse(trace: Any) -> Findings | Unanalysed:
        analysed.append(len(store.jobs()))
        if len(analysed) == 3:
            raise KeyboardInterrupt
        store.append(Incoming(trace, f"between {len(analysed)}", "handmade", None))
        return findings_of(trace)

    with pytest.raises(KeyboardInterrupt):
        repair(store, analyse)
    assert [store.report("job", number) is None for number in range(3)] == [False, False, True]
    assert repair(store, findings_of) == ["job, window 2: its report was made anew from its ops"]
    assert (run_of_job(store, "job"), analysed) == (before, [1, 2, 3])


@pytest.mark.slow
def test_whatif_of_a_store_tells_the_run_and_of_a_window_what_others_name(tmp_path: Path) -> None:
    """The newest of five windows is healthy, and 10 of 25 steps were slow."""
    store = stored(tmp_path, windows(False, True, True, False, False))
    share = 10 * LOST_S / (15 * HEALTHY_STEP_S + 10 * SLOW_STEP_S)
    named = ("--store", store.path, "--job", "job")
    told = json.loads(run("whatif", *named, "--json").out)["run"]
    assert {"first_step", "last_step", "windows", "covered_share", "recorded_s", "lost_s", "lost_share"} < set(told)
    (cause,) = told["causes"]
    assert (cause["kind"], cause["cause"], cause["ranks"]) == ("straggler", "bad-worker", [SLOW_RANK])
    assert (cause["first_step"], cause["last_step"], cause["state"]) == (6, 15, "over")
    assert cause["lost_share"] == pytest.approx(share)
    words = f"STRAGGLER: rank {SLOW_RANK} cost {share:.1%} of the run, steps 6 to 15"
    assert words in run("whatif", *named).out
    assert f"**{words}" in run("whatif", *named, "--markdown", "-").out
    of_window = run("whatif", *named, "--window", "4", "--json").out
    assert "run" not in json.loads(of_window)
    assert f"2 other windows name rank {SLOW_RANK}, steps 6 to 15" in run("whatif", *named, "--window", "4").out
    assert f"1 other window names rank {SLOW_RANK}, steps 6 to 15" in run("whatif", *named, "--window", "1").out


def test_the_culprits_of_a_run_are_the_ranks_of_its_causes(tmp_path: Path) -> None:
    store = stored(tmp_path, windows(False, True, False, False))
    named = ("culprits", "--store", store.path, "--job", "job")
    (culprit,) = json.loads(run(*named, "--suspects", "--format", "json").out)["culprits"]
    assert (culprit["rank"], culprit["first_step"]) == (SLOW_RANK, 6)
    assert culprit["cost_s"] == pytest.approx(5 * LOST_S / 20)
    newest = run(*named, "--window", "3")
    assert (newest.code, newest.out) == (ExitCode.NO_ANSWER, "")


def test_who_is_slow_since_an_earlier_window_is_told_since_then(tmp_path: Path) -> None:
    """Slow from step 6 on, whose window began after five healthy steps: the newest window shows it from its start."""
    store = stored(tmp_path, windows(False, True, True))
    began = datetime.fromtimestamp(EPOCH_S + 5 * HEALTHY_STEP_S, UTC)
    since = f"; since step 6, {began:%Y-%m-%d %H:%M:%S} UTC"
    out = run("whatif", "--store", store.path, "--job", "job", env={"COLUMNS": "200"}).out
    (who,) = [line for line in out.splitlines() if line.startswith("Who")]
    assert who.startswith(f"Who    rank {SLOW_RANK}")
    assert who.endswith(since)
    (incident,) = store.incidents("job")
    assert since == f"; since {since_words(incident, utc)}"
    of_window = run("whatif", "--store", store.path, "--job", "job", "--window", "2", env={"COLUMNS": "200"}).out
    assert "since step" not in of_window.partition("\nRun")[0]


def test_an_agent_gets_the_run_and_its_culprits(tmp_path: Path) -> None:
    store = stored(tmp_path, windows(False, True, False, False))
    (cause,) = why_slow(str(store.path))["run"]["causes"]
    assert (list(cause["ranks"]), cause["first_step"], cause["state"]) == ([SLOW_RANK], 6, "over")
    assert [culprit["rank"] for culprit in who(str(store.path), "job")["culprits"]] == [SLOW_RANK]


@pytest.mark.slow
def test_a_redacted_report_names_no_host_of_the_run(tmp_path: Path) -> None:
    write_watched(tmp_path / "live.store")
    shown = run("whatif", "--store", tmp_path / "live.store", "--job", "over", "--json", "--redact").out
    assert json.loads(shown)["run"]["causes"][0]["ranks"] == [3]
    assert "node-d" not in shown


def test_a_damaged_report_takes_advice_away(tmp_path: Path) -> None:
    store = stored(tmp_path, windows(False, True, False))
    (store.path / "jobs" / "1" / "1.report.json").write_text("{")
    (cause,) = json.loads(run("whatif", "--store", store.path, "--job", "job", "--json").out)["run"]["causes"]
    assert (cause["ranks"], cause["do"]) == ([SLOW_RANK], None)


#: 2023-11-14 22:13:20 UTC.
BEGAN = 1_700_000_000.0


def run_cause(**more: Any) -> RunCause:
    """Rank 1 on a, 90 of 600 s; in three windows from step 40 to 66, for 560 s; it goes on."""
    usual = RunCause(
        kind=LossKind.STRAGGLER, cause="bad-worker", ranks=(1,), hosts=("a",), lost_s=90.0, lost_share=0.15,
        gpu_hours_lost=0.1, first_step=40, last_step=66, since=BEGAN, until=BEGAN + 560, state=State.OPEN, windows=3,
        worst_window=2, worst_share=0.25, redone_s=0.0, do="Check rank 1",
    )  # fmt: skip
    return structs.replace(usual, **more)


def verdict_on(*causes: RunCause, **more: Any) -> RunVerdict:
    """Eight windows of 600 s, of which 120 s are lost."""
    usual = RunVerdict(
        first_step=0, last_step=99, windows=8, wall_s=600.0, covered_share=0.95, recorded_s=570.0, lost_s=120.0,
        lost_share=0.2, gpu_hours_lost=0.5, causes=causes, ended=None, notes=(),
    )  # fmt: skip
    return structs.replace(usual, **more)


def test_a_cause_is_told_with_its_cost_its_steps_and_its_time() -> None:
    def told(cause: RunCause, *others: RunCause, **more: Any) -> str:
        return cause_sentence(cause, UTC, verdict_on(cause, *others, **more))

    clock = "from 22:13:20 to 22:22:40 UTC"
    usual = f"rank 1 on a cost 15.0% of the run, steps 40 to 66, {clock}; it goes on"
    assert told(run_cause()) == usual
    assert told(run_cause(state=State.OVER), windows=1) == usual.removesuffix("; it goes on")
    assert told(run_cause(state=State.OVER)).endswith("; it is over")
    assert told(run_cause(state=State.ENDED)).endswith("; it lasted until the job ended")
    assert "15.0% of the chosen range, steps" in told(run_cause(), of_windows=20)
    sparse = told(run_cause(), covered_share=0.49, recorded_s=180.0)
    assert "cost 15.0% of the run (50.0% of its recorded steps), steps 40" in sparse
    assert "recorded steps" not in told(run_cause(), covered_share=0.5, recorded_s=180.0)
    assert told(run_cause(), wall_s=0.0).startswith("rank 1 on a cost 0.0% of the run")
    assert told(run_cause(), run_cause(cause="python-gc")).startswith("rank 1 on a, slow rank, cost 15.0%")
    assert told(run_cause(hosts=("a", "b"), ranks=(1, 2))).startswith("ranks 1-2 cost 15.0%")
    assert told(run_cause(ranks=(), cause="unexplained")).startswith("straggler losses without a known cause cost")
    assert told(run_cause(ranks=(), kind=LossKind.ENGINES, cause="engines")).startswith("engines cost 15.0% of the run")
    comes = told(run_cause(clear_windows=2, first_step=40, last_step=40))
    assert f"of the run, step 40 in 3 of 5 windows, {clock}" in comes
    assert told(run_cause(since=None, last_step=None)) == "rank 1 on a cost 15.0% of the run; it goes on"
    assert "from 22:13 to 22:23 UTC" in told(run_cause(until=BEGAN + 600))
    assert "from 2023-11-14 22:13 to 2023-11-15 22:13 UTC" in told(run_cause(until=BEGAN + 86_400))


def test_what_else_is_said_of_a_run_and_what_to_do_about_it() -> None:
    """Of further causes, three that cost 0.5 % of the run or more."""
    others = [run_cause(ranks=(rank,), hosts=(), lost_share=share)
              for rank, share in ((2, 0.1), (3, 0.005), (4, 0.004), (5, 0.01), (6, 0.01))]  # fmt: skip
    small = run_cause(ranks=(9,), worst_share=0.04)
    step = {"slowdown": None, "recorded_s": 1.0, "original_s": 1.0, "ideal_s": 1.0, "lost_s": 0.0}
    run = verdict_on(
        run_cause(),
        small,
        *others,
        notes=("the clock of a", "other"),
        coverage_note="the clock of a",
        covered_share=0.89,
    )
    report = structs.replace(report_with(by_step=[step | {"step": number} for number in (98, 99)]), run=run)
    rows = [(name, words.partition(" cost")[0]) for name, words in run_rows(report)]
    assert rows == [
        ("Then", "rank 2"), ("", "rank 3"), ("", "rank 5"),
        ("Lost", "0.5 GPU-hours in all, 20.0% of the run; `tracekit bill` has every hour"),
        ("Do", "Check rank 1"),
        ("Covers", "89% of 600.00 s: the rest, such as the start, is in no analysed window; the clock of a"),
        ("Now", "steps 98 to 99: balanced: "),
    ]  # fmt: skip
    assert not [*run_rows(structs.replace(report, run=verdict_on(windows=1)))]
    assert [name for name, _ in run_rows(structs.replace(report, run=verdict_on(lost_s=0.0)))] == ["Now"]
    assert coverage_words(verdict_on(of_windows=20)) == "8 of 20 windows, steps 0 to 99"
    states = ((State.OPEN, None), (State.OVER, None), (State.OVER, "done"), (State.ENDED, "done"))
    assert [run_advice(verdict_on(run_cause(state=state), ended=ended), report) for state, ended in states] == [
        "Check rank 1", "should it come back: check rank 1", "before the next run: check rank 1",
        "before the next run: check rank 1",
    ]  # fmt: skip
    assert run_advice(verdict_on(run_cause(do=None)), report) is None
    assert run_advice(verdict_on(), report) is None
    assert elsewhere_words(verdict_on(run_cause(), run_cause(ranks=(), cause="python-gc", windows=1)), report) == (
        "3 other windows name rank 1 on a, steps 40 to 66; 1 other window names"
        f" {kind_words('python-gc')}, steps 40 to 66"
    )
    assert run_sentence(verdict_on(small)) == "nothing costs 5% of any window; 20.0% of the run is lost in all"
    assert [run_kind(verdict_on(*causes)) for causes in ((), (small,), (run_cause(),))] == [
        LossKind.BALANCED, LossKind.BALANCED, LossKind.STRAGGLER]  # fmt: skip
    headline = run_headline(report, UTC)
    assert headline is not None
    assert (headline.badge, headline.tone) == ("straggler, 20.0% of the run lost", Tone.BAD)
    assert headline.sentence.startswith("Rank 1 on a cost 15.0% of the run, ")
    assert headline.sentence.endswith("; it goes on.")
    tones = [run_headline(structs.replace(report, run=verdict_on(*causes)), UTC).tone
             for causes in ((), (run_cause(state=State.OVER),))]  # fmt: skip
    assert tones == [Tone.GOOD, Tone.UNSURE]
    assert run_headline(structs.replace(report, run=verdict_on(recorded_s=0.0)), UTC) is None


def test_the_leading_cause_of_the_newest_window_says_since_when_it_acts_on_the_run() -> None:
    """Its window begins with step 50, the cause with step 40; one that begins in the window says nothing."""
    leading = CauseInWords("bad-worker", None, "", "", "", "", None, (1,), ("a",), (), 1.0, 0.2, 0.9, None, None)
    step = {"step": 50, "slowdown": None, "recorded_s": 1.0, "original_s": 1.0, "ideal_s": 1.0, "lost_s": 0.0}
    report = report_with(by_step=[step], answer={"accounts": [to_builtins(leading)]})

    def said(*causes: RunCause, **more: Any) -> str:
        return since_of_run(structs.replace(report, run=verdict_on(*causes, **more)))

    assert said(run_cause()) == "; since step 40, 2023-11-14 22:13:20 UTC"
    assert said(run_cause(ranks=(2,)), run_cause(since=None)) == "; since step 40"
    assert said(run_cause(first_step=49)).startswith("; since step 49,")
    silent = [(), (run_cause(ranks=(2,)),), (run_cause(first_step=50),), (run_cause(first_step=None),)]
    assert [said(*causes) for causes in silent] == [""] * 4
    assert said(run_cause(), windows=1) == ""
    # A cause of the newest window is in one other window less than it is in windows.
    assert elsewhere_words(verdict_on(run_cause(), run_cause(ranks=(2,), windows=1)), report) == (
        "2 other windows name rank 1 on a, steps 40 to 66; 1 other window names rank 2 on a, steps 40 to 66"
    )
    assert elsewhere_words(verdict_on(run_cause(windows=1)), report) is None
    assert run_advice(verdict_on(run_cause()), report) is None  # the report on the newest window has it
