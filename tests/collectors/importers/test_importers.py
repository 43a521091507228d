"""The registry, and what each importer recognises and reads."""

import json
import re
import shutil
from pathlib import Path
from unittest import mock

import polars as pl
import pytest

from tests.cases import case
from tests.handmade import read_any
from tracekit.base.errors import FormatError, LayoutError
from tracekit.collectors.importers.segments import read_segments
from tracekit.collectors.record.recorder import Recorder
from tracekit.collectors.record.wire_format import Category, Flag, RuntimeOptions
from tracekit.collectors.run_directory.launchers import write_manifest
from tracekit.sources.load import load
from tracekit.sources.registry import FORMATS
from tracekit.trace.canonical import Trace
from tracekit.trace.model import TimeUnit, Worker

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
    assert list(FORMATS) == [
        "segments",
        "op-trace",
        "tracekit",
        "published",
        "ndtimeline",
        "ndtimeline-chrome",
        "megascan",
        "megascan-chrome",
        "nccl-inspector",
        "torch.profiler",
        "nsight-systems",
        "post-training",
    ]
    assert all(source.read is not None for source in FORMATS.values())


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


def test_a_bad_line_is_named(tmp_path):
    """File, line and what to do."""
    for line, message in (
        ("2026 - metric_name: forward-compute, elapsed: 0.1, recent_ela\n", "line 9: cannot be read"),
        (raw_line("optimizer", 0, [0.1], [0.01], tags=[{}, {}]), "line 9: 1 durations, 1 starts and 2 tags"),
        (raw_line("optimizer", 0, [0.1], [0.01], steps="range(4, 6)"), "line 9: 1 parts do not spread evenly"),
        (raw_line("optimizer", 0, [0.1], [0.01], tags=[7]), "line 9: damaged ("),
    ):
        path = raw_log(tmp_path, line)
        with case(message), pytest.raises(FormatError, match=re.escape(message)):
            read_any(path)


def test_lines_and_ranks_that_have_no_ops_are_passed_over(tmp_path):
    """Other lines of the log, ranks of tensor parallelism but the first, steps before the first."""
    more = raw_line("forward-compute", 0, [0.1], [0.01])
    trace = read_any(raw_log(tmp_path, "a line of the training\n", more.replace("tp_rank=0", "tp_rank=1")))
    assert trace.ops.equals(read_any(raw_log(tmp_path)).ops)
    early = raw_line("forward-compute", 0, [0.1], [0.01], tags=[{"_inner_global_step": -1}])
    assert read_any(raw_log(tmp_path, early)).steps.tolist() == [3]


def test_logs_without_an_op_are_one_error(tmp_path):
    log, timeline = tmp_path / "run_raw.log", tmp_path / "trace_step7_7"
    event = {"name": "tp-allreduce", "ph": "X", "pid": 0, "ts": 1.0, "dur": 2.0,
             "args": {"rank": 0, "step": 7, "tp": 0, "pp": 0}}  # fmt: skip
    for path, name, text, message in (
        (log, "ndtimeline", "metric\n", "no line with a metric; expected lines with `metric_name: "),
        (log, "ndtimeline", raw_line("tp-allreduce", 0, [0.1], [0.1]), "is an op kind tracekit knows: tp-allreduce"),
        (timeline, "ndtimeline-chrome", json.dumps([event | {"ph": "M"}]), "no complete event (ph X) with rank"),
        (timeline, "ndtimeline-chrome", json.dumps([event]), "is an op kind tracekit knows: tp-allreduce"),
        (timeline, "ndtimeline-chrome", json.dumps([event])[:-9], "not JSON ("),
        (
            timeline,
            "ndtimeline-chrome",
            json.dumps([event, event | {"args": {}}]),
            "event 1: damaged (KeyError('step'))",
        ),
        (timeline, "ndtimeline-chrome", json.dumps([7]), "event 0: damaged ("),
    ):
        path.write_text(text)
        with case(message), pytest.raises(FormatError, match=re.escape(message)) as raised:
            read_any(path, name=name)
        assert str(raised.value).startswith(str(path))


def test_a_log_without_the_number_of_gpus_has_those_of_its_sizes(tmp_path):
    path = raw_log(tmp_path)
    path.write_text(path.read_text().replace(", world_size=2", "").replace("dp_size=1,", "dp_size=3,"))
    assert read_any(path).layout.world_size == 3 * 2


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
    """What nobody recognises is taken for a trace file, JSON for another tool's; an unknown name; no file."""
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(FormatError, match=r"notes\.txt: a text file, not a trace"):
        read_any(path)
    path = tmp_path / "theirs.json"
    path.write_text('{"schemaVersion": 1}')
    with pytest.raises(FormatError, match=r"theirs\.json: not JSON that tracekit reads"):
        read_any(path)
    with pytest.raises(FormatError, match="unknown format 'nsys'; known: segments, op-trace, tracekit"):
        read_any(path, name="nsys")
    with pytest.raises(FormatError, match="missing: no such file or folder"):
        read_any(tmp_path / "missing")


