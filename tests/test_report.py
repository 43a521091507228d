"""The report as data: one JSON Schema for every source, shipped and documented; frames agree with it."""

from __future__ import annotations

import gc
import json
import re
import weakref
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from jsonschema import Draft202012Validator

from tests.analysis.rl.logs import lines, write
from tests.analysis.small_jobs import BACKWARD, FORWARD, of_steps
from tests.handmade import (
    FIXED_STEP_S,
    HEALTHY_STEP_S,
    IDEAL_STEP_S,
    KEPT_STEP_S,
    LAYOUT,
    SLOW_STEP_S,
    healthy_frame,
    run,
    slow_frame,
)
from tests.outputs import SCHEMA_PAGE, report_schema, schema_page
from tracekit.analysis.job.job import ReportOptions
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.errors import SelectionError
from tracekit.report.report import COMMON_TABLES, PIPELINE_TABLES, REPORT_VERSION, Report
from tracekit.report.report_file import read_report
from tracekit.sources.load import load
from tracekit.trace.canonical import Trace, read_parquet

SHIPPED = json.loads(files("tracekit.report").joinpath("report.schema.json").read_text("utf-8"))
SAMPLES = Path(__file__).parent.parent / "sample_traces"


def problems(content: Any, name: str = "Report") -> list[str]:
    """Where `content` differs from a definition of the shipped schema; a key that the schema lacks counts, too."""
    schema = json.loads(json.dumps(SHIPPED)) | {"$ref": f"#/$defs/{name}"}
    for definition in schema["$defs"].values():
        if "properties" in definition:
            definition["additionalProperties"] = False
    return [f"{error.json_path}: {error.message:.200}" for error in Draft202012Validator(schema).iter_errors(content)]


