"""The first screen of `whatif`: 24 lines of 80 columns that answer everything, in plain English."""

from __future__ import annotations

import io
import re
from pathlib import Path

import polars as pl
import pytest
from rich.console import Console

from tests.analysis.small_jobs import BACKWARD, FORWARD, data_parallel_job, of_steps
from tests.cases import case
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.text import three_digits
from tracekit.dashboards.terminal.report import print_report
from tracekit.report.report import Report
from tracekit.sources.load import load
from tracekit.synth import SynthSpec, parse_cause, synthesize
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout

SAMPLES = Path(__file__).parents[1] / "sample_traces"
NAMES = sorted(path.stem for path in SAMPLES.glob("*.parquet"))
#: Three causes, one DP rank not traced, one clock off: all rows that a first screen can have.
TROUBLES = ("slow-worker:dp=3,pp=1,factor=1.5", "slow-last-stage", "python-gc", "missing-ranks", "clock-offset")


def screen(report: Report, width: int = 80, **options: bool) -> list[str]:
    out = io.StringIO()
    print_report(report, Console(file=out, width=width), source="job.parquet", gpu_hour=2.5, **options)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def rows(lines: list[str]) -> list[str]:
    """The bold words at the left, in order."""
    return [found[1] for line in lines if (found := re.match(r"(\w+) {2,}\S", line))]


@pytest.fixture(scope="module")
def troubled() -> Report:
    causes = tuple(map(parse_cause, TROUBLES))
    return PipelineJob(synthesize(SynthSpec(layout=Layout(dp=16, pp=8), steps=12, causes=causes))).report


def test_a_sample_is_answered_on_one_screen() -> None:
    for name in NAMES:
        lines = screen(load(SAMPLES / f"{name}.parquet").report)
        with case(name):
            assert len(lines) <= 24
            assert all(len(line) <= 80 for line in lines if "tracekit " not in line)
            assert not re.search(r"sigma|likelihood|S = |S_w|correlation|T\(", "\n".join(lines))


def test_a_job_with_all_troubles_is_answered_on_one_screen(troubled: Report) -> None:
    lines = screen(troubled)
    assert len(lines) <= 24
    shown = rows(lines)
    assert shown[1:5] == ["Cost", "Who", "Do", "Saves"]
    assert {"Also", "Trust", "Clocks", "Missing", "Next"} <= set(shown)


def test_the_answer_comes_in_the_order_of_the_questions() -> None:
    """What and who, what it costs, what to do and what that saves, whether to believe it, and next."""
    lines = screen(load(SAMPLES / "slow_worker.parquet").report)
    assert rows(lines) == ["Cost", "Who", "Do", "Saves", "Trust", "Workers", "Steps", "Next"]
    assert "298 a day at 2.5 a GPU-hour" in re.sub(r"\s+", " ", " ".join(lines))


def test_orange_is_lost_time_and_nothing_else() -> None:
    """The verdict, the worker and the steps; a worker that costs nothing is grey."""
    out = io.StringIO()
    colours = {"_environ": {}, "force_terminal": True, "color_system": "truecolor"}
    print_report(load(SAMPLES / "slow_worker.parquet").report, Console(file=out, width=80, **colours))
    oranges = re.findall(r"\x1b\[[0-9;]*[34]8;2;([0-9;]+)m([^\x1b]*)", out.getvalue())
    assert oranges[0] == ("179;88;6", "STRAGGLER")  # LIGHT.bad
    assert oranges[1:3] == [("224;130;20", "▆▆")] * 2  # what it means, and rank 9
    assert oranges[3][0] == "224;130;20"  # the steps
    assert len(oranges) == 4
    assert "\x1b[38;5;244m··" in out.getvalue()


def test_a_healthy_job_is_five_lines_at_most() -> None:
    assert len(screen(load(SAMPLES / "healthy.parquet").report)) <= 5


def test_tables_keep_their_columns_and_every_line_fits(troubled: Report) -> None:
    for width in (80, 160):
        lines = screen(troubled, width, full=True)
        assert all(len(line) <= width for line in lines if "tracekit " not in line)
        text = "\n".join(lines)
        assert "…" not in text
        for heads in (("Op kind", "Slowdown", "if ideal", "on path"),
                      ("Rank", "host", "(dp,pp)", "Slowdown", "on path"),
                      ("Fix", "Sure", "Step after", "Saved per step", "GPU-hours a day")):  # fmt: skip
            assert re.search(r" +".join(map(re.escape, heads)), text), heads


def test_isolated_stalls_are_listed_with_what_they_went_to() -> None:
    """Steps of 0.31 s; rank 1 loads data for 0.29 s in step 10 and computes 0.1 s longer in step 15."""
    steps = [[[FORWARD, BACKWARD]] * 4 for _ in range(24)]
    steps[10] = [[FORWARD, BACKWARD], [("data-load", 0.29), FORWARD, BACKWARD], *[[FORWARD, BACKWARD]] * 2]
    steps[15] = [[FORWARD, BACKWARD], [FORWARD, ("backward-compute", 0.3)], *[[FORWARD, BACKWARD]] * 2]
    report = PipelineJob(of_steps(steps)).report
    assert report.answer.stalls == ("step 10: +290.0 ms, data", "step 15: +100.0 ms, compute")
    assert any(line.startswith("Stalls") for line in screen(report))


def test_steps_that_all_ranks_begin_late_went_to_the_host() -> None:
    """In step 10, nothing runs for the first 0.3 s."""
    trace = data_parallel_job([[FORWARD, BACKWARD]] * 4, steps=24)
    later = pl.when(pl.col("step") == 10).then(pl.col("start") + 0.3).otherwise("start")
    paused = Trace.from_frame(trace.ops.with_columns(start=later), trace.layout, name="paused")
    assert PipelineJob(paused).report.answer.stalls == ("step 10: +300.0 ms, host",)


def test_slow_steps_that_are_the_rule_are_no_stalls() -> None:
    slow = [[FORWARD, ("backward-compute", 0.3)]] * 4
    every_other = [[[FORWARD, BACKWARD]] * 4 if step % 2 else slow for step in range(24)]
    assert PipelineJob(of_steps(every_other)).report.stalls == []
    assert PipelineJob(data_parallel_job([[FORWARD, BACKWARD]] * 4, steps=24)).report.stalls == []


def test_figures_have_three_digits_and_no_exponent() -> None:
    texts = [three_digits(value) for value in (0.0, 1036.8, 111.2, 11.47, 1.0, 0.03124, 99.96)]
    assert texts == ["0", "1,040", "111", "11.5", "1", "0.0312", "100"]
