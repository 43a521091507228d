"""What is no whole export of Nsight Systems, or a recording of another kind, says so in one sentence."""

import sqlite3
import struct
from contextlib import closing

import pytest

from tests.cases import case
from tests.collectors.importers.nsys.exports import GEMM, TWO_RANKS, export, kernel, span
from tracekit.base.errors import FormatError
from tracekit.base.paths import Look
from tracekit.collectors.importers.kineto.nsys_file import NO_ID, _decoded
from tracekit.sources.load import load, wrong_source
from tracekit.sources.source import Content


def other_database(path):
    with closing(sqlite3.connect(path)) as file:
        file.execute("CREATE TABLE places (url TEXT)")


def cut(path):
    path.write_bytes(export(path, TWO_RANKS * 99).read_bytes()[:20_000])


def overwritten(path):
    content = bytearray(export(path, TWO_RANKS * 99).read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)


def without(rows, column, kind):
    """The rows, those of one kind of activity without a column."""
    return [
        (table, {name: value for name, value in row.items() if name != column or not table.endswith(kind)})
        for table, row in rows
    ]


def beside(ending):
    def write(path):
        export(path, TWO_RANKS)
        path.with_name(path.name + ending).write_bytes(b"pages")

    return write


BAD = {
    "not SQLite": ("job.sqlite", lambda path: path.write_text("hello"), "not a SQLite file, which an export of Nsight"),
    "another database": ("job.sqlite", other_database, "a SQLite file, but not an export of Nsight Systems"),
    "another ending": ("job.db", other_database, "a SQLite file, but not an export of Nsight Systems"),
    "no tables": ("job.sqlite", lambda path: export(path, []), "without GPU activity: .* record with `nsys profile"),
    "no GPU op": ("job.sqlite", lambda path: export(path, [span("a", 0, 5)]), "without GPU activity: no kernel, copy"),
    "cut": ("job.sqlite", cut, "cut off, 20,000 of .* bytes are there; copy it again, or export it again: `nsys"),
    "overwritten": ("job.sqlite", overwritten, "damaged \\(.*malformed\\); copy it again, or export it again: `nsys"),
    "text for a number": (
        "job.sqlite", lambda path: export(path, [kernel(GEMM, 0, 5, deviceId="a")]),
        "damaged \\(a column of numbers holds something else\\); copy it again, or",
    ),
    "no start": (
        "job.sqlite", lambda path: export(path, without(TWO_RANKS, "start", "KERNEL")),
        "the table CUPTI_ACTIVITY_KIND_KERNEL lacks the column start; export it again: `nsys",
    ),
    "no end of calls": (
        "job.sqlite", lambda path: export(path, without(TWO_RANKS, "end", "RUNTIME")),
        "the table CUPTI_ACTIVITY_KIND_RUNTIME lacks the column end; export it again: `nsys",
    ),
    "in WAL mode": ("job.sqlite", beside("-wal"), "still being written, as job.sqlite-wal beside it shows; wait, or"),
    "being written": ("job.sqlite", beside("-journal"), "still being written, as job.sqlite-journal beside it shows"),
    "report": (
        "a job.nsys-rep", lambda path: path.write_bytes(b"\0\1"), "`nsys export --type sqlite '.*/a job.nsys-rep'`$",
    ),
    "XLA": ("host.xplane.pb", lambda path: path.write_bytes(b"\n\7host"), "XLA's profiler, which is not read; record"),
    "Chakra": ("rank0.et", lambda path: path.write_bytes(b"\n\7host"), "execution trace of Chakra, which is not read"),
}  # fmt: skip


def test_what_cannot_be_read_is_one_clear_sentence(tmp_path):
    for name, (file, write, message) in BAD.items():
        path = tmp_path / name / file
        path.parent.mkdir()
        write(path)
        with case(name), pytest.raises(FormatError, match=message) as raised:
            load(path)
        assert str(raised.value).startswith(f"{path}: ")
        assert "\n" not in str(raised.value)


def test_a_payload_that_is_cut_says_nothing():
    nothing = _decoded(b"", {})
    assert set(nothing) == {NO_ID}
    whole = struct.pack("<4Qq", 0, 7, 0, 0, 3)
    schemas = {7: [(1, "<q", 0)]}
    assert _decoded(whole, schemas) == _decoded(whole.hex(), schemas) == [NO_ID, 3, *nothing[2:]]
    for damaged in (whole[:20], whole[:36], whole.hex()[:-1], "text"):
        assert _decoded(damaged, schemas) == nothing


def test_a_folder_of_reports_says_how_to_convert_one(tmp_path):
    (tmp_path / "rank0.nsys-rep").write_bytes(b"\0\1")
    with pytest.raises(FormatError, match=r"rank0.nsys-rep is a report of Nsight Systems; convert it: `nsys export"):
        load(tmp_path)


def test_a_file_that_wrote_its_pages_back_is_read_in_a_folder_that_cannot_be_written(tmp_path):
    """Files in WAL mode stay so; SQLite itself would create files beside it."""
    path = export(tmp_path / "job.sqlite", TWO_RANKS)
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA journal_mode = WAL")
    tmp_path.chmod(0o555)
    try:
        assert load(path).whatif().to_dict()["job"]["gpu_ops"] == 4
        assert [one.name for one in tmp_path.iterdir()] == ["job.sqlite"]
    finally:
        tmp_path.chmod(0o755)


def test_other_commands_call_an_export_what_it_is(tmp_path):
    path = export(tmp_path / "job.sqlite", TWO_RANKS)
    words = str(wrong_source(Look(path), Content.DUMPS))
    assert words == f"{path}: an export of Nsight Systems, not a folder of dumps; type `tracekit whatif {path}`"
