"""`whatif --explain`: each number of the first screen, with a formula that gives it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.analysis.small_jobs import BACKWARD, FORWARD, data_parallel_job
from tests.handmade import LAYOUT, run, slow_frame
from tests.test_op_trace import DP, OPS
from tracekit import load
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.dashboards.terminal.details import explanations
from tracekit.trace.canonical import Trace
from tracekit.trace.op import OpTrace

SAMPLES = Path(__file__).parents[1] / "sample_traces"


def test_the_formulas_hold_the_numbers_worked_out_by_hand() -> None:
    """15.5 s as replayed, 11.25 s if rank 1 were as fast as its peer, 4 GPUs: 4.25 / 15.5 = 27.4 % of 96 GPU-hours."""
    report = PipelineJob(Trace.from_frame(slow_frame((0, 1, 2)), LAYOUT, name="job")).whatif()
    rows = explanations(report, 2.0)
    assert rows["T(recorded)"].startswith("15.50 s, the mean of 3 recorded steps")
    assert rows["T(ideal)"].startswith("13.50 s")
    assert rows["Method"].startswith("S = T(original) / T(ideal) = 1.148")
    assert rows["Lost"] == "T(kept) - T(kept, without the named causes) = 4.25 s a step"
    assert rows["Share"] == ("lost / the longer of T(recorded) and T(kept) = 4.25 s / 15.50 s = 27.4%")
    assert rows["Cause"] == "T(kept) - T(kept, without this cause) = 4.25 s a step, 27.4% of it"
    assert rows["GPU-hours"] == "share x GPUs x 24 h = 27.4% x 4 x 24 = 26.3 a day"
    assert rows["Money"] == "GPU-hours x price = 26.3 x 2 = 53 a day"
    assert rows["Replay"].startswith("|T(kept) - T(recorded)| / T(recorded) = 0.00%")
    assert "worker (1,0), 16.9%" in rows["Map"]  # 16.25 / 13.5
    assert rows["Steps"].endswith("most: step 0, 4.25 s of 15.50 s")


def test_a_loss_that_all_ranks_share_is_explained_without_s() -> None:
    """0.3 s of waiting for data before 0.31 s of work."""
    programs = [[("data-load", 0.3), FORWARD, BACKWARD]] * 4
    report = PipelineJob(data_parallel_job(programs, steps=8)).whatif()
    rows = explanations(report)
    assert rows["Lost"].endswith("= 300.0 ms a step")
    assert rows["Share"].startswith("lost / the longer of T(recorded) and T(kept) = 300.0 ms / 610.0 ms = 49.2%")


def test_a_rank_of_an_op_trace_costs_all_that_it_does_later_than_its_peers(tmp_path: Path) -> None:
    """Rank 1 takes 3 s for what rank 0 does in 1 s, and collects garbage for 5 s in one of two steps: 2 s and 2.5 s."""
    OpTrace(OPS, "two ranks", groups=DP).write_parquet(tmp_path / "ops.parquet")
    report = load(tmp_path / "ops.parquet").report
    assert "Python collects garbage for 2.50 s a step, on its peers for 0.00 s" in report.answer.headline
    rows = explanations(report)
    assert rows["Lost"] == "T(kept) - T(kept, this rank at the pace of its peers) = 4.50 s a step"
    assert rows["Cause"] == "T(kept) - T(kept, without this cause) = 2.50 s a step, 38.5% of it"


@pytest.mark.parametrize("job", ["slow_worker", "python_gc", "sequence_lengths", "slow_last_stage", "healthy"])
def test_every_number_of_cost_fix_and_trust_is_in_a_formula(job: str) -> None:
    """Numbers with a unit or a percent sign; those of `Check` are names of metrics."""
    screen = run("whatif", SAMPLES / f"{job}.parquet", "--explain", env={"COLUMNS": "400"}).out
    answer, _, explained = screen.partition("How each number came about")
    shown = [line for line in answer.splitlines() if line.startswith(("Cost", "Fix", "Why"))]
    for number in re.findall(r"\d[\d.,]*(?: ms| us| s\b|%)", " ".join(shown)):
        assert number in explained or f"{float(number[:-1]):.2f}%" in explained, (number, explained)
