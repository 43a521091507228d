"""`whatif --bubbles` and `--schedule` at the command line: what is printed, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import polars as pl
import pytest

from tests.analysis.bubbles.simulated import one_f_one_b, random_lanes, trace
from tests.handmade import run
from tests.kineto_files import document, kernel, launch, write
from tests.test_op_trace import DP, OPS
from tests.test_report import problems
from tracekit.synth import SynthSpec, synthesize
from tracekit.trace.model import Layout
from tracekit.trace.op import OpTrace

SCHEDULES = ("gpipe", "1f1b", "interleaved:chunks=2", "interleaved:chunks=3", "zb-h1", "zb-h1,weight=0.4")
ASKED = tuple(word for schedule in SCHEDULES for word in ("--schedule", schedule))
STAGES, MICROBATCHES = 4, 8


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bubbles") / "pipeline.parquet"
    trace(random_lanes(1, one_f_one_b(STAGES, MICROBATCHES))).write_parquet(path)
    return path


@pytest.fixture
def op_trace(tmp_path: Path) -> Path:
    path = tmp_path / "ops.parquet"
    OpTrace(OPS, "two ranks", groups=DP).write_parquet(path)
    return path


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    events = [event for at in (0, 100) for event in (launch(at, at), kernel("gemm", at + 10, 50, correlation=at))]
    return write(tmp_path / "rank0.json", document(events, world=1))


def test_without_the_flag_the_object_is_null(pipeline: Path) -> None:
    report = json.loads(run("whatif", pipeline, "--json").out)
    assert report["bubbles"] is None
    assert problems(report) == []


def test_schedules_imply_bubbles_and_the_report_is_as_the_schema_says(pipeline: Path) -> None:
    report = json.loads(run("whatif", pipeline, *ASKED, "--json").out)
    assert problems(report) == []
    found = report["bubbles"]
    assert [row["schedule"] for row in found["schedules"]] == list(SCHEDULES)
    refused = {row["schedule"] for row in found["schedules"] if row["refused"] is not None}
    assert refused == set()
    assert [row["pp_rank"] for row in found["by_stage"]] == list(range(STAGES))
    assert found["window_s"] == pytest.approx(found["work_s"] + found["idle_s"], rel=1e-12)


def test_a_schedule_that_the_job_cannot_run_is_a_row_without_figures(tmp_path: Path) -> None:
    synthesize(SynthSpec(Layout(dp=2), steps=3)).write_parquet(tmp_path / "job.parquet")
    out = run("whatif", tmp_path / "job.parquet", "--bubbles", "--schedule", "interleaved:chunks=2", "--full").out
    assert re.search(r"^ *interleaved:chunks=2 +refused *$", out, re.MULTILINE)
    assert "interleaved:chunks=2 refused: " in " ".join(out.split())


def test_the_flag_alone_prices_no_schedule(pipeline: Path) -> None:
    report = json.loads(run("whatif", pipeline, "--bubbles", "--json").out)
    assert report["bubbles"]["schedules"] == []
    assert report["bubbles"]["causes"]


def test_the_terminal_has_a_sentence_and_three_tables_within_80_columns(pipeline: Path) -> None:
    shown = run("whatif", pipeline, *ASKED, env={"COLUMNS": "80"}).out.splitlines()
    tables = shown[next(at for at, line in enumerate(shown) if line.startswith("Bubbles  ")) :]
    assert [line.split()[0] for line in tables if line.startswith((" Idle", " Schedule"))] == [
        "Idle,",
        "Idle",
        "Schedule",
    ]
    assert all(any(line.startswith(f" {schedule} ") for line in tables) for schedule in SCHEDULES)
    path = str(pipeline)  # commands to copy are not broken
    assert max(len(line.rstrip()) for line in shown if path not in line) <= 80


@pytest.mark.parametrize("words", [("--bubbles",), ("--schedule", "gpipe")])
@pytest.mark.parametrize("source", ["op_trace", "recording"])
def test_only_pipelines_have_bubbles(source: str, words: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(source)
    ran = run("whatif", path, *words, "--json")
    assert (ran.code, ran.out) == (2, "")
    assert "--bubbles is for pipeline traces" in ran.message
    assert "whose stages and microbatches are not known" in ran.message


@pytest.mark.parametrize("schedule", ["", "dualpipe", "interleaved", "interleaved:chunks=65", "1f1b,weight=1.5"])
def test_a_schedule_that_does_not_exist_is_refused_before_the_trace_is_read(schedule: str, tmp_path: Path) -> None:
    ran = run("whatif", tmp_path / "absent.parquet", "--schedule", schedule)
    assert (ran.code, ran.out) == (2, "")
    assert "not a schedule; write gpipe, 1f1b, interleaved:chunks=V or zb-h1" in ran.message


def test_csv_has_the_tables_of_the_report(pipeline: Path, tmp_path: Path) -> None:
    report = json.loads(run("whatif", pipeline, "--schedule", "gpipe", "--csv", tmp_path / "tables", "--json").out)
    found = report["bubbles"]
    tables = {path.stem: pl.read_csv(path).to_dicts() for path in (tmp_path / "tables").glob("bubbles_*.csv")}
    assert tables["bubbles_causes"] == found["causes"]
    places = [{"pp_rank": stage["pp_rank"], **row} for stage in found["by_stage"] for row in stage["places"]]
    assert tables["bubbles_places"] == places
    assert [(row["pp_rank"], row["idle_s"]) for row in tables["bubbles_stages"]] == [
        (stage["pp_rank"], stage["idle_s"]) for stage in found["by_stage"]
    ]
    (schedule,) = tables["bubbles_schedules"]
    assert (schedule["schedule"], schedule["window_s"]) == ("gpipe", found["schedules"][0]["window_s"])
    assert schedule["peak_microbatches"] == MICROBATCHES
    run("whatif", pipeline, "--csv", tmp_path / "others")
    assert list((tmp_path / "others").glob("bubbles_*.csv")) == []
