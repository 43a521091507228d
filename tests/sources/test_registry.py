"""The registry of sources: an entry for each kind of path, and one look for all of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

import polars as pl
import pytest

import tracekit
from tests.analysis.rl.logs import lines
from tests.analysis.rl.logs import write as write_rows
from tests.handmade import slow_trace
from tests.outputs import DOCS
from tests.test_plug_ins import IMPORTER, plug
from tracekit.analysis.job.pipeline_report import TABLE_KEY
from tracekit.base.errors import FormatError, SelectionError
from tracekit.base.paths import Look
from tracekit.collectors.importers import sniff
from tracekit.sources.load import load_trace, source_of, with_content, wrong_source
from tracekit.sources.registry import SOURCES
from tracekit.sources.source import Content

SAMPLES = Path(__file__).parents[2] / "sample_traces"
#: What a plug-in returns for a job of any shape.
OP_TRACE = """
    import polars, tracekit
    ops = polars.DataFrame({"rank": [0], "kind": ["load"], "start": [0.0], "duration": [2.0]})
    return tracekit.OpTrace(ops, "theirs")
"""


def test_names_are_unique_and_pages_are_there() -> None:
    names = [source.name for source in SOURCES]
    assert len(set(names)) == len(names)
    pages = {source.page.partition("#")[0] for source in SOURCES} - {""}
    assert [page for page in pages if not (DOCS / page).exists()] == []


def test_whatever_holds_jobs_can_be_read_and_nothing_else_can() -> None:
    assert {source.content for source in SOURCES if source.read is not None} == {Content.TRACE}
    assert all(source.read is not None for source in SOURCES if source.content is Content.TRACE)


#: What the first bytes of a file of each format hold, all of which it takes to recognise one.
MARKS = {
    sniff.is_dump: ('{"version"', '"pg_config"', '"entries"'),
    sniff.is_ndtimeline_log: ("metric_name: forward", "recent_since_start_raw_parts: [1.0]"),
    sniff.is_ndtimeline_chrome: ('[{"ph"', '"rank"', '"step"', '"tp"', '"pp"'),
    sniff.is_megascan_chrome: ('[{"ph"', '"cname": "thread_state_running"', '"iteration"'),
    sniff.is_inspector: ('{"a"', '"header"', '"inspector_output_format_version"'),
    sniff.is_profile: ("[", '"ph"', '"cat": "cpu_op"'),
}


def test_a_format_is_recognised_by_all_of_its_marks_and_by_no_fewer(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for recognises, marks in MARKS.items():
        path.write_text(", ".join(marks))
        assert [other for other in MARKS if other(Look(path))] == [recognises]
        for left_out in marks:
            path.write_text(", ".join(mark for mark in marks if mark != left_out))
            assert not recognises(Look(path)), left_out


def test_traces_below_a_folder_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Of a profiler and of Nsight Systems; a file of the same name with something else in it is none."""
    for name in ("rank10.json", "rank2.json", "rank2/1.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"traceEvents": []}')
    (tmp_path / "rank3.sqlite").write_bytes(sniff.SQLITE)  # damaged, which its reader reports
    (tmp_path / "rank4.json").write_text("{}")
    names = [str(path.relative_to(tmp_path)) for path in sniff.traces_in(tmp_path)]
    assert names == ["rank2.json", "rank2/1.json", "rank3.sqlite", "rank10.json"]


def test_a_folder_is_recognised_by_a_file_in_it(tmp_path: Path) -> None:
    """Files of flight recorders by what is in them, MegaScan's by their names."""
    assert not sniff.has_dumps(Look(tmp_path))
    (tmp_path / "nccl_trace_rank_0").write_text(", ".join(MARKS[sniff.is_dump]))
    (tmp_path / "benchmark-data-0-pipeline-1-tensor.json").write_text("[]")
    assert sniff.has_dumps(Look(tmp_path))
    assert not sniff.is_megascan(Look(tmp_path))
    (tmp_path / "benchmark-data-0-pipeline-1-tensor-0.json").write_text("[]")
    assert sniff.is_megascan(Look(tmp_path))
    assert not sniff.is_inspector(Look(tmp_path))
    (tmp_path / "inspector.log").write_text(", ".join(MARKS[sniff.is_inspector]))
    assert sniff.is_inspector(Look(tmp_path))


def test_a_file_is_read_once_to_recognise_it(tmp_path: Path) -> None:
    path = Path(shutil.copy(next((SAMPLES / "gpu_slow_input").glob("*.json.gz")), tmp_path))
    with mock.patch.object(Path, "open", autospec=True, side_effect=Path.open) as opened:
        source = with_content(Content.TRACE, Look(path))
    assert source is not None
    assert source.name == "torch.profiler"
    assert [call.args[0] for call in opened.call_args_list].count(path) == 1


def test_a_path_that_is_two_things_is_the_one_that_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    path.write_text(
        "step:1 - timing_s/gen:6.0 - timing_s/step:9.0\n[rank1]: Watchdog caught collective operation timeout\n"
    )
    look = Look(path)
    sources = (source_of(look), with_content(Content.TRACE, look), with_content(Content.DUMPS, look))
    assert [source and source.name for source in sources] == ["hang-log", "post-training", "hang-log"]


def test_a_plug_in_may_bring_a_job_of_any_shape(tmp_path: Path, site_packages: Path) -> None:
    plug(site_packages, "importers", odd=IMPORTER.replace('\n    raise RuntimeError("not today")', OP_TRACE))
    path = tmp_path / "run.odd"
    path.write_text("odd bytes")
    assert tracekit.load(path).whatif().step_times().recorded.tolist() == [2.0]


def test_what_is_no_source_of_a_command_is_told_with_the_way_to_one(tmp_path: Path) -> None:
    """A file of anybody, a table of tracekit, traces in a folder, an empty folder."""
    theirs, table, folder = tmp_path / "theirs.parquet", tmp_path / "table.parquet", tmp_path / "traces"
    pl.DataFrame({"a": [1]}).write_parquet(theirs)
    pl.DataFrame({"slowdown": [1.0]}).write_parquet(table, metadata={TABLE_KEY: "by_worker_per_step"})
    folder.mkdir()
    for name in ("one", "two"):
        slow_trace().write_parquet(folder / f"{name}.parquet")
    trace = folder / "one.parquet"
    way = {
        Content.DUMPS: "name the folder with the flight-recorder dumps of all ranks",
        Content.STUDY: "`tracekit fleet run TRACES --out STUDY` makes one",
        Content.STORE: "`tracekit import TRACE --store STORE` makes one",
        Content.RUN: "watch the folder of `tracekit collect --segments`, a log of RL post-training, or a store",
    }
    for wanted, words in way.items():
        assert str(wrong_source(Look(theirs), wanted)) == f"{theirs}: a Parquet file, not {wanted}; {words}"
        read = f"{table}: a table that tracekit wrote with --parquet, not {wanted}; read it with polars or pandas"
        assert str(wrong_source(Look(table), wanted)).startswith(read)
        ran = f"{trace}: a trace, not {wanted}; type `tracekit whatif"
        assert str(wrong_source(Look(trace), wanted)).startswith(ran)
        assert str(wrong_source(Look(folder), wanted)) == (
            f"{folder}: a folder of traces, not {wanted}; name one: `tracekit whatif {trace}`, or study all:"
            f" `tracekit fleet run {folder} --out STUDY`"
        )
        assert wrong_source(Look(tmp_path / "traces" / ".."), wanted) is not None
    assert wrong_source(Look(trace), Content.TRACE) is None


def test_a_reader_by_name_says_what_it_needs(tmp_path: Path) -> None:
    slow_trace().write_parquet(tmp_path / "trace.parquet")
    with pytest.raises(FormatError, match=r"a published trace needs its layout; add --layout meta\.yaml"):
        tracekit.load(tmp_path / "trace.parquet", importer="published")
    with pytest.raises(FormatError, match="a canonical trace contains its layout; leave out --layout"):
        tracekit.load(tmp_path / "trace.parquet", importer="tracekit", layout=tmp_path / "meta.yaml")
    with pytest.raises(SelectionError, match=r"--kernel-class is for traces of torch\.profiler"):
        load_trace(tmp_path / "trace.parquet", kernel_classes=["mine=computation"])
    with pytest.raises(SelectionError, match="no path given; expected a trace, a folder or a store"):
        load_trace()


def test_logs_of_post_training_are_read_together(tmp_path: Path) -> None:
    for node in (0, 1):
        write_rows(tmp_path / f"node-{node}.jsonl", lines(4)[node::2])
    whole = tracekit.load(write_rows(tmp_path / "all.jsonl", lines(4)))
    parts = load_trace(tmp_path / "node-0.jsonl", tmp_path / "node-1.jsonl")
    assert parts.report.step_time_s == whole.report.step_time_s
    slow_trace().write_parquet(tmp_path / "trace.parquet")
    with pytest.raises(SelectionError, match=r"2 traces: only files of torch\.profiler can form one job together"):
        load_trace(tmp_path / "node-0.jsonl", tmp_path / "trace.parquet")
