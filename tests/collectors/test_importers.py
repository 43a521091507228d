"""The registry, and what each importer recognises and reads."""

import json
import re

import polars as pl
import pytest

from tracekit.collectors.registry import IMPORTERS, read_any
from tracekit.errors import FormatError
from tracekit.trace import Trace

BASE_S = 1_700_000_000.0


def raw_line(metric, rank, starts, durations, *, steps="range(3, 4)", tags=None):
    """A line as NDTimeline's raw handler writes it."""
    parts = tags if tags is not None else [{} for _ in starts]
    place = (
        f"rank={rank}, dp_rank=0, ddp_rank=0, tp_rank=0, pp_rank={rank}, local_rank={rank}, ip='10.0.0.1',"
        " dp_size=1, ddp_size=1, tp_size=1, pp_size=2, world_size=2"
    )
    return (
        f"2026-01-02 03:04:05,678 - metric_name: {metric}, elapsed: {sum(durations)}, recent_elapsed_raw_parts:"
        f" {durations}, recent_since_start_raw_parts: {[BASE_S + start for start in starts]}, tags: {parts},"
        f" step_range: {steps}, world_info: WorldInfo: TopoInfo({place}) TrainingInfo(role_id=0) {{}}\n"
    )


def raw_log(tmp_path, *more):
    """Two stages, one microbatch, fused transfers."""
    path = tmp_path / "timeline_run0_raw.log"
    lines = [
        raw_line("forward-compute", 0, [0.0], [0.010]),
        raw_line("forward-send-backward-recv", 0, [0.010], [0.030]),
        raw_line("backward-compute", 0, [0.040], [0.020]),
        raw_line("forward-recv", 1, [0.000], [0.011]),
        raw_line("forward-compute", 1, [0.011], [0.010], tags=[{"_inner_global_step": 3}]),
        raw_line("backward-compute", 1, [0.021], [0.015]),
        raw_line("backward-send", 1, [0.036], [0.004]),
        raw_line("tp-allreduce", 1, [0.022], [0.001]),
        *more,
    ]
    path.write_text("".join(lines))
    return path


def test_names_are_unique_and_said():
    """`tracekit import --format` lists them."""
    assert list(IMPORTERS) == ["segments", "tracekit", "published", "ndtimeline", "ndtimeline-chrome"]
    assert all(importer.description and importer.name == name for name, importer in IMPORTERS.items())


def test_ndtimeline_raw_log(tmp_path):
    """Kinds, steps, sizes and times; fused metrics come apart, others are counted."""
    trace = read_any(raw_log(tmp_path))
    assert (trace.layout.pp, trace.layout.world_size) == (2, 2)
    assert trace.steps.tolist() == [3]
    counts = dict(
        trace.ops.group_by("rank", "kind").len().select(pl.format("{} {}", "rank", "kind"), "len").iter_rows()
    )
    assert counts == {
        "0 forward-compute": 1,
        "0 forward-send": 1,
        "0 backward-recv": 1,
        "0 backward-compute": 1,
        "1 forward-recv": 1,
        "1 forward-compute": 1,
        "1 backward-compute": 1,
        "1 backward-send": 1,
    }
    assert trace.metadata["other_metrics"] == {"tp-allreduce": 1}
    assert trace.step_starts == {3: pytest.approx(BASE_S)}
    backward = trace.ops.filter((pl.col("rank") == 0) & (pl.col("kind") == "backward-compute"))
    assert backward["start"].item() == pytest.approx(0.040, abs=1e-6)
    assert backward["duration"].item() == pytest.approx(0.020, abs=1e-6)


def test_parts_spread_over_the_step_range(tmp_path):
    """Without step tags, as many parts for every step."""
    line = raw_line("optimizer", 0, [0.1, 0.2, 0.3, 0.4], [0.01] * 4, steps="range(4, 6)")
    trace = read_any(raw_log(tmp_path, line))
    optimizers = trace.ops.filter(pl.col("kind") == "optimizer").sort("step", "seq")
    assert optimizers.select("step", "seq").rows() == [(4, 0), (4, 1), (5, 0), (5, 1)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2026 - metric_name: forward-compute, elapsed: 0.1, recent_ela\n", "line 9: cannot be read"),
        (raw_line("optimizer", 0, [0.1], [0.01], tags=[{}, {}]), "line 9: 1 durations, 1 starts and 2 tags"),
        (raw_line("optimizer", 0, [0.1], [0.01], steps="range(4, 6)"), "line 9: 1 parts do not spread evenly"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    """File, line and what to do."""
    path = raw_log(tmp_path, line)
    with pytest.raises(FormatError, match=re.escape(message)):
        read_any(path)


def test_ndtimeline_chrome_trace(tmp_path):
    """The same ops from the timeline handler's events."""
    events = [
        {"name": "forward-compute", "ph": "X", "pid": dp, "tid": 0, "ts": BASE_S * 1e6 + 10, "dur": 2000.0,
         "args": {"rank": dp, "step": 7, "tp": 0, "pp": 0}}
        for dp in range(2)
    ]  # fmt: skip
    path = tmp_path / "trace_step7_7"
    path.write_text(json.dumps([*events, {"ph": "M", "name": "thread_name", "pid": 0}]))
    trace = read_any(path)
    assert (trace.layout.dp, trace.layout.pp) == (2, 1)
    assert trace.ops.select("step", "dp_rank", "duration").rows() == [(7, 0, 0.002), (7, 1, 0.002)]


def test_canonical_parquet_comes_back(tmp_path):
    """What tracekit wrote, tracekit recognises."""
    trace = read_any(raw_log(tmp_path))
    Trace.from_frame(trace.ops, trace.layout, name="again").write_parquet(tmp_path / "job.parquet")
    assert read_any(tmp_path / "job.parquet").ops.equals(trace.ops)


def test_unknown_input_is_one_error(tmp_path):
    """What nobody recognises is taken for a trace file; an unknown name; no file."""
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(FormatError, match=r"notes\.txt: not a readable Parquet file"):
        read_any(path)
    with pytest.raises(FormatError, match="unknown format 'nsys'; known: segments, tracekit"):
        read_any(path, name="nsys")
    with pytest.raises(FormatError, match="cannot be read: No such file"):
        read_any(tmp_path / "missing")
