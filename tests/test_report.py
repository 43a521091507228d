"""The report as data: the JSON object has the keys and types that docs/report-schema.md says, frames agree."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pytest

from tests.analysis.small_jobs import BACKWARD, FORWARD, of_steps
from tests.handmade import (
    FIXED_STEP_S,
    HEALTHY_STEP_S,
    IDEAL_STEP_S,
    KEPT_STEP_S,
    LAYOUT,
    SLOW_STEP_S,
    healthy_frame,
    slow_frame,
)
from tracekit.base.errors import SelectionError
from tracekit.job.pipeline import PipelineJob
from tracekit.report.pipeline import PipelineReport
from tracekit.report.plain_data import JSON_TABLES, REPORT_VERSION
from tracekit.report.tables import DIAGNOSIS_TABLES, PER_STEP_TABLES, TABLES
from tracekit.trace.canonical import Trace

SCHEMA_PAGE = Path(__file__).parent.parent / "docs" / "report-schema.md"
PLAIN: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
}


def documented() -> dict[str, dict[str, str]]:
    """Section -> key -> type, from the tables of the page; the whole object is the section "The object"."""
    sections: dict[str, dict[str, str]] = {}
    for part in re.split(r"^## ", SCHEMA_PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title = part.splitlines()[0].strip("` ")
        rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", part, flags=re.MULTILINE)
        sections[title] = {key: kind.replace("`", "").strip() for key, kind in rows}
    return sections


def check(value: Any, kind: str, sections: Mapping[str, Mapping[str, str]], where: str) -> None:
    """`value` is of the documented type, all the way down."""
    if kind.startswith("list of "):
        assert isinstance(value, list), where
        for item in value:
            check(item, kind.removeprefix("list of "), sections, f"{where}[]")
    elif kind in sections:
        assert isinstance(value, dict), where
        assert set(value) == set(sections[kind]), where
        for key, item in value.items():
            check(item, sections[kind][key], sections, f"{where}.{key}")
    elif kind.endswith(" or null") and kind.removesuffix(" or null") in sections:
        if value is not None:
            check(value, kind.removesuffix(" or null"), sections, where)
    else:
        allowed = [type_ for name in kind.split(" or ") for type_ in PLAIN[name]]
        assert isinstance(value, tuple(allowed)), f"{where} is {value!r}, documented as {kind}"
        assert not isinstance(value, bool) or bool in allowed, where


def report(ops: pl.DataFrame, asked: dict[str, tuple[str, ...]] | None = None, **more: Any) -> PipelineReport:
    return PipelineJob(Trace.from_frame(ops, LAYOUT, name="job", **more)).whatif(**(asked or {}))


@pytest.fixture(scope="module")
def slow() -> PipelineReport:
    hosts = {str(rank): f"node-{rank}" for rank in range(4)}
    asked = {"fix": ("worker=1,0",), "keep": ("worker=1,0",), "by": ("host", "dp_rank,stage")}
    return report(slow_frame((3, 8)), asked, metadata={"hosts": hosts})


@pytest.fixture(scope="module")
def healthy() -> PipelineReport:
    return report(healthy_frame())


@pytest.fixture(scope="module")
def partial() -> PipelineReport:
    """Stage 1 of DP rank 1 was never traced, and 5 s pass between the first all-gather and all else: distrusted."""
    gone = (pl.col("dp_rank") == 1) & (pl.col("pp_rank") == 1)
    ops = slow_frame((3, 8)).filter(~gone)
    late = pl.when(pl.col("kind") == "params-all-gather").then(0.0).otherwise(5.0)
    return report(ops.with_columns(pl.col("start") + late))


@pytest.fixture(scope="module")
def stalled() -> PipelineReport:
    """One step of twelve waits for data."""
    steps = [[[FORWARD, BACKWARD]] * 4 for _ in range(12)]
    steps[7] = [[("data-load", 0.3), FORWARD, BACKWARD]] * 4
    return PipelineJob(of_steps(steps)).whatif()


@pytest.mark.parametrize("name", ["slow", "healthy", "partial", "stalled"])
def test_json_is_what_the_page_documents(name: str, request: pytest.FixtureRequest) -> None:
    content = json.loads(request.getfixturevalue(name).to_json())
    check(content, "The object", documented(), "report")


def test_by_label_gives_each_value_what_keeping_it_alone_gives(slow: PipelineReport) -> None:
    """Worker (1,0) is rank 1, the only one on its host, so that host, worker and --keep are one question."""
    (costliest, *_) = slow.by_label.filter(labels="host").iter_rows(named=True)
    assert costliest["value"] == "node-1"
    assert costliest["slowdown"] == pytest.approx(KEPT_STEP_S / IDEAL_STEP_S)
    assert costliest["added_s"] == pytest.approx(KEPT_STEP_S - IDEAL_STEP_S)
    assert costliest["saved_s"] == pytest.approx(SLOW_STEP_S - FIXED_STEP_S)
    (of_worker, *_) = slow.by_label.filter(labels="dp_rank,stage").iter_rows(named=True)
    assert of_worker == costliest | {"labels": "dp_rank,stage", "value": "1,0"}


def test_the_critical_path_adds_up_to_the_step(slow: PipelineReport) -> None:
    """By kind, launch delays included; by worker, without them."""
    columns = ["recorded_s", "original_s", "ideal_s"]
    assert slow.critical_path.select(columns).sum().row(0) == pytest.approx((SLOW_STEP_S, SLOW_STEP_S, IDEAL_STEP_S))
    assert slow.critical_workers["original_s"].sum() == pytest.approx(SLOW_STEP_S)
    assert slow.critical_workers.row(0)[:2] == (1, 0)


def test_every_list_of_the_page_is_met_with_rows(
    slow: PipelineReport, stalled: PipelineReport, partial: PipelineReport
) -> None:
    """So that the comparison above compares something."""
    for key, kind in documented()["The object"].items():
        assert not kind.startswith("list of") or slow.to_dict()[key] or stalled.to_dict()[key], key
    assert partial.to_dict()["coverage"]["missing_workers"]
    assert partial.to_dict()["coverage"]["dropped"]
    assert partial.to_dict()["trust"]["reasons"]


def test_the_page_is_of_the_version_in_the_code() -> None:
    assert f"version {REPORT_VERSION}\n(`report_version`)" in SCHEMA_PAGE.read_text(encoding="utf-8")


def test_what_is_undefined_is_null(healthy: PipelineReport) -> None:
    """A healthy job loses nothing, so nothing can be shared out; equal durations have no correlation."""
    content = healthy.to_dict()
    assert content["m_w"] is None
    assert content["m_s"] is None
    assert content["forward_backward_correlation"] == [{"pp_rank": 0, "r": None}, {"pp_rank": 1, "r": None}]
    json.loads(healthy.to_json(), parse_constant=lambda text: pytest.fail(f"{text} in JSON"))


def test_a_job_that_is_replayed_needs_its_ops_no_more() -> None:
    """They are half the memory of a large job. Its report is the same without them."""
    job = PipelineJob(Trace.from_frame(slow_frame((0, 1)), LAYOUT, name="slow"))
    expected, replayed, ops = job.whatif(by=["kind"]).to_dict(), job.replayed(), weakref.ref(job.trace.ops)
    del job
    gc.collect()
    assert ops() is None
    assert replayed.whatif(by=["kind"]).to_dict() == expected


def test_tables_hold_what_was_worked_out_by_hand(slow: PipelineReport) -> None:
    worst = slow.by_worker.row(0, named=True)
    assert worst == {
        "dp_rank": 1,
        "pp_rank": 0,
        "rank": 1,
        "host": "node-1",
        "slowdown": pytest.approx(KEPT_STEP_S / IDEAL_STEP_S),
        "slowdown_approx": pytest.approx(SLOW_STEP_S / IDEAL_STEP_S),  # the smaller of S of DP rank 1 and of stage 0
    }
    first = slow.by_pp_rank.row(0, named=True)
    assert (first["fixed_step_time_s"], first["saved_s"]) == (FIXED_STEP_S, SLOW_STEP_S - FIXED_STEP_S)
    assert slow.by_dp_rank["slowdown"].to_list() == pytest.approx([1.0, SLOW_STEP_S / IDEAL_STEP_S])
    # DP rank 1 ideal is an ideal lane beside a faster one; DP rank 0 ideal still waits for DP rank 1.
    assert slow.by_dp_rank["saved_s"].to_list() == pytest.approx([0.0, SLOW_STEP_S - IDEAL_STEP_S])
    lost_s = pytest.approx(SLOW_STEP_S - HEALTHY_STEP_S)
    assert slow.by_step.row(1) == (8, pytest.approx(SLOW_STEP_S / IDEAL_STEP_S), 15.5, 15.5, 13.5, lost_s)
    assert slow.questions["step_time_s"].to_list() == [HEALTHY_STEP_S, KEPT_STEP_S]
    # On stage 0 the forwards of 1, 1, 2, 2 s meet backwards of 2, 2, 4, 4 s; on stage 1 nothing varies.
    assert slow.forward_backward_correlation["r"].to_list() == [pytest.approx(1.0), None]


def test_tables_per_step_average_to_the_tables_of_the_job(slow: PipelineReport) -> None:
    """Both steps have the same ideal time, so the mean of the ratios is the ratio of the means."""
    for table, keys in (
        ("by_kind", ["kind"]),
        ("by_pp_rank", ["pp_rank"]),
        ("by_dp_rank", ["dp_rank"]),
        ("by_worker", ["dp_rank", "pp_rank"]),
    ):
        per_step = slow.table(f"{table}_per_step")
        assert per_step["step"].unique().sort().to_list() == [3, 8]
        means = per_step.group_by(keys).agg(pl.col("slowdown").mean()).sort(keys)
        whole = slow.table(table).select(*keys, "slowdown").sort(keys)
        assert means.select(keys).rows() == whole.select(keys).rows()
        assert means["slowdown"].to_list() == pytest.approx(whole["slowdown"].to_list())


def test_a_kind_keeps_its_launch_delays_to_itself(partial: PipelineReport) -> None:
    """5 s lie between gathering the parameters and what follows: the first forward of stage 0 waits, and the first
    forward-recv of stage 1 is posted late."""
    delays = dict(partial.by_kind.select("kind", "launch_delay_slowdown").iter_rows())
    assert delays["forward-compute"] > 1.2
    assert delays["optimizer"] == 1
    assert not partial.attribution.trust.trustworthy


def test_what_takes_a_replay_for_every_dp_rank_is_null_where_that_is_too_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracekit.analysis.attribution.attribute.COSTLIEST_BY_DP_RANK", 0)
    dear = report(slow_frame((3,))).by_dp_rank
    for column in ("launch_delay_slowdown", "fixed_step_time_s", "saved_s"):
        assert dear[column].to_list() == [None, None]
    assert dear["slowdown"].to_list() == pytest.approx([1.0, SLOW_STEP_S / IDEAL_STEP_S])


@pytest.mark.parametrize("name", TABLES + PER_STEP_TABLES)
def test_pandas_frames_equal_polars_frames(name: str, slow: PipelineReport) -> None:
    frame, ours = slow.pandas(name), slow.table(name)
    assert isinstance(frame, pd.DataFrame)
    assert list(frame.columns) == ours.columns
    assert pl.from_pandas(frame).cast(ours.schema).equals(ours)


def test_an_unknown_table_is_answered_with_those_there_are(slow: PipelineReport) -> None:
    with pytest.raises(SelectionError, match="no table 'by_host'; there are by_kind, by_pp_rank"):
        slow.table("by_host")


def test_json_and_tables_are_the_same_data(slow: PipelineReport) -> None:
    content = slow.to_dict()
    for name in JSON_TABLES:
        assert content[name] == slow.table(name).to_dicts()
    for name in DIAGNOSIS_TABLES:  # the objects carry more than the rows
        rows = slow.table(name).to_dicts()
        assert [{key: item[key] for key in row} for item, row in zip(content[name], rows, strict=True)] == rows