def segments(folder, ranks, booted_ns=()):
    """A kept folder of ranks that computed three steps and told nothing about where they stand.

    `booted_ns`: for ranks on hosts of their own, when by the wall clock that host's monotonic clock was 0.
    """
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"command": ["train"], "options": {"first_step": 1}}))
    attempt = folder / "attempt-000"
    attempt.mkdir()
    for rank in range(ranks):
        recorder = Recorder(attempt, rank, 0, RuntimeOptions())
        host, boot_ns = (f"host{rank}", booted_ns[rank]) if booted_ns else ("a", 0)
        process = {"rank": rank, "world_size": ranks, "host": host, "time_ns": boot_ns + 7, "monotonic_ns": 7}
        recorder.fact("process", process)
        recorder.fact("name", [0, "forward-compute"])
        recorder.fact("name", [1, "step"])
        for step in range(3):
            begin = 10**9 + step * 1000 - boot_ns
            recorder.add((Category.COMPUTE, 0, 0, step, 0, -1, -1, begin, begin + 500, 0))
            recorder.add((Category.STEP, Flag.COMPLETE | Flag.RECORDING, 1, step, -1, -1, -1, begin, begin + 900, 0))
        recorder.start()
        recorder.close({})
    return folder


def test_sizes_of_segments_can_be_stated(tmp_path):
    """Where the ranks do not tell, a YAML file does: tp fastest, then dp, then pp."""
    folder, sizes = segments(tmp_path / "run", 8), tmp_path / "sizes.yaml"
    with pytest.raises(LayoutError, match=r"the layout of 8 ranks cannot be found.* `tracekit import --layout`"):
        read_any(folder)
    sizes.write_text("dp_size: 2\npp_size: 2\ntp_size: 2\n")
    for trace in (read_any(folder, layout=sizes), load(folder, layout=sizes).trace):
        assert (trace.layout.dp, trace.layout.pp, trace.layout.tp) == (2, 2, 2)
        assert trace.worker_ranks() == {
            Worker(0, 0): 0,
            Worker(1, 0): 2,
            Worker(0, 1): 4,
            Worker(1, 1): 6,
        }
        assert trace.metadata["layout_source"] == "options (tp fastest, then dp, then pp)"
        assert (trace.name, trace.steps.tolist()) == ("run", [1, 2])


def test_sizes_that_do_not_fit_are_one_error(tmp_path):
    """Wrong product, nothing stated, no number."""
    folder, sizes = segments(tmp_path / "run", 8), tmp_path / "sizes.yaml"
    for content, message in (
        ("dp_size: 3\n", "dp 3 x pp 1 x tp 1 = 3, but the job has 8 ranks; correct the sizes"),
        ("world_size: 8\n", "sizes.yaml: states no size; expected some of dp_size, pp_size, tp_size, vpp_size"),
        ("dp_size: many\n", "sizes.yaml: dp_size is 'many'; expected an integer of at least 1, such as `dp_size: 4`"),
    ):
        sizes.write_text(content)
        with case(content), pytest.raises(LayoutError, match=re.escape(message)):
            read_any(folder, layout=sizes)


def test_hosts_that_share_no_folder_are_placed_by_their_wall_clocks(tmp_path):
    """Two hosts, booted 0.25 s apart, begin their steps at the same moment; the metadata says how that is known."""
    sizes = tmp_path / "sizes.yaml"
    sizes.write_text("dp_size: 2\n")
    trace = read_any(segments(tmp_path / "run", 2, booted_ns=(500_000_000, 250_000_000)), layout=sizes)
    begins = trace.ops.group_by("step", "rank").agg(pl.col("start").min())
    assert begins["start"].to_list() == [0.0] * 4
    assert trace.step_starts == {1: pytest.approx(1.000001), 2: pytest.approx(1.000002)}
    assert trace.metadata["wall_clock_hosts"] == ["host1"]


def test_a_folder_that_was_copied_in_part_is_one_error(tmp_path):
    """What the manifest lists and is gone or too short is named; a damaged manifest says what to do."""
    folder = segments(tmp_path / "run", 1)
    write_manifest(folder / "attempt-000")
    (segment,) = folder.glob("attempt-000/*.ops")
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-1])
    with pytest.raises(
        FormatError, match=rf"rank-000000-00000000.ops: missing, or shorter than the {len(whole)} bytes"
    ):
        read_any(folder)
    segment.write_bytes(whole)
    assert read_any(folder).steps.tolist() == [1, 2]
    (folder / "attempt-000" / "manifest.json").write_text("{")
    with pytest.raises(FormatError, match=r"manifest.json: damaged .* delete it to read the files that are there"):
        read_any(folder)


def flip(path, offset, value):
    """Overwrite one byte of a file."""
    content = bytearray(path.read_bytes())
    content[offset] = value
    path.write_bytes(content)