def table(heading: str) -> list[list[str]]:
    """The rows of the table below a heading of the page."""
    part = SCHEMA_PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| `")]


def report(ops: pl.DataFrame, asked: dict[str, tuple[str, ...]] | None = None, **more: Any) -> Report:
    return PipelineJob(Trace.from_frame(ops, LAYOUT, name="job", **more)).whatif(**(asked or {}))


@pytest.fixture(scope="module")
def slow() -> Report:
    hosts = {str(rank): f"node-{rank}" for rank in range(4)}
    asked = {"fix": ("worker=1,0",), "keep": ("worker=1,0",), "by": ("host", "dp_rank,stage")}
    return report(slow_frame((3, 8)), asked, metadata={"hosts": hosts})


@pytest.fixture(scope="module")
def healthy() -> Report:
    return report(healthy_frame())


@pytest.fixture(scope="module")
def partial() -> Report:
    """Stage 1 of DP rank 1 was never traced, and 5 s pass between the first all-gather and all else: distrusted."""
    gone = (pl.col("dp_rank") == 1) & (pl.col("pp_rank") == 1)
    ops = slow_frame((3, 8)).filter(~gone)
    late = pl.when(pl.col("kind") == "params-all-gather").then(0.0).otherwise(5.0)
    return report(ops.with_columns(pl.col("start") + late))


@pytest.fixture(scope="module")
def stalled() -> Report:
    """One step of twelve waits for data."""
    steps = [[[FORWARD, BACKWARD]] * 4 for _ in range(12)]
    steps[7] = [[("data-load", 0.3), FORWARD, BACKWARD]] * 4
    return PipelineJob(of_steps(steps)).whatif()


def test_the_shipped_schema_is_that_of_the_code() -> None:
    """After a change of the types: `python -m tests.outputs`."""
    assert json.loads(json.dumps(report_schema())) == SHIPPED


@pytest.mark.parametrize("name", ["slow", "healthy", "partial", "stalled"])
def test_the_json_of_a_pipeline_fits_the_schema(name: str, request: pytest.FixtureRequest) -> None:
    assert problems(json.loads(request.getfixturevalue(name).to_json())) == []


@pytest.mark.parametrize("name", ["slow", "healthy", "partial", "stalled"])
def test_a_report_is_what_its_file_says(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Before it is written, too: what is undefined is None, not nan."""
    made = request.getfixturevalue(name)
    (tmp_path / "report.json").write_text(made.to_json())
    assert read_report(tmp_path / "report.json").to_json() == made.to_json()
    json.dumps(msgspec.to_builtins(made, str_keys=True), allow_nan=False)


def test_nothing_in_the_report_on_a_recording_is_nan() -> None:
    made = load(SAMPLES / "gpu_slow_input").whatif()
    json.dumps(msgspec.to_builtins(made, str_keys=True), allow_nan=False)


@pytest.mark.parametrize("name", ["gpu_slow_input", "slow_worker.parquet", "ops.parquet", "rl.jsonl"])
def test_what_whatif_prints_fits_the_schema(name: str, tmp_path: Path) -> None:
    """All sources, asked everything that they can be asked."""
    path = SAMPLES / name
    if name == "ops.parquet":
        path = tmp_path / name
        load(SAMPLES / "gpu_slow_input").ops.write_parquet(path)
    options: tuple[str, ...] = ("--fix", "rank=1", "--keep", "rank=1", "--by", "rank,kind")
    if name == "rl.jsonl":
        path, options = write(tmp_path / name, lines()), ("--fix", "staleness=1", "--fix", "fix=instant-sync")
    content = json.loads(run("whatif", path, "--json", *options).out)
    assert problems(content) == []
    assert [len(content["questions"]), content["report_version"]] == [2, REPORT_VERSION]
    assert {"who", "cost", "action"} <= content["verdict"].keys()
    assert [content["verdict"][key] for key in ("who", "cost", "action")] == [
        content["answer"][key] for key in ("who", "cost", "action")
    ]


def test_s_is_as_certain_as_its_steps_are_alike() -> None:
    """The error is t times the standard error of what S leaves of each step, original - S ideal, relative to the mean
    ideal step, from circular blocks of two steps: 12 / 2 - 1 degrees of freedom, whose t is 2.5706.
    """
    job = PipelineJob(read_parquet(SAMPLES / "slow_worker.parquet"))
    found = job.whatif(by=["stage"], fix=["rank=9"], keep=["rank=9"])
    times, content = found.step_times(), found.to_dict()

    def error_of(above: Any) -> float:
        left = (above - above.mean() / times.ideal.mean() * times.ideal) / times.ideal.mean()
        blocks = [(left[at] + left[(at + 1) % 12]) / 2 for at in range(12)]
        return 2.5706 * float(sum(block**2 for block in blocks) / 12 / 5) ** 0.5

    assert content["slowdown_error"] == pytest.approx(error_of(times.original), rel=1e-3)
    worker = job.attribution.by_worker[:, 1, 2]
    (worst, *_) = content["by_worker"]
    assert (worst["rank"], worst["slowdown_error"]) == (9, pytest.approx(error_of(worker), rel=1e-3))
    (stage, *_) = content["by_label"]
    (of_stage,) = [row for row in content["by_pp_rank"] if row["pp_rank"] == int(stage["value"])]
    assert 0 < stage["slowdown_error"] == pytest.approx(of_stage["slowdown_error"])
    fix = next(fix for fix in content["fixes"] if fix["cause"] == "bad-worker")
    assert content["questions"][0]["error_s"] == pytest.approx(fix["error_s"])  # the same change
    assert content["questions"][1]["error_s"] > 0
    assert f"S          {found.slowdown_text}: " in run("whatif", SAMPLES / "slow_worker.parquet", "--full").out


def test_culprits_are_those_of_the_schema() -> None:
    for name in ("gpu_slow_input", "slow_worker.parquet"):
        content = json.loads(run("culprits", SAMPLES / name, "--format", "json").out)
        assert [problems(row, "Culprit") for row in content["culprits"]] == [[]]


@pytest.mark.slow
def test_compare_prints_what_the_page_explains() -> None:
    for name in ("gpu_slow_input", "slow_worker.parquet"):
        content = json.loads(run("compare", SAMPLES / name, SAMPLES / name, "--json").out)
        assert [key for row in table("compare") for key in re.findall(r"`(\w+)`", row[0])] == list(content)


def test_the_culprit_of_a_recording_has_the_findings_on_its_rank() -> None:
    content = load(SAMPLES / "gpu_slow_input").whatif().to_dict()
    (culprit, causes), verdict = (content["verdict"]["culprit"], content["causes"]), content["verdict"]
    assert (culprit["rank"], culprit["host"]) == (2, "node-0")
    assert [(one["cause"], one["saved_s"]) for one in culprit["causes"]] == [
        (one["kind"], one["saved_s"]) for one in causes if one["where"]["ranks"] == [2]
    ]
    assert culprit["causes"][0]["cause"] == "late-data-loading"
    assert verdict["exposed_communication_s"] > 0


def test_the_page_has_the_keys_types_meanings_and_kinds_of_the_code() -> None:
    """After a change of the types: `python -m tests.outputs`."""
    page = SCHEMA_PAGE.read_text("utf-8")
    assert schema_page(page) == page
    row = "| `straggling` | boolean | S is at least 1.1 |\n"
    assert page.count(row) == 1
    assert schema_page(page.replace(row, "| `straggling` | number | was here |\n")) == page
    gone = "\n## `Gone`\n\n| key | type | meaning |\n|---|---|---|\n| `x` | number | was here |\n"
    assert schema_page(page + gone) == page + "\n"


def test_every_key_has_a_meaning() -> None:
    """It is the comment `#:` of its field."""
    shapes = {name: shape.get("properties", {}) for name, shape in report_schema()["$defs"].items()}
    keys = {(name, key): each.get("description") for name, shape in shapes.items() for key, each in shape.items()}
    assert [key for key, meaning in keys.items() if not meaning] == []
    assert keys["Fix", "cause"] == "kind of the cause it is for; null for what any job could try"  # on its line
    assert keys["Fix", "saved_s"].startswith("step time saved by ops as fast as their peers', ")  # on two lines above
    assert keys["Fix", "saved_s"].endswith("everything else as recorded; `questions` are priced in the same way")
    assert keys["OtherStepTime", "high"] == keys["OtherStep", "high"] == "upper end of the 90 % interval"  # inherited
    assert keys["KernelTime", "class"] == "kernel class"  # its field has another name
    assert keys["MissingMembers", "group"] == "its process group"  # of a dataclass
    assert keys["Table", "type"] == "`table`: a table with a heading"  # of no field


