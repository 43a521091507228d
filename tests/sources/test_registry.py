"""The registry of sources: an entry for each kind of path, and one look for all of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

import tracekit
from tests.outputs import DOCS
from tests.test_plug_ins import IMPORTER, plug
from tracekit.base.paths import Look
from tracekit.collectors.importers import sniff
from tracekit.sources.load import source_of, with_content
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
