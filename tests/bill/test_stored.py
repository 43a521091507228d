"""The bill of a store: of windows of jobs as they ran, and of traces that do not say when."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path

import polars as pl
import pytest
from msgspec import structs

from benchmarks.writtenrun import EPOCH_S
from tests.analysis.rl.logs import lines, write
from tests.bill.attempts import Attempt
from tests.handmade import (
    HEALTHY_LANE,
    HEALTHY_STEP_S,
    LAYOUT,
    SLOW_STEP_S,
    frame,
    healthy_frame,
    run,
    slow_frame,
)
from tests.live.beside import Beside
from tests.older_stores import as_version_6
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.bill.account import BilledWindow, bill_of_store
from tracekit.bill.placement import Stretch
from tracekit.costs import BillPart, ClaimedCosts
from tracekit.report.findings import Findings, Unanalysed
from tracekit.store import Incoming, Store
from tracekit.trace.canonical import Trace

#: Every worker writes a checkpoint of 3 s at the end of a step.
SAVING_LANE = (*HEALTHY_LANE, *((stage, "checkpoint", 0, None, 11.25, 14.25) for stage in (0, 1)))
SAVING_STEP_S = HEALTHY_STEP_S + 3
_FINDINGS: dict[tuple[object, ...], Findings | Unanalysed] = {}


def seconds(store: Store) -> dict[tuple[str, str], float]:
    """The bill by part and cause; it adds up to the wall clock and is never negative."""
    bill = bill_of_store(store)
    assert min(bill.rows["seconds"]) > 0
    assert bill.rows["seconds"].sum() == pytest.approx(sum(bill.wall_s.values()), rel=1e-9)
    totals = bill.rows.group_by("part", "cause").agg(pl.col("seconds").sum())
    return {(part, cause): round(value, 6) for part, cause, value in totals.iter_rows()}


def window(ops: pl.DataFrame, start_s: float | None, step_s: float, attempt: int = 0) -> Trace:
    """Steps of `step_s`, one after the other from `start_s` on."""
    steps = sorted(ops["step"].unique())
    starts = {} if start_s is None else {step: EPOCH_S + start_s + at * step_s for at, step in enumerate(steps)}
    return Trace.from_frame(ops, LAYOUT, name="job", step_starts=starts, metadata={"attempt": attempt, "team": "llm"})


def findings_once(trace: Trace) -> Findings | Unanalysed:
    """What a store keeps of the analysis of a window: tests share most windows, and analysing them takes longest."""
    key = (trace.ops.hash_rows().sum(), *trace.step_starts.items(), str(trace.metadata))
    if key not in _FINDINGS:
        _FINDINGS[key] = PipelineJob(trace).stored()
    return _FINDINGS[key]


def stored(folder: Path, traces: Iterable[Trace], analysed: Collection[int] = range(9)) -> Store:
    folder.mkdir(exist_ok=True)
    store = Store(folder / "jobs.store")
    for number, trace in enumerate(traces):
        findings = findings_once(trace) if number in analysed else None
        store.append(Incoming(trace, "job", "handmade", findings))
    return store


def test_windows_of_a_restarted_job_whose_script_numbers_its_steps(tmp_path: Path) -> None:
    """Five healthy steps, five slow ones of which the restart does the last two again, and five healthy ones.

    Stage 0 of DP rank 1 costs 15.5 - 11.25 s of a slow step (as fast as its peers), the step after the third is 100 s
    away.
    """
    slow_from, again_from = 5 * HEALTHY_STEP_S, 5 * (HEALTHY_STEP_S + SLOW_STEP_S) + 100
    store = stored(
        tmp_path,
        [
            window(healthy_frame(range(1, 6)), 0.0, HEALTHY_STEP_S),
            window(slow_frame(range(6, 11)), slow_from, SLOW_STEP_S),
            window(healthy_frame(range(9, 14)), again_from, HEALTHY_STEP_S, attempt=1),
        ],
    )
    assert seconds(store) == {
        ("useful", "training"): round(10 * HEALTHY_STEP_S + 3 * HEALTHY_STEP_S, 6),
        ("stragglers", "bad-worker"): round(3 * (SLOW_STEP_S - HEALTHY_STEP_S), 6),
        ("restarts", "lost work"): 2 * SLOW_STEP_S,
        ("restarts", "down and starting again"): 100.0,
    }
    assert set(bill_of_store(store).rows["team"]) == {"llm"}


@pytest.mark.slow
def test_the_last_checkpoint_before_a_restart_says_which_windows_are_lost(tmp_path: Path) -> None:
    """Windows before that with the checkpoint are kept, those after it lost; where it is in its own is not known."""
    saving = frame({0: SAVING_LANE, 1: SAVING_LANE}, range(6, 11))
    starts = (0.0, 5 * HEALTHY_STEP_S, 5 * (HEALTHY_STEP_S + SAVING_STEP_S))
    traces = [
        window(healthy_frame(range(1, 6)), starts[0], HEALTHY_STEP_S),
        window(saving, starts[1], SAVING_STEP_S),
        window(healthy_frame(range(11, 16)), starts[2], HEALTHY_STEP_S),
        window(healthy_frame(range(1, 6)), starts[2] + 5 * HEALTHY_STEP_S + 60, HEALTHY_STEP_S, attempt=1),
    ]
    assert seconds(stored(tmp_path, traces)) == {
        ("useful", "training"): 10 * HEALTHY_STEP_S,
        ("unknown", "kept or lost: no checkpoint shows it"): 5 * SAVING_STEP_S,
        ("restarts", "lost work"): 5 * HEALTHY_STEP_S,
        ("restarts", "down and starting again"): 60.0,
    }
    assert seconds(stored(tmp_path / "whole", traces[:3])) == {
        ("useful", "training"): 15 * HEALTHY_STEP_S,
        ("checkpoints", "checkpoint-stalls"): 15.0,
    }


def test_what_windows_do_not_show_is_unknown(tmp_path: Path) -> None:
    """Every second step, 20 s between two windows, and one that was not analysed: it lasts up to its last step."""
    every_second = healthy_frame([1, 3, 5, 7])
    traces = [
        window(every_second, 0.0, 2 * HEALTHY_STEP_S),
        window(healthy_frame(range(8, 12)), 7 * HEALTHY_STEP_S + 20, HEALTHY_STEP_S),
    ]
    assert seconds(stored(tmp_path, traces, analysed=[0])) == {
        ("useful", "training"): 4 * HEALTHY_STEP_S,
        ("unknown", "between recorded steps"): 3 * HEALTHY_STEP_S,
        ("unknown", "between windows"): 20.0,
        ("unknown", "windows that are not analysed"): 3 * HEALTHY_STEP_S,
    }


def test_a_job_of_an_older_store_is_unknown_until_its_windows_are_analysed_again(tmp_path: Path) -> None:
    """Also one whose report is gone, and its bill is that of today afterwards; what has no ops stays unknown."""
    traces = [window(healthy_frame(range(4)), None, 0.0), window(slow_frame(range(4, 8)), None, 0.0)]
    store = stored(tmp_path, traces)
    before = seconds(store)
    as_version_6(store)
    (store.path / "jobs" / "1" / "1.report.json").unlink()
    assert set(seconds(store)) == {("unknown", "windows without a report of this version")}
    repair = f"tracekit store repair --store {store.path}"
    note = "job: window 0 is one of the windows without a report of this version"
    assert bill_of_store(store).notes == (f"{note}; `{repair}` makes reports anew from ops that are still there",)
    assert run("store", "repair", "--store", store.path).code == 0
    assert (seconds(store), bill_of_store(store).notes) == (before, ())


def test_a_trace_without_times_is_billed_in_no_week(tmp_path: Path) -> None:
    store = stored(tmp_path, [window(healthy_frame(range(4)), None, 0.0)])
    assert seconds(store) == {("useful", "training"): 4 * HEALTHY_STEP_S}
    shown = json.loads(run("bill", store.path, "--json", "--gpu-hour", "2").out)
    assert [(row["week"], row["gpu_hours"]) for row in shown["rows"]] == [(None, pytest.approx(4 * 45 / 3600))]
    assert shown["bill_version"] == 1
    assert shown["gpu_hour"] == 2


def test_a_trace_on_a_clock_without_a_date_is_billed_in_no_week(tmp_path: Path) -> None:
    """Its first step begins at 0 of that clock, which is no Thursday of 1970."""
    store = stored(tmp_path, [window(healthy_frame(range(4)), -EPOCH_S, HEALTHY_STEP_S)])
    rows = json.loads(run("bill", store.path, "--json").out)["rows"]
    assert {row["week"] for row in rows} == {None}


def test_windows_whose_clock_goes_back_are_billed_by_their_steps_and_named(tmp_path: Path) -> None:
    traces = [
        window(healthy_frame(range(1, 5)), 1000.0, HEALTHY_STEP_S),
        window(healthy_frame(range(5, 9)), 0.0, HEALTHY_STEP_S),
    ]
    store = stored(tmp_path, traces)
    assert seconds(store) == {("useful", "training"): 8 * HEALTHY_STEP_S}
    (note,) = bill_of_store(store).notes
    assert note.startswith("job: window 0: the clock contradicts that of other windows")


def test_a_job_that_was_watched_begins_with_its_watch(tmp_path: Path, clock: list[float]) -> None:
    """Whatever its first window shows: the command had started before."""
    beside = Beside(tmp_path, clock)
    one = Attempt(tmp_path / "run", begins_s=0.0)
    for number in range(11):
        one.step(number, number, number + 1.0)
    beside.look()
    one.end(0)
    beside.run.finish()
    found = seconds(beside.store)
    assert found["useful", "training"] == pytest.approx(10, abs=0.01)
    assert found.get(("unknown", "after the last window"), 0.0) < 60  # the recording is of 2023, the watch of today


def test_post_training_is_billed_by_its_losses_and_what_is_in_no_phase(tmp_path: Path) -> None:
    """Four steps, of which two count, of 11 s: a reward of 0.5 s and a sync of 1 s. Three of a log of 100 s: 30 s in no
    phase, a sync of 10 s. A run of two phases of 60 s in a step of 100 s is not trusted.
    """
    store = Store(tmp_path / "jobs.store")
    write(tmp_path / "timed", lines())
    for name, timers in (("logged", "gen:60 - timing_s/update_weights:10"), ("wrong", "gen:60 - timing_s/ref:60")):
        steps = (f"step:{step} - timing_s/{timers} - timing_s/step:100\n" for step in range(3))
        (tmp_path / name).write_text("".join(steps))
    for name in ("timed", "logged", "wrong"):
        assert run("import", tmp_path / name, "--store", store.path).code == 0
    assert seconds(store) == {
        ("useful", "generation"): 4 * 5.5,
        ("unknown", "phases: the log shows no compute"): 4 * 4.0 + 3 * 60,
        ("post-training", "reward"): 4 * 0.5,
        ("post-training", "sync"): 4 * 1.0 + 3 * 10,
        ("unknown", "in no phase"): 3 * 30.0,
        ("unknown", "analysis not trusted"): 3 * 100.0,
    }


def test_a_store_without_windows_is_one_clear_line(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    store.begin_watch("job", "torchrun")
    ran = run("bill", store.path)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.endswith("no job has a window yet, so there is nothing to bill\n")


def test_a_bill_opens_with_what_cost_most_since_when_and_the_bill_without_it(tmp_path: Path) -> None:
    """Five healthy steps and five slow ones, of which stage 0 of DP rank 1 costs 4.25 s each: 4 GPUs."""
    traces = [
        window(healthy_frame(range(1, 6)), 0.0, HEALTHY_STEP_S),
        window(slow_frame(range(6, 11)), 5 * HEALTHY_STEP_S, SLOW_STEP_S),
    ]
    store = stored(tmp_path, traces)
    head, worst, without, *_, last = run("bill", store.path, "--gpu-hour", "2", env={"COLUMNS": "200"}).out.splitlines()
    assert head == "84% of 0.149 GPU-hours were useful; the largest other part is stragglers, 16%"
    assert worst.startswith("Worst    rank 1 cost 15.9% of the run, steps 6 to 10, from 22:14:16 to 22:15:33 UTC; ")
    assert without == "Without  0.149 to 0.125 GPU-hours, 0.05 less at 2 a GPU-hour; 84% to 100% useful"
    assert last == f"Next   tracekit whatif --store {store.path} --job job"


def test_a_bill_of_several_jobs_names_the_one_that_lost_most(tmp_path: Path) -> None:
    store = stored(tmp_path, [window(healthy_frame(range(4)), None, 0.0)])
    other = window(slow_frame(range(4)), None, 0.0)
    store.append(Incoming(other, "other", "handmade", PipelineJob(other).stored()))
    shown = run("bill", store.path, "--by", "team").out
    assert "Worst    other: rank 1 cost 27.4% of the run, steps 0 to 3\n" in shown
    assert shown.endswith("--job other\n")


def test_rows_of_no_team_and_no_week_say_so(tmp_path: Path) -> None:
    trace = Trace.from_frame(healthy_frame(range(4)), LAYOUT, name="job")
    store = stored(tmp_path, [trace])
    assert "\n no team " in run("bill", store.path, "--by", "team").out
    assert "\n no date " in run("bill", store.path, "--by", "week").out


def test_what_a_window_of_an_account_tells_of_itself() -> None:
    """Four steps of 10 s, half a second of it a checkpoint; it ran from 100 to 130 s, when its last step began."""
    row = {"steps": 4, "first_step": 6, "last_step": 9, "recorded_s": 10.0, "started_at": 100.0, "ended_at": 130.0}
    trusted = ClaimedCosts(dict.fromkeys(BillPart, 0.0), (), (), 4)
    saving = structs.replace(trusted, planned={**trusted.planned, BillPart.CHECKPOINTS: 0.5})
    window_of = partial(BilledWindow, metadata={}, stretch=Stretch(0.0, 40.0, dated=True))
    saved, plain, unknown = (window_of(row=row, costs=costs) for costs in (saving, trusted, "not analysed"))
    assert [(each.saves, each.whole, each.judged_s) for each in (saved, plain, unknown)] == [
        (True, True, 40.0), (False, True, 40.0), (False, False, None)]  # fmt: skip
    gap = window_of(row=row | {"last_step": 10}, costs=structs.replace(trusted, doubt="clocks"))
    assert (gap.whole, gap.judged_s) == (False, None)
    spans = [(0.0, 99.0), (0.0, 100.0), (120.0, 125.0), (140.0, 200.0), (140.5, 200.0)]
    assert [plain.overlaps(*span) for span in spans] == [False, True, True, True, False]
    assert not window_of(row=row | {"started_at": None}, costs=trusted).overlaps(0.0, 1e9)