def test_by_label_gives_each_value_what_keeping_it_alone_gives(slow: Report) -> None:
    """Worker (1,0) is rank 1, the only one on its host, so that host, worker and --keep are one question."""
    (costliest, *_) = slow.table("by_label").filter(labels="host").iter_rows(named=True)
    assert (costliest["value"], costliest["ops"]) == ("node-1", 24)  # twelve in each step
    assert costliest["slowdown"] == pytest.approx(KEPT_STEP_S / IDEAL_STEP_S)
    assert costliest["added_s"] == pytest.approx(KEPT_STEP_S - IDEAL_STEP_S)
    assert costliest["saved_s"] == pytest.approx(SLOW_STEP_S - FIXED_STEP_S)
    (of_worker, *_) = slow.table("by_label").filter(labels="dp_rank,stage").iter_rows(named=True)
    assert of_worker == costliest | {"labels": "dp_rank,stage", "value": "1,0"}


def test_the_critical_path_adds_up_to_the_step(slow: Report) -> None:
    """By kind, launch delays included; by worker, without them."""
    columns = ["recorded_s", "original_s", "ideal_s"]
    assert slow.table("critical_path").select(columns).sum().row(0) == pytest.approx(
        (SLOW_STEP_S, SLOW_STEP_S, IDEAL_STEP_S)
    )
    assert slow.table("critical_workers")["original_s"].sum() == pytest.approx(SLOW_STEP_S)
    assert slow.table("critical_workers").row(0)[:2] == (1, 0)


def test_every_list_of_the_page_is_met_with_rows(slow: Report, stalled: Report, partial: Report) -> None:
    """So that the comparison above compares something."""
    for key in (*PIPELINE_TABLES, "by_label", "questions", "causes", "fixes", "slowest_workers", "stalls"):
        assert slow.to_dict()[key] or stalled.to_dict()[key], key
    assert partial.to_dict()["coverage"]["missing_workers"]
    assert partial.to_dict()["coverage"]["dropped"]
    assert partial.to_dict()["trust"]["reasons"]


def test_the_page_is_of_the_version_in_the_code() -> None:
    words = " ".join(SCHEMA_PAGE.read_text(encoding="utf-8").split())
    assert f"version {REPORT_VERSION} (`report_version`)" in words


def test_what_is_undefined_is_null(healthy: Report) -> None:
    """A healthy job loses nothing, so nothing can be shared out; equal durations have no correlation."""
    content = healthy.to_dict()
    assert content["m_w"] is None
    assert content["m_s"] is None
    assert content["forward_backward_correlation"] == [{"pp_rank": 0, "r": None}, {"pp_rank": 1, "r": None}]
    json.loads(healthy.to_json(), parse_constant=lambda text: pytest.fail(f"{text} in JSON"))


def test_a_job_that_is_replayed_needs_its_ops_no_more() -> None:
    """They are half the memory of a large job. Its report is the same without them."""
    job = PipelineJob(Trace.from_frame(slow_frame((0, 1)), LAYOUT, name="slow"))
    expected, replayed, ops = job.whatif(by=["kind"]).to_dict(), job.lean(), weakref.ref(job.trace.ops)
    del job
    gc.collect()
    assert ops() is None
    assert replayed.analyse(ReportOptions(by=("kind",))).report.to_dict() == expected


