"""Bad input: one clear message that says what, where and what to do, the right exit code, nothing half-written.

Every kind of bad input is a row of a table. Rows of COMMANDS run the command; rows of LOADED only differ in what the
door says, so they call the library.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import tracekit
from tests.cases import case
from tests.handmade import (
    HEALTHY_STEP_S,
    LAYOUT,
    OPS_PER_STEP,
    SLOW_STEP_S,
    Ran,
    command,
    healthy_frame,
    little_space,
    published_columns,
    run,
    run_process,
    slow_frame,
    slow_trace,
    write_canonical,
)
from tracekit.base.errors import FormatError, GraphError, LayoutError, TraceError, TracekitError
from tracekit.trace.facts import MOST_MISSING

SIZES = LAYOUT.to_dict()
YAML = "dp_size: 2\npp_size: 2\nworld_size: 4\n"
Argument = str | bytes | Path


def changed(**columns: Any) -> pl.DataFrame:
    """The slow job with these columns replaced."""
    return slow_frame((0, 1)).with_columns(**columns)


def first_row(column: str, value: Any) -> pl.DataFrame:
    """The slow job with another value in row 3 of one column."""
    frame = slow_frame((0, 1)).with_row_index("row")
    return frame.with_columns(pl.when(pl.col("row") == 3).then(value).otherwise(column).alias(column)).drop("row")


def write(name: str, content: bytes) -> Callable[[Path], list[Argument]]:
    def make(folder: Path) -> list[Argument]:
        (folder / name).write_bytes(content)
        return [name]

    return make


def canonical(ops: pl.DataFrame, layout: dict[str, Any] | None = None, **header: Any) -> Callable[[Path], list[Any]]:
    def make(folder: Path) -> list[Argument]:
        write_canonical(folder / "trace.parquet", ops, layout, **header)
        return ["trace.parquet"]

    return make


def published(yaml: str | bytes, ops: pl.DataFrame | None = None) -> Callable[[Path], list[Any]]:
    def make(folder: Path) -> list[Argument]:
        published_columns(slow_frame((0, 1)) if ops is None else ops).write_parquet(folder / "trace.parquet")
        (folder / "meta.yaml").write_bytes(yaml if isinstance(yaml, bytes) else yaml.encode())
        return ["trace.parquet", "--layout", "meta.yaml"]

    return make


def truncated(folder: Path) -> list[Argument]:
    write_canonical(folder / "trace.parquet", slow_frame((0, 1)))
    content = (folder / "trace.parquet").read_bytes()
    (folder / "trace.parquet").write_bytes(content[: len(content) // 2])
    return ["trace.parquet"]


def damaged(folder: Path) -> list[Argument]:
    """The first data page overwritten, the footer whole: polars panics on that."""
    write_canonical(folder / "trace.parquet", slow_frame((0, 1)))
    content = bytearray((folder / "trace.parquet").read_bytes())
    content[4:40] = bytes(36)
    (folder / "trace.parquet").write_bytes(content)
    return ["trace.parquet"]


def directory(folder: Path) -> list[Argument]:
    (folder / "trace.parquet").mkdir()
    return ["trace.parquet"]


def pipe(folder: Path) -> list[Argument]:
    os.mkfifo(folder / "trace.parquet")
    return ["trace.parquet"]


def failing_read(_: Path) -> list[Argument]:
    """Reading address 0 of a process is an I/O error; permission bits would not stop root."""
    return ["/proc/self/mem"]


def broken_non_utf8(folder: Path) -> list[Argument]:
    (folder / os.fsdecode(b"\xff\xfe.parquet")).write_bytes(b"")
    return [b"\xff\xfe.parquet"]


def raw_metadata(folder: Path, text: str) -> list[Argument]:
    slow_frame().write_parquet(folder / "trace.parquet", metadata={"tracekit": text})
    return ["trace.parquet"]


def without_metadata(folder: Path) -> list[Argument]:
    slow_frame().write_parquet(folder / "trace.parquet")
    return ["trace.parquet"]


def canonical_with_layout(folder: Path) -> list[Argument]:
    slow_trace().write_parquet(folder / "trace.parquet")
    (folder / "meta.yaml").write_text(YAML)
    return ["trace.parquet", "--layout", "meta.yaml"]


@dataclass(frozen=True)
class Row:
    """One bad input: how to make it, and what the message must say."""

    name: str
    make: Callable[[Path], list[Any]]
    says: tuple[str, ...]


COMMANDS = (
    Row("no such file", lambda _: ["gone.parquet"], ("gone.parquet: no such file or folder",)),
    Row("empty file", write("empty.parquet", b""), ("empty.parquet", "is empty", "expected a Parquet trace")),
    Row("truncated Parquet", truncated, ("trace.parquet", "not a readable Parquet file", "record or copy it again")),
    Row("damaged Parquet", damaged, ("trace.parquet", "not a readable Parquet file", "record or copy it again")),
    Row("not Parquet", write("text.parquet", b"step,rank\n0,0\n"), ("text.parquet", "not a readable Parquet file")),
    Row("directory", directory, ("trace.parquet", "an empty folder, not a trace")),
    Row("pipe", pipe, ("trace.parquet", "a pipe or device", "save it as one first")),
    Row("unreadable file", failing_read, ("/proc/self/mem", "expected a Parquet trace")),
    Row("non-UTF-8 path", broken_non_utf8, ("\\udcff\\udcfe.parquet", "is empty")),
    Row(
        "missing column",
        canonical(slow_frame().drop("duration")),
        ("trace.parquet", "column 'duration' is missing", "expected step, rank"),
    ),
    Row(
        "wrong type",
        canonical(changed(step=pl.col("step").cast(pl.String))),
        ("trace.parquet", "column 'step' has type String", "expected an integer", "convert the column"),
    ),
    Row(
        "null duration",
        canonical(first_row("duration", None)),
        ("column 'duration', row 3: None", "expected a number", "drop or repair the row"),
    ),
    Row(
        "NaN duration",
        canonical(first_row("duration", float("nan"))),
        ("column 'duration', row 3: nan", "expected a finite number of seconds"),
    ),
    Row("negative duration", canonical(first_row("duration", -0.5)), ("column 'duration', row 3: -0.5", "0 or more")),
    Row("NaN start", canonical(first_row("start", float("nan"))), ("column 'start', row 3: nan", "finite")),
    Row(
        "unknown op kind",
        canonical(first_row("kind", pl.lit("fwd"))),
        ("column 'kind', row 3: 'fwd'", "known kinds: forward-compute"),
    ),
    Row(
        "duplicate op",
        canonical(pl.concat([slow_frame(), slow_frame()[3:4]])),
        ("rows 3 and 48 are the same op: forward-send of worker (0,0) in step 0, seq 0", "remove the duplicate"),
    ),
    Row(
        "rank outside the layout",
        canonical(first_row("dp_rank", 7)),
        ("column 'dp_rank', row 3: 7", "the layout says dp 2, so at most 1", "correct the layout or the trace"),
    ),
    Row(
        "layout that contradicts the trace",
        canonical(slow_frame(), SIZES | {"pp": 4, "world_size": 8}),
        ("the layout says pp 4", "no op of pp_rank 2, 3", "correct the layout"),
    ),
    Row(
        "send without its recv",
        canonical(slow_frame().filter(~((pl.col("kind") == "forward-recv") & (pl.col("seq") == 1)))),
        ("step 0, dp_rank 0, stage 1", "1 forward-recv ops for 2 forward-compute ops", "--ignore-steps"),
    ),
    Row("zero rows", canonical(slow_frame().clear()), ("trace.parquet", "0 rows", "record at least one step")),
    Row(
        "nothing takes time",
        canonical(changed(start=0.0, duration=0.0)),
        ("broken: step 0 takes 0 s", "expected ops that take time", "--ignore-steps"),
    ),
    Row("YAML that is none", published("dp_size: [2"), ("meta.yaml", "not YAML", "`dp_size: 4`")),
    Row("huge size", published(YAML.replace("2", "1000000000", 1)), ("meta.yaml", "dp_size is 1000000000")),
)


def test_the_command_says_what_is_wrong_and_leaves_nothing(tmp_path: Path, capfd: Any) -> None:
    for row in COMMANDS:
        folder = tmp_path / row.name
        folder.mkdir()
        arguments = row.make(folder)
        before = sorted(folder.rglob("*"))
        with case(row.name):
            ran = run("whatif", *arguments, "--json", cwd=folder)
            assert ran.code == 2
            assert ran.out == ""
            assert ran.message.startswith("tracekit: ")
            for part in row.says:
                assert part in ran.message
            assert sorted(folder.rglob("*")) == before
            assert capfd.readouterr() == ("", "")  # nor did a library write past Python's streams


LOADED = (
    Row("metadata that is no JSON", lambda folder: raw_metadata(folder, "{"), ("not a JSON object", "write the trace")),
    Row("metadata nested without end", lambda folder: raw_metadata(folder, "[" * 100_000), ("not a JSON object",)),
    Row("metadata with an endless number", lambda folder: raw_metadata(folder, "9" * 5000), ("not a JSON object",)),
    Row("another schema version", canonical(slow_frame(), schema_version=9), ("schema version 9", "and 2 (op traces)")),
    Row("no metadata", without_metadata, ("no tracekit metadata", "--layout meta.yaml")),
    Row("unknown size", canonical(slow_frame(), SIZES | {"mp": 2}), ("unknown size 'mp'", "known: cp, dp")),
    Row("size that is text", canonical(slow_frame(), SIZES | {"dp": "2"}), ("dp is '2'", "expected an integer")),
    Row("size that is a boolean", canonical(slow_frame(), SIZES | {"dp": True}), ("dp is True",)),
    Row("size below one", canonical(slow_frame(), SIZES | {"tp": 0}), ("tp is 0",)),
    Row("endless size", canonical(slow_frame(), SIZES | {"pp": 10**9}), ("pp is 1000000000", "1 to 1048576")),
    Row("world too small", canonical(slow_frame(), SIZES | {"world_size": 6}), ("world_size 6 is not a multiple of",)),
    Row("many stages", canonical(slow_frame(), SIZES | {"pp": 50, "world_size": 100}), ("pp_rank 2, 3, 4", "9 ...")),
    Row("vpp without chunks", canonical(changed(chunk=None), SIZES | {"vpp": 2}), ("vpp 2", "no op has a chunk")),
    Row("vpp above the chunks", canonical(slow_frame(), SIZES | {"vpp": 3}), ("vpp 3", "largest chunk", "is 0")),
    Row("step beyond int32", canonical(first_row("step", 2**31)), ("column 'step', row 3: 2147483648", "fits Int32")),
    Row("seq with a gap", canonical(first_row("seq", 2**31 - 1)), ("row 3: 2147483647", "seq to run from 0")),
    Row("negative microbatch", canonical(first_row("microbatch", -1)), ("'microbatch', row 3: -1", "null where")),
    Row("start as no time at all", canonical(changed(start=pl.col("start") + 5e8)), ("'start', row", "of the step")),
    Row("duration without bound", canonical(first_row("duration", 1e308)), ("'duration', row 3: 1e+308",)),
    Row("infinite start", canonical(first_row("start", float("inf"))), ("'start', row 3: inf", "finite")),
    Row("list column", canonical(changed(start=pl.concat_list("start"))), ("'start' has type List(Float64)",)),
    Row("struct as kind", canonical(changed(kind=pl.struct("kind"))), ("'kind' has type Struct", "'forward-compute'")),
    Row("bytes as kind", canonical(changed(kind=pl.lit(b"gc"))), ("'kind' has type Binary",)),
    Row("null kind", canonical(first_row("kind", None)), ("column 'kind', row 3: None", "expected an op kind")),
    Row("boolean step", canonical(changed(step=pl.col("step") > 0)), ("'step' has type Boolean",)),
    Row("two ranks of one worker", canonical(first_row("rank", 3)), ("worker (0,0)", "by rank 3 (row 3)", "by rank 0")),
    Row("YAML list", published("- dp_size\n"), ("meta.yaml", "expected a YAML mapping", "found list")),
    Row("YAML empty", published(""), ("expected a YAML mapping", "found NoneType")),
    Row("YAML not UTF-8", published(b"\xff\xfe\x00"), ("meta.yaml", "not YAML")),
    Row("YAML nested without end", published("a: " + "[" * 50_000), ("meta.yaml", "nested too deeply")),
    Row("YAML date that is none", published(YAML + "day: 2026-13-45\n"), ("not YAML (month must be in 1..12)",)),
    Row("YAML number without end", published(YAML + "x: " + "9" * 5000), ("meta.yaml", "not YAML (Exceeds the limit")),
    Row(
        "YAML of too small a world",
        published("dp_size: 2\npp_size: 2\nworld_size: 3\n"),
        ("meta.yaml: layout: world_size 3 is not a multiple of dp 2 x pp 2",),
    ),
    Row("YAML without a size", published("dp_size: 2\npp_size: 2\n"), ("world_size is missing", "expected dp_size")),
    Row("YAML size as text", published(YAML.replace("2", "'2'", 1)), ("dp_size is '2'", "`dp_size: 4`")),
    Row("YAML size true", published(YAML.replace("2", "true", 1)), ("dp_size is True", "expected an integer")),
    Row("YAML size negative", published(YAML.replace("2", "-2", 1)), ("dp_size is -2", "from 1 to 1048576")),
    Row("YAML size null", published(YAML.replace("2", "", 1)), ("dp_size is None",)),
    Row("published: kind", published(YAML, first_row("kind", pl.lit("fwd"))), ("column 'optype', row 3: 'fwd'",)),
    Row("published: time", published(YAML, first_row("start", None)), ("column 'start_ts', row 3: None",)),
    Row("published: stage", published(YAML, first_row("pp_rank", 5)), ("column 'stage', row 3: 5", "pp 2")),
    Row("canonical with --layout", canonical_with_layout, ("column 'stage' is missing", "leave out --layout")),
)  # fmt: skip


def test_the_door_says_what_is_wrong(tmp_path: Path) -> None:
    for row in LOADED:
        folder = tmp_path / row.name.replace(":", "")
        folder.mkdir()
        trace, *layout = row.make(folder)
        with case(row.name):
            with pytest.raises(TracekitError) as caught:
                tracekit.load(folder / trace, layout=folder / layout[1] if layout else None)
            message = str(caught.value)
            for part in row.says:
                assert part in message
            assert len(message) < 1000
            assert message.startswith(str(folder))


def test_each_cause_has_its_class(tmp_path: Path) -> None:
    for make, error in (
        (write("trace.parquet", b""), FormatError),
        (canonical(first_row("duration", -1.0)), TraceError),
        (canonical(slow_frame(), SIZES | {"pp": 4, "world_size": 8}), LayoutError),
    ):
        make(tmp_path)
        with pytest.raises(error):
            tracekit.load(tmp_path / "trace.parquet")
    canonical(slow_frame().filter(pl.col("kind") != "backward-send"))(tmp_path)
    with pytest.raises(GraphError):
        tracekit.load(tmp_path / "trace.parquet").whatif()


def test_a_file_cut_or_flipped_anywhere_is_an_error_of_ours_or_loads(tmp_path: Path, capfd: Any) -> None:
    """Damage anywhere in the file never escapes as another exception."""
    path = tmp_path / "trace.parquet"
    slow_trace().write_parquet(path)
    content = path.read_bytes()
    random = np.random.default_rng(7)
    for _ in range(150):
        damage = bytearray(content)
        at = int(random.integers(len(damage)))
        if random.integers(2):
            del damage[at:]
        else:
            damage[at] ^= int(random.integers(1, 256))
        path.write_bytes(damage)
        try:
            tracekit.load(path)
        except TracekitError as error:
            assert str(path) in str(error)  # noqa: PT017 - most damage is found, some hits a value that can be
    capfd.readouterr()


# ---- odd, but fine


def report(ran: Ran) -> dict[str, Any]:
    assert ran.code == 0, ran.err
    content: dict[str, Any] = json.loads(ran.out)
    return content


def whatif(folder: Path, ops: pl.DataFrame, **header: Any) -> dict[str, Any]:
    """`whatif` in this process."""
    write_canonical(folder / "trace.parquet", ops, **header)
    content: dict[str, Any] = tracekit.load(folder / "trace.parquet").whatif().to_dict()
    return content


def test_one_step_is_enough(tmp_path: Path) -> None:
    write_canonical(tmp_path / "trace.parquet", slow_frame((5,)))
    ran = run("whatif", tmp_path / "trace.parquet")
    assert ran.code == 0
    words = " ".join(ran.out.split())
    assert "only step 5 was traced" in words
    assert "in the one step recorded" in words
    assert "of the one 15.50 s step recorded" in words
    assert "one step does not show what returns" in words
    assert "in every step" not in words
    assert "a day" not in words
    assert whatif(tmp_path, slow_frame((5,)))["step_time_s"]["recorded"] == SLOW_STEP_S


def test_a_job_of_which_a_rank_is_missing_is_balanced_as_far_as_it_was_recorded(tmp_path: Path) -> None:
    gone = (pl.col("dp_rank") == 1) & (pl.col("pp_rank") == 1)
    report = whatif(tmp_path, healthy_frame(range(6)).filter(~gone))
    assert report["answer"]["headline"].startswith("no straggler among the ranks that were recorded")
    assert "No straggler among the ranks that were recorded" in [one["title"] for one in report["causes"]]


def test_a_missing_rank_is_left_out_and_said(tmp_path: Path) -> None:
    """Without stage 1 of DP rank 1, DP rank 0 alone is replayed, and the report says what is missing."""
    gone = (pl.col("dp_rank") == 1) & (pl.col("pp_rank") == 1)
    write_canonical(tmp_path / "trace.parquet", slow_frame((0, 1)).filter(~gone))
    coverage = report(run("whatif", tmp_path / "trace.parquet", "--json"))["coverage"]
    assert coverage == {
        "workers_expected": 4,
        "workers_traced": 3,
        "worker_steps_expected": 8,
        "worker_steps_traced": 6,
        "missing_workers": [{"dp_rank": 1, "pp_rank": 1}],
        "gaps": [],
        "slowdown_as_recorded": None,
        "hidden_slowdown": 15.5 / 10,  # the healthy step, 11.25 s, without collectives (0.5 s each) and clip (0.25 s)
        "left_out_steps": [],
        "dropped": [{"step": 0, "dp_rank": 1}, {"step": 1, "dp_rank": 1}],
        "inferred_transfers": False,
    }
    shown = " ".join(run("whatif", tmp_path / "trace.parquet").out.split())
    assert "3 of 4 workers traced (missing dp 1, stage 1)" in shown
    assert "left out 2 DP-rank-steps that lack a stage (DP rank 1)" in shown


def test_a_clock_off_by_10_ms_changes_nothing(tmp_path: Path) -> None:
    """Transfers here take 250 ms, so a clock 10 ms behind leaves every one above zero."""
    late = (pl.col("dp_rank") == 1) & (pl.col("pp_rank") == 1)
    ops = changed(start=pl.col("start") - pl.when(late).then(0.01).otherwise(0.0))
    write_canonical(tmp_path / "trace.parquet", ops)
    found = report(run("whatif", tmp_path / "trace.parquet", "--json"))
    assert found["trust"]["clamped_transfers"] == found["trust"]["clamped_delays"] == 0
    assert found["trust"]["trustworthy"]
    assert found["step_time_s"]["recorded"] == SLOW_STEP_S


def test_a_clock_off_by_more_than_a_transfer_is_set_right_and_said(tmp_path: Path) -> None:
    """300 ms behind, both recvs, the second backward send and clip of that worker end 50 ms before they can."""
    late = (pl.col("dp_rank") == 1) & (pl.col("pp_rank") == 1)
    ops = changed(start=pl.col("start") - pl.when(late).then(0.3).otherwise(0.0))
    found = whatif(tmp_path, ops)
    assert found["trust"]["clamped_transfers"] == 0
    assert found["step_time_s"] == {"recorded": 15.5, "original": 15.5, "ideal": 13.5, "with_delays": 15.5}
    assert [(row["dp_rank"], row["pp_rank"], row["offset_s"]) for row in found["clocks"]["offsets"]] == [
        (1, 1, pytest.approx(-0.3))
    ]
    shown = " ".join(run("whatif", tmp_path / "trace.parquet").out.split())
    assert "rank 3 behind by 300.0 ms" in shown
    published = report(run("whatif", tmp_path / "trace.parquet", "--method", "published", "--json"))
    assert published["trust"]["clamped_transfers"] == 4 * 2


@pytest.mark.slow
def test_a_path_that_is_not_utf8_works(slow_file: Path) -> None:
    slow_file.rename(os.fsdecode(os.fsencode(slow_file.parent) + b"/\xff.parquet"))
    found = run_process("whatif", b"\xff.parquet", "--csv", b"\xfe", "--parquet", b"\xfd.parquet", cwd=slow_file.parent)
    assert found.code == 0
    assert sorted(os.fsencode(path.name) for path in slow_file.parent.iterdir()) == [
        b"\xfd.parquet",
        b"\xfe",
        b"\xff.parquet",
    ]
    exported = run("store", "export", b"\xff.parquet", "-o", b"\xfc.json.gz", cwd=slow_file.parent)
    assert exported.code == 0
    assert "Wrote \\udcfc.json.gz" in exported.out


def test_a_huge_gap_between_steps_costs_nothing_and_a_huge_microbatch_is_only_a_label(tmp_path: Path) -> None:
    largest = 2**31 - 1
    ops = changed(
        step=pl.when(pl.col("step") == 1).then(largest).otherwise(0),
        microbatch=pl.when(pl.col("microbatch") == 1).then(largest).otherwise("microbatch"),
    )
    found = whatif(tmp_path, ops)
    assert [row["step"] for row in found["by_step"]] == [0, largest]
    assert found["step_time_s"]["recorded"] == SLOW_STEP_S


def test_many_untraced_dp_ranks_cost_no_memory(tmp_path: Path) -> None:
    """Two DP ranks of 65,536 traced: analysed, with the coverage said."""
    found = whatif(tmp_path, slow_frame((0, 1)), layout=SIZES | {"dp": 2**16, "world_size": 2**17})
    assert found["coverage"]["workers_expected"] == 2**17
    assert len(found["coverage"]["missing_workers"]) == MOST_MISSING


def test_any_writer_of_parquet_will_do(tmp_path: Path) -> None:
    ops = slow_frame((0, 1))
    for name, written in {
        "string": ops.with_columns(pl.col("kind").cast(pl.String)),
        "categorical": ops.with_columns(pl.col("kind").cast(pl.Categorical)),
        "enum": ops.with_columns(pl.col("kind").cast(pl.Enum(["never", *ops["kind"].unique().to_list()]))),
        "extra columns": ops.with_columns(pl.lit("more").alias("note"), pl.struct("step").alias("nested")),
        "uint64": ops.with_columns(pl.col("step", "rank", "dp_rank", "pp_rank", "seq").cast(pl.UInt64)),
        "float32": ops.with_columns(pl.col("start", "duration").cast(pl.Float32)),
        "unsorted rows": ops.sample(fraction=1, shuffle=True, seed=3),
        "column order": ops.select(reversed(ops.columns)),
    }.items():
        with case(name):
            found = tracekit.load(write_canonical(tmp_path / "trace.parquet", written)).attribution
            assert (found.recorded_s, found.original_s, found.ideal_s) == (15.5, 15.5, 13.5)


def test_a_published_trace_written_by_pandas_works(tmp_path: Path) -> None:
    ops = published_columns(healthy_frame((0, 1))).to_pandas()
    ops["optype"] = ops["optype"].astype(object)
    ops.to_parquet(tmp_path / "trace.parquet")
    (tmp_path / "meta.yaml").write_text(YAML + "run_id: 2026-01-31\n")
    job = tracekit.load(tmp_path / "trace.parquet", layout=tmp_path / "meta.yaml")
    assert job.whatif().step_time_s.recorded == HEALTHY_STEP_S
    assert job.trace.ops.height == 2 * OPS_PER_STEP
    assert job.trace.metadata["run_id"] == "2026-01-31"


# ---- hostile names

HOSTILE = {
    "markup": ("<script>alert(1)</script>[/red][bold]", "<script>alert(1)</script>[/red][bold]"),
    "escape sequences": ("\x1b[31mred\x1b]0;title\x07", "\\x1b[31mred\\x1b]0;title\\x07"),
    "newlines": ("two\nlines\r\u2028three", "two\\nlines\\r\\u2028three"),
    "direction": ("abc\u202edef", "abc\\u202edef"),
    "surrogate": ("half\udcff", "half\\udcff"),
    "long": ("x" * 100_000, "x" * 77 + "..."),
}


def test_a_hostile_name_is_shown_harmless(tmp_path: Path) -> None:
    """The same holds where a name is the job's, a host's or a metadata key."""
    for kind, (name, shown) in HOSTILE.items():
        metadata = {name: 1, "hosts": {"0": name, "nobody": name}}
        write_canonical(tmp_path / "trace.parquet", slow_frame(), name=name, metadata=metadata)
        for verb in (["whatif"], ["store", "list"]):
            with case((kind, *verb)):
                ran = run(*verb, "trace.parquet", cwd=tmp_path, env={"COLUMNS": "200"})
                assert ran.code == 0, ran.err
                assert shown in ran.out
                assert not [char for char in ran.out if not char.isprintable() and char != "\n"]


def test_a_hostile_name_in_an_error_stays_on_one_line(tmp_path: Path) -> None:
    ops = slow_frame().filter(pl.col("kind") != "backward-send")
    write_canonical(tmp_path / "trace.parquet", ops, name="two\nlines\x1b[31m" + "x" * 10_000)
    message = run("whatif", tmp_path / "trace.parquet").message
    assert "two\\nlines\\x1b[31m" in message
    assert len(message) < 1000


# ---- interrupts, full disks, closed pipes


def test_ctrl_c_while_reading_exits_with_130(slow_file: Path) -> None:
    """The layout is a named pipe: once it can be opened for writing, the command is reading it."""
    pipe = slow_file.parent / "meta.yaml"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        command("whatif", slow_file, "--layout", pipe, "--csv", slow_file.parent / "tables"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with open(pipe, "wb"):
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert out == b""
    assert err.decode().split() == ["interrupted"]
    assert sorted(path.name for path in slow_file.parent.iterdir()) == ["meta.yaml", "slow.parquet"]


#: `tracekit`, which gets a SIGINT in the first write to its temporary file, after it has said what is in the folder.
INTERRUPTED = """
import os, signal, sys
from pathlib import Path