def instead(path):
    """Put a directory where the file was."""
    path.unlink(missing_ok=True)
    path.mkdir()


DEEP = "[" * 100_000
RUN = '{"command": ["train"], "options": {"first_step": %s}}'
DAMAGES = {
    "category": (lambda run: flip(run / SEGMENT, 32, 77), r"\.ops: damaged, record 0 has the unknown category 77"),
    "record": (lambda run: flip(run / SEGMENT, 32 + 4 + 3, 0x7F), "a record of step 0 follows one of step 2130706432"),
    "facts": (lambda run: edit(run / FACTS, '"kind"', '"kinb"'), r"\.facts: damaged line"),
    "world size": (
        lambda run: edit(run / FACTS, '"world_size": 1', '"world_size": 1e9'),
        r"expected `int`, got `float` - at `\$\.world_size`",
    ),
    "host": (
        lambda run: edit(run / FACTS, '"host"', '"hosu"'),
        r"\.facts: line 1: the fact 'process' is .* missing required field `host`",
    ),
    "name": (
        lambda run: edit(run / FACTS, "[0, ", "[999999999999, "),
        r"the fact 'name' is \[999999999999, .*expected `int` <= 65535 - at `\$\[0\]`",
    ),
    "first step": (
        lambda run: (run / "run.json").write_text(RUN % "1e308"),
        r"run\.json: damaged or unreadable .*got `float` - at `\$\.options\.first_step`",
    ),
    "infinite step": (lambda run: (run / "run.json").write_text(RUN % "Infinity"), r"run\.json: damaged"),
    "run": (lambda run: (run / "run.json").write_text(DEEP), r"run\.json: damaged"),
    "manifest": (lambda run: (run / MANIFEST).write_text(DEEP), r"manifest\.json: damaged .* delete it"),
    "deep facts": (lambda run: (run / FACTS).write_text(DEEP + "\n"), r"\.facts: damaged line"),
    "segment folder": (lambda run: instead(run / SEGMENT), r"\.ops: cannot be read: not a regular file"),
    "facts folder": (lambda run: instead(run / FACTS), r"\.facts: cannot be read: not a regular file"),
    "manifest folder": (lambda run: instead(run / MANIFEST), r"manifest\.json: damaged"),
    "clock": (lambda run: (run / "clock-a.samples").write_text(DEEP), r"clock-a\.samples: damaged .*delete it"),
    "clock folder": (lambda run: instead(run / "clock-a.samples"), r"clock-a\.samples: cannot be read"),
}
SEGMENT, FACTS, MANIFEST = (
    f"attempt-000/{name}" for name in ("rank-000000-00000000.ops", "rank-000000.facts", "manifest.json")
)


def edit(path, old, new):
    """Replace a piece of a text."""
    content = path.read_text()
    assert old in content, content
    path.write_text(content.replace(old, new, 1))


def test_damaged_segments_are_one_error(tmp_path):
    """File, what is wrong with it, in one line that is not too long."""
    whole = segments(tmp_path / "whole", 1)
    assert read_any(whole).steps.tolist() == [1, 2]
    for damage, (spoil, message) in DAMAGES.items():
        folder = Path(shutil.copytree(whole, tmp_path / damage / "run"))
        spoil(folder)
        with case(damage):
            with pytest.raises(FormatError, match=message) as raised:
                read_any(folder)
            assert len(str(raised.value)) < 400 + len(str(tmp_path / damage))
            assert "\n" not in str(raised.value)


def test_an_empty_folder_is_told_what_it_lacks(tmp_path):
    """What a folder is known by."""
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(FormatError, match=r"not a folder that tracekit reads; .* has a run\.json"):
        read_any(tmp_path)
    with pytest.raises(FormatError, match=r"it has no run\.json"):
        read_any(tmp_path, name="segments")
    folder = segments(tmp_path / "run", 0)
    with pytest.raises(FormatError, match="fixes the unit of its times; leave out --unit"):
        read_segments(folder, unit=TimeUnit.US)
    (folder / "attempt-000").rmdir()
    with pytest.raises(FormatError, match="no rank wrote anything; record the run again"):
        read_any(folder)


def test_what_an_importer_stumbles_over_is_one_error(tmp_path, monkeypatch):
    """One line that names the path, the first of the reason, cut."""
    folder = segments(tmp_path / "run", 1)
    for error in (ValueError, KeyError, TypeError, OverflowError, RecursionError, pl.exceptions.ComputeError):
        stumble = mock.Mock(side_effect=error("x" * 1000 + "\nmore"))
        monkeypatch.setattr("tracekit.collectors.importers.segments.read_segments", stumble)
        message = f"run: damaged, or not in this format .{error.__name__}: "
        with case(error):
            with pytest.raises(FormatError, match=message) as raised:
                read_any(folder)
            assert len(str(raised.value)) < 400 + len(str(tmp_path))
            assert "\n" not in str(raised.value)
