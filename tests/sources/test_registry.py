"""The registry of sources: an entry for each kind of path, and one look for all of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

import tracekit
from tests.outputs import DOCS
from tests.test_plug_ins import IMPORTER, plug
from tracekit.base.paths import Look
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
