"""`tracekit compare`: what changed between two runs, by hand and on one screen."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.handmade import LAYOUT, healthy_frame, run, slow_trace
from tracekit.base.errors import ExitCode
from tracekit.base.text import with_error
from tracekit.report.compare import verdict, whole
from tracekit.report.comparison import total_of
from tracekit.sources.load import load
from tracekit.store import Store
from tracekit.trace.canonical import Trace

SAMPLES = Path(__file__).parents[1] / "sample_traces"


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """A job of 15.5 s a step, and the same one healthy, 11.25 s."""
    slow_trace(range(5)).write_parquet(tmp_path / "slow.parquet")
    healthy = Trace.from_frame(healthy_frame(range(5)), LAYOUT, name="healthy job")
    healthy.write_parquet(tmp_path / "healthy.parquet")
    return tmp_path / "slow.parquet", tmp_path / "healthy.parquet"


def test_what_changed_is_said_in_figures_worked_out_by_hand(runs: tuple[Path, Path]) -> None:
    found = json.loads(run("compare", *runs, "--json").out)
    assert found["outcome"] == "better"
    assert (found["before"]["recorded_s"], found["after"]["recorded_s"]) == (15.5, 11.25)
    assert [found[side]["slowdown"] for side in ("before", "after")] == pytest.approx([15.5 / 13.5, 1])
    assert found["causes"]["new"] == []
    back = json.loads(run("compare", *reversed(runs), "--json").out)
    assert back["outcome"] == "worse"
    assert back["causes"]["new"] == [text.replace("(cost ", "(costs ") for text in found["causes"]["gone"]]


def test_the_dashboard_says_the_same(runs: tuple[Path, Path]) -> None:
    sides = [whole(path.stem, load(path).report) for path in runs]
    assert json.loads(run("compare", *runs, "--json").out)["sentence"] == verdict(*sides).sentence


@pytest.mark.parametrize("columns", [80, 120])
def test_one_screen_says_who_is_gone_and_what_to_type_next(tmp_path: Path, columns: int) -> None:
    jobs = [SAMPLES / "slow_worker.parquet", SAMPLES / "healthy.parquet"]
    ran = run("compare", *jobs, env={"COLUMNS": str(columns)})
    lines = ran.out.splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= columns for line in lines if not line.startswith("  tracekit"))
    text = " ".join(" ".join(lines).split())
    assert "BETTER: a recorded step takes 763.4 ms instead of 1.11 s, 343.8 ms (31.1%) less" in text
    assert "Gone rank 9 on host-0001: computes 80% slower than its peers (cost 343.4 ms a step)" in text
    assert "New no cause is new" in text
    assert "Cost B loses 0 of 384 GPU-hours a day; A lost 119 of 384" in text
    assert lines[-1] == f"  tracekit whatif {shlex.quote(str(jobs[1]))}"


def test_jobs_of_a_store_are_compared_by_name(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    store = tmp_path / "jobs"
    assert run("import", *runs, "--store", store).code == 0
    ran = run("compare", "slow job", "healthy job", "--store", store)
    assert ran.out.startswith("A  slow job   dp 2 x pp 2 on 4 GPUs, 5 steps")
    assert ran.out.endswith(f"  tracekit whatif --store {store} --job 'healthy job'\n")


def test_what_a_fix_gave_back_is_kept_with_what_was_expected(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    store = tmp_path / "jobs"
    assert run("import", *runs, "--store", store).code == 0
    stored = Store(store).report("slow job")
    assert stored is not None
    expected = next(fix for fix in stored.fixes if fix.kind == "replace-workers")
    asked = ("compare", "slow job", "healthy job", "--store", store, "--fix")
    fix = json.loads(run(*asked, "replace-workers", "--json").out)["fix"]
    assert (fix["expected_s"], fix["error_s"]) == (expected.saved_s, expected.error_s)
    assert (fix["got_s"], fix["before"], fix["after"]) == (4.25, "slow job", "healthy job")
    text = " ".join(run(*asked, expected.title[5:20].upper()).out.split())
    assert f"Fix {expected.title}: expected {with_error(expected.saved_s, expected.error_s)} less" in text
    assert "got 4.25 s less" in text
    (kept,) = Store(store).applied()  # the same fix between the same jobs, noted twice
    assert kept.got_gpu_hours_per_day == pytest.approx(expected.saved_gpu_hours_per_day * 4.25 / fix["expected_s"])
    assert total_of([kept, kept]).startswith("2 fixes gave back ")
    assert run("store", "repair", "--store", store).code == run("store", "check", "--store", store).code == 0
    assert Store(store).applied() == (kept,)


def test_a_fix_that_cannot_be_meant_is_an_error_and_nothing_is_kept(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    store = tmp_path / "jobs"
    wide = tmp_path / "wide.parquet"
    assert run("synth", "--dp", "2", "--pp", "4", "--steps", "4", "--name", "wide", "--out", wide).code == 0
    assert run("import", *runs, wide, "--store", store).code == 0
    for jobs, name, said in (
        (("slow job", "healthy job"), "nonsense", "--fix 'nonsense': no fix of A with a price; A has replace-workers"),
        (("slow job", "healthy job"), "e", "fixes of A; give a part of one title: "),
        (("slow job", "wide"), "replace-workers", "the layouts of A and B differ"),
        (("slow job", "slow job"), "replace-workers", "A and B are the same job"),
    ):
        ran = run("compare", *jobs, "--store", store, "--fix", name)
        assert ran.code == 2
        assert said in ran.message
    assert "give --store" in run("compare", *runs, "--fix", "replace-workers").message
    assert Store(store).applied() == ()


def test_a_job_beside_itself_shows_no_difference(runs: tuple[Path, Path]) -> None:
    found = json.loads(run("compare", runs[0], runs[0], "--json").out)
    assert found["outcome"] == "no difference"
    assert found["causes"]["gone"] == found["causes"]["new"] == []
    assert found["kinds"] is None
    assert found["cost"].startswith("both lose ")
    assert all("now costs" not in cause for cause in found["causes"]["staying"])


def test_a_job_that_is_missing_is_said_in_one_line(runs: tuple[Path, Path], tmp_path: Path) -> None:
    for arguments in ((runs[0], "no.parquet"), ("slow job", "healthy job", "--store", tmp_path / "none")):
        ran = run("compare", *arguments)
        assert ran.code == ExitCode.BAD_INPUT
        assert ran.message


@pytest.mark.slow
def test_compare_and_gate_give_a_recording_one_step_time() -> None:
    """Of the steps that the profiler marked; the time before the first and after the last is of no step."""
    recording = SAMPLES / "gpu_slow_input"
    compared = json.loads(run("compare", recording, recording, "--json").out)
    judged = json.loads(run("gate", recording, "--baseline", recording, "--part", "step", "--json").out)
    assert compared["after"]["recorded_s"] == pytest.approx(judged["rows"][0]["after_s"], rel=1e-12)
    assert compared["after"]["steps"] == judged["run"]["steps"]