def test_tables_hold_what_was_worked_out_by_hand(slow: Report) -> None:
    worst = slow.table("by_worker").row(0, named=True)
    assert worst == {
        "dp_rank": 1,
        "pp_rank": 0,
        "rank": 1,
        "host": "node-1",
        "slowdown": pytest.approx(KEPT_STEP_S / IDEAL_STEP_S),
        "slowdown_error": pytest.approx(0, abs=1e-12),  # both steps are alike
        "slowdown_approx": pytest.approx(SLOW_STEP_S / IDEAL_STEP_S),  # the smaller of S of DP rank 1 and of stage 0
    }
    first = slow.table("by_pp_rank").row(0, named=True)
    assert (first["fixed_step_time_s"], first["saved_s"]) == (FIXED_STEP_S, SLOW_STEP_S - FIXED_STEP_S)
    assert slow.table("by_dp_rank")["slowdown"].to_list() == pytest.approx([1.0, SLOW_STEP_S / IDEAL_STEP_S])
    # DP rank 1 ideal is an ideal lane beside a faster one; DP rank 0 ideal still waits for DP rank 1.
    assert slow.table("by_dp_rank")["saved_s"].to_list() == pytest.approx([0.0, SLOW_STEP_S - IDEAL_STEP_S])
    lost_s = pytest.approx(SLOW_STEP_S - HEALTHY_STEP_S)
    assert slow.table("by_step").row(1) == (8, pytest.approx(SLOW_STEP_S / IDEAL_STEP_S), 15.5, 15.5, 13.5, lost_s)
    assert [question.step_time_s for question in slow.questions] == [HEALTHY_STEP_S, KEPT_STEP_S]
    # On stage 0 the forwards of 1, 1, 2, 2 s meet backwards of 2, 2, 4, 4 s; on stage 1 nothing varies.
    assert [row.r for row in slow.forward_backward_correlation] == [pytest.approx(1.0), None]


def test_tables_per_step_average_to_the_tables_of_the_job() -> None:
    """Both steps have the same ideal time, so the mean of the ratios is the ratio of the means."""
    analysis = PipelineJob(Trace.from_frame(slow_frame((3, 8)), LAYOUT, name="job")).analysis
    assert analysis.lanes is not None
    slow, per_step_of = analysis.report, analysis.lanes.frames()
    for table, keys in (
        ("by_kind", ["kind"]),
        ("by_pp_rank", ["pp_rank"]),
        ("by_dp_rank", ["dp_rank"]),
        ("by_worker", ["dp_rank", "pp_rank"]),
    ):
        per_step = per_step_of[f"{table}_per_step"]
        assert per_step["step"].unique().sort().to_list() == [3, 8]
        means = per_step.group_by(keys).agg(pl.col("slowdown").mean()).sort(keys)
        whole = slow.table(table).select(*keys, "slowdown").sort(keys)
        assert means.select(keys).rows() == whole.select(keys).rows()
        assert means["slowdown"].to_list() == pytest.approx(whole["slowdown"].to_list())


def test_a_kind_keeps_its_launch_delays_to_itself(partial: Report) -> None:
    """5 s lie between gathering the parameters and what follows: the first forward of stage 0 waits, and the first
    forward-recv of stage 1 is posted late."""
    delays = dict(partial.table("by_kind").select("kind", "launch_delay_slowdown").iter_rows())
    assert delays["forward-compute"] > 1.2
    assert delays["optimizer"] == 1
    assert not partial.trust.trustworthy


def test_what_takes_a_replay_for_every_dp_rank_is_null_where_that_is_too_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracekit.analysis.attribution.attribute.COSTLIEST_BY_DP_RANK", 0)
    dear = report(slow_frame((3,))).table("by_dp_rank")
    for column in ("launch_delay_slowdown", "fixed_step_time_s", "saved_s"):
        assert dear[column].to_list() == [None, None]
    assert dear["slowdown"].to_list() == pytest.approx([1.0, SLOW_STEP_S / IDEAL_STEP_S])


@pytest.mark.parametrize("name", [*PIPELINE_TABLES, *COMMON_TABLES])
def test_pandas_frames_equal_polars_frames(name: str, slow: Report) -> None:
    import pandas as pd

    frame, ours = slow.pandas(name), slow.table(name)
    assert isinstance(frame, pd.DataFrame)
    assert list(frame.columns) == ours.columns
    assert pl.from_pandas(frame).cast(ours.schema).equals(ours)


def test_an_unknown_table_is_answered_with_those_there_are(slow: Report) -> None:
    with pytest.raises(SelectionError, match="no table 'by_host'; there are by_kind, by_pp_rank"):
        slow.table("by_host")


def test_json_and_tables_are_the_same_data(slow: Report) -> None:
    content = slow.to_dict()
    for name in PIPELINE_TABLES:
        assert content[name] == slow.table(name).to_dicts()
    for name in ("questions", "by_label", "causes", "fixes"):  # the objects carry more than the rows
        rows = slow.table(name).to_dicts()
        assert [{key: item[key] for key in row} for item, row in zip(content[name], rows, strict=True)] == rows
