"""Timelines of `tracekit export` read back: the recorded one is the trace it was made of."""

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.handmade import LAYOUT, slow_frame, slow_trace
from tests.properties import examples
from tracekit.base.errors import FormatError, LayoutError, TraceError
from tracekit.cli import commands
from tracekit.collectors.importers.registry import IMPORTERS, read_any
from tracekit.job.load import load
from tracekit.job.pipeline import PipelineJob
from tracekit.synth import SynthSpec, parse_cause, synthesize
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout

#: What the file is written with, seconds, and what floats of some seconds in microseconds lose.
RESOLUTION_S = 2e-12


def exported(trace: Trace, folder: Path, **options) -> Path:
    """The file `tracekit export` writes of a trace."""
    path = folder / "timeline.json.gz"
    PipelineJob(trace).export(path, **options)
    return path


def assert_same(found: Trace, expected: Trace) -> None:
    """All of a trace, times as far as they are written."""
    times = ["start", "duration"]
    assert found.ops.drop(times).equals(expected.ops.drop(times))
    for column in times:
        assert (found.ops[column] - expected.ops[column]).abs().max() < RESOLUTION_S
    assert (found.layout, found.name) == (expected.layout, expected.name)
    assert dict(found.step_starts) == dict(expected.step_starts)
    assert dict(found.metadata) == dict(expected.metadata)


@examples(6)
@given(
    layout=st.builds(Layout, dp=st.integers(1, 3), pp=st.integers(1, 3), tp=st.integers(1, 2)),
    steps=st.integers(1, 3),
    seed=st.integers(0, 2**16),
    cause=st.sampled_from([None, "missing-ranks", "python-gc", "clock-offset"]),
)
def test_what_was_exported_comes_back(tmp_path_factory, layout, steps, seed, cause):
    """Ops in their order, layout, name, step starts and metadata, even of DP ranks that cannot be replayed."""
    causes = () if cause is None or layout.dp == 1 else (parse_cause(cause),)
    trace = synthesize(SynthSpec(layout=layout, steps=steps, microbatches=4, seed=seed, causes=causes, name="job"))
    assert_same(read_any(exported(trace, tmp_path_factory.mktemp("job"))), trace)


def test_some_steps_come_back_as_those_steps(tmp_path):
    """Step 5 of three, with its own start; the name can be any text."""
    starts = {2: 100.25, 5: 131.5, 9: 150.0}
    name = '"otherData": {"\\\n</script>'
    trace = slow_trace((2, 5, 9), name=name, step_starts=starts, metadata={"gpu": "H200", "hosts": {"0": "a"}})
    found = read_any(exported(trace, tmp_path, steps=[5]))
    expected = slow_trace((5,), name=name, step_starts={5: 131.5}, metadata=trace.metadata)
    assert_same(found, expected)


def test_an_unpacked_and_reformatted_file_is_the_same(tmp_path):
    """As an editor or `jq` leaves it."""
    trace = slow_trace((0, 1))
    content = json.loads(gzip.decompress(exported(trace, tmp_path).read_bytes()))
    path = tmp_path / "pretty.json"
    path.write_text(json.dumps(content, indent=2))
    assert_same(read_any(path), trace)


def test_analysis_and_store_take_the_file(tmp_path):
    """`whatif` says of the file what it says of the trace, `import` stores it."""
    trace = slow_trace((0, 1))
    path = exported(trace, tmp_path)
    assert load(path).whatif().slowdown == pytest.approx(15.5 / 13.5)
    done = CliRunner().invoke(commands, ["import", str(path), "--store", str(tmp_path / "jobs.duckdb")])
    assert "Imported slow job (96 ops)" in done.output


