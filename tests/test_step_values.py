"""Tokens and loss of steps in reports, comparisons, gates and trackers. A healthy step takes 11.25 s, a slow 15.5 s."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from tests.handmade import LAYOUT, healthy_frame, run, slow_frame, slow_trace
from tests.test_report import problems
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.dashboards.trackers import series
from tracekit.store import Incoming, Store
from tracekit.trace.canonical import Trace
from tracekit.trace.facts import STEP_VALUES

#: Step 2 has none, step 9 is not in the trace.
VALUES = {STEP_VALUES: {"tokens": {"0": 31.0, "1": 62.0, "9": 7.0}, "loss": {"1": 2.5}}}


def test_steps_of_a_report_have_their_values_and_trackers_the_rate() -> None:
    report = PipelineJob(slow_trace((0, 1, 2), metadata=VALUES)).report
    assert report.table("by_step").select("step", "tokens", "loss").rows() == [
        (0, 31.0, None),
        (1, 62.0, 2.5),
        (2, None, None),
    ]
    found = report.to_dict()
    assert problems(found) == []
    assert [(row["tokens"], row["loss"]) for row in found["by_step"]] == [(31.0, None), (62.0, 2.5), (None, None)]
    assert series(report)["tracekit/tokens_per_s"] == pytest.approx(93 / 31)  # of the two steps that have tokens
    assert len(series(report)) == 10


@pytest.mark.slow
def test_steps_without_tokens_are_in_no_rate(tmp_path: Path) -> None:
    """Of steps of 11.25, 11.25 and 15.5 s, the last has 31 tokens: 2 a second, wherever it is shown."""
    ops = pl.concat([healthy_frame((0, 1)), slow_frame((2,))])
    starts = {step: 1.7e9 + 20 * step for step in range(3)}
    values = {STEP_VALUES: {"tokens": {"2": 31.0}}}
    trace = Trace.from_frame(ops, LAYOUT, name="some", step_starts=starts, metadata=values)
    job, path, store = PipelineJob(trace), tmp_path / "some.parquet", Store(tmp_path / "jobs.store")
    trace.write_parquet(path)
    assert series(job.report)["tracekit/tokens_per_s"] == pytest.approx(2)
    assert json.loads(run("compare", path, path, "--json").out)["after"]["tokens_per_s"] == pytest.approx(2)
    gated = json.loads(run("gate", path, "--baseline", path, "--noise", "1%", "--json").out)
    assert gated["notes"] == ["2 tokens a second before, 2 after (+0.0%)"]
    store.append(Incoming(trace, "some", "file", job.stored()))
    assert "Tokens/s 2 " in " ".join(run("store", "top", "--store", store.path, "--once").out.split())
    silent = slow_trace((3, 4), name="some", step_starts={3: 1.7e9 + 60, 4: 1.7e9 + 80})
    store.append(Incoming(silent, "some", "file", PipelineJob(silent).stored()))
    with store.reading() as catalogue:
        (both,) = catalogue.live.spans("some", 1).iter_rows(named=True)
    assert both["tokens"] / both["recorded_s"] == pytest.approx(2)


def test_redacting_keeps_the_numbers() -> None:
    redacted = slow_trace((0, 1, 2), metadata=VALUES | {"user": "ada"}).redacted()
    assert PipelineJob(redacted).report.table("by_step")["tokens"].to_list() == [31.0, 62.0, None]
    assert "ada" not in str(redacted.metadata)


def test_a_report_without_values_has_no_columns_for_them() -> None:
    report = PipelineJob(slow_trace((0, 1))).report
    assert report.table("by_step").columns == ["step", "slowdown", "recorded_s", "original_s", "ideal_s", "lost_s"]
    assert "tokens" not in report.to_dict()["by_step"][0]
    assert "tracekit/tokens_per_s" not in series(report)


def test_two_runs_are_compared_by_tokens_a_second_too(tmp_path: Path) -> None:
    """Healthy: 45 tokens in 11.25 s, 4 a second; slow: 93 in 15.5 s, 6 a second. A run without tokens has no rate."""

    def write(name: str, ops: Trace, tokens: float | None) -> Path:
        metadata = {} if tokens is None else {STEP_VALUES: {"tokens": {str(step): tokens for step in range(5)}}}
        Trace.from_frame(ops.ops, LAYOUT, name=name, metadata=metadata).write_parquet(tmp_path / name)
        return tmp_path / name

    healthy, slow = Trace.from_frame(healthy_frame(range(5)), LAYOUT, name="healthy"), slow_trace(range(5))
    four, six, none = write("four", healthy, 45.0), write("six", slow, 93.0), write("none", slow, None)
    compared = json.loads(run("compare", four, none, "--json").out)
    assert [compared[name]["tokens_per_s"] for name in ("before", "after")] == [4.0, None]
    gated = json.loads(run("gate", six, "--baseline", four, "--noise", "1%", "--json").out)
    assert gated["notes"] == ["4 tokens a second before, 6 after (+50.0%)"]
    assert json.loads(run("gate", none, "--baseline", four, "--noise", "1%", "--json").out)["notes"] == []
    shown = run("compare", four, six, env={"COLUMNS": "80"}).out
    assert "Rate 4 tokens a second before, 6 after (+50.0%)" in " ".join(shown.split())