def opening(event, arguments):
    if event == "open" and ".tracekit." in str(arguments[0]):
        sys.setprofile(calling)

def calling(_frame, event, called):
    if event == "c_call" and called.__name__ == "write":
        sys.setprofile(None)
        print(*os.listdir(Path(sys.argv[-1]).parent), flush=True)
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(opening)
from tracekit.__main__ import main
main()
"""


def test_ctrl_c_while_writing_leaves_no_file(slow_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "store", "export", slow_file, "-o", folder / "out.json.gz"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 130
    assert done.stdout.startswith(".tracekit.")
    assert done.stderr.splitlines()[-1] == "interrupted"
    assert list(folder.iterdir()) == []


def test_a_disk_that_fills_up_leaves_no_half_file(slow_file: Path) -> None:
    for arguments, at_fault in (
        (("store", "export", "slow.parquet", "-o", "out.json.gz"), "out.json.gz"),
        (("whatif", "slow.parquet", "--parquet", "out.parquet"), "out.parquet"),
        (("whatif", "slow.parquet", "--csv", "."), "by_"),
    ):
        with case(arguments):
            with little_space(300):
                ran = run(*arguments, cwd=slow_file.parent)
            assert ran.code == 2
            assert at_fault in ran.message
            assert "cannot be written: File too large" in ran.message
            assert list(slow_file.parent.iterdir()) == [slow_file]


def test_a_full_disk_behind_stdout_is_said(slow_file: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command("whatif", slow_file, "--json"), stdout=full, stderr=subprocess.PIPE, check=False, timeout=300
        )
    assert done.returncode == 2
    assert "No space left on device" in Ran(2, "", done.stderr.decode()).message


@pytest.mark.slow
def test_a_closed_pipe_ends_in_silence_with_the_exit_code_of_the_result(slow_file: Path) -> None:
    failing = ("whatif", "slow.parquet", "--fail-on", "slowdown>1.1")
    for arguments, code in (
        (("whatif", "slow.parquet"), 0),
        (("whatif", "--help"), 0),
        (failing, 3),
        ((*failing, "--json"), 3),
    ):
        process = subprocess.Popen(
            command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=slow_file.parent
        )
        assert process.stdout is not None
        process.stdout.close()
        with case(arguments):
            assert process.communicate(timeout=300)[1] == b""
            assert process.returncode == code


@pytest.mark.slow
@pytest.mark.parametrize("stream", [1, 2], ids=["stdout", "stderr"])
def test_a_stream_closed_from_the_start_changes_no_exit_code(stream: int, slow_file: Path) -> None:
    """As cron or a service manager may start it."""
    closing = f'exec "$@" {stream}>&-'
    done = subprocess.run(
        ["sh", "-c", closing, "sh", *command("whatif", slow_file, "--fail-on", "slowdown>1.1")],
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 3
    assert b"Traceback" not in done.stderr


def test_a_terminal_without_unicode_shows_escapes(slow_file: Path) -> None:
    ran = run_process("whatif", slow_file, env={"PYTHONIOENCODING": "ascii"})
    assert ran.code == 0
    assert "\\u2593" in ran.out