def test_the_head_is_enough_to_recognise_it(tmp_path):
    """A file cut off behind its first lines is still known for what it is; other files are not."""
    path = exported(slow_trace((0, 1)), tmp_path)
    importer = IMPORTERS["tracekit-chrome"]
    path.write_bytes(path.read_bytes()[:600])
    assert importer.sniff(path)
    for name, content in (("a.json", b"[{}]"), ("b.json.gz", b"\x1f\x8bxxxxxxxxxx"), ("c", b""), ("d", b"\xff\xfe")):
        (tmp_path / name).write_bytes(content)
        assert not importer.sniff(tmp_path / name)
    assert not importer.sniff(tmp_path)


def changed(**header) -> str:
    """A whole file with other values in its header; None leaves a key out."""
    other = {
        "tracekit_timeline": 1,
        "name": "job",
        "layout": LAYOUT.to_dict(),
        "step_starts": {},
        "metadata": {},
        "timelines": ["recorded"],
        "workers": [[0, 0, 0], [0, 1, 2], [1, 0, 1], [1, 1, 3]],
        "step_starts_us": {"0": 0.0},
    } | header
    kept = {key: value for key, value in other.items() if value is not None}
    return json.dumps({"otherData": kept, "traceEvents": []})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"traceEvents": []}', "tracekit_timeline is None, but this tracekit reads"),
        (
            '{"otherData": {"version": "kineto"}, "traceEvents": []}',
            "tracekit_timeline is None, but this tracekit reads",
        ),
        (changed(tracekit_timeline=2), "tracekit_timeline is 2, but this tracekit reads version 1; export it again"),
        (changed(workers=None), "not a complete timeline .*missing required field `workers`"),
        (changed(workers=[["a", 0, 0]]), "not a complete timeline .*Expected `int`"),
        (changed(timelines=["ideal"]), "damaged, .*'recorded' is not in list"),
        (changed(layout={"dp": 0}), "layout: dp is 0; expected"),
        ('{"otherData": [1], "traceEvents": []}', "tracekit_timeline is None"),
        (changed()[:-4], "not a complete timeline"),
        (changed().replace("[]}", "[5]}"), "not a complete timeline"),
        (changed(), r"no ops \(0 rows\)"),
        ("PAR1 \xff", "not a complete timeline"),
    ],
)
def test_another_or_a_damaged_file_is_one_error(tmp_path, content, message):
    """It names the file and says what is wrong."""
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises((TraceError, LayoutError), match=f"bad.json: {message}"):
        read_any(path, name="tracekit-chrome")


def test_a_truncated_gzip_stream_is_one_error(tmp_path):
    """Cut anywhere behind its head, or with a wrong byte."""
    path = exported(slow_trace((0, 1)), tmp_path)
    content = path.read_bytes()
    for damaged in (content[:-1], content[: len(content) // 2], content[:900] + b"\0\0\0\0" + content[904:]):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match=r"timeline.json.gz: its gzip stream is damaged"):
            read_any(path)
    path.write_bytes(gzip.compress(b"\xff\xfe"))
    with pytest.raises(FormatError, match=r"timeline.json.gz: not a complete timeline"):
        read_any(path, name="tracekit-chrome")
    with pytest.raises(FormatError, match="cannot be read: No such file"):
        read_any(tmp_path / "missing.json", name="tracekit-chrome")


def test_a_slice_that_was_tampered_with_is_named(tmp_path):
    """A worker or step the header does not know has no rank and no start."""
    text = gzip.decompress(exported(slow_trace((0,)), tmp_path).read_bytes()).decode()
    path = tmp_path / "edited.json"
    for old, new, column in (('"step":0', '"step":7', "start"), ('"dp_rank":1', '"dp_rank":9', "rank")):
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(TraceError, match=rf"edited.json: column '{column}', row \d+: None"):
            read_any(path)


def test_a_layout_is_refused(tmp_path):
    """The file has its own."""
    path = exported(Trace.from_frame(slow_frame((0,)), LAYOUT, name="job"), tmp_path)
    with pytest.raises(FormatError, match="carries its layout; leave out --layout"):
        read_any(path, name="tracekit-chrome", layout=tmp_path / "meta.yaml")
