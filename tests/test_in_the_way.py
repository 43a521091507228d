"""Nothing but a file of the same kind that tracekit wrote is ever replaced, whatever command writes.

Each writing command meets each thing in the way: one message, and not a byte, a time or a type has changed. What files
count as foreign is asked of the library, kind by kind.
"""

from __future__ import annotations

import gzip
import io
import os
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest

from judges.hangsim import HangJob as Job3D
from judges.hangsim import dumps, write
from judges.hangsim import run as run_job
from tests.cases import case
from tests.handmade import run, run_process, slow_frame, slow_trace
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.errors import FormatError, OutputError, StoreError
from tracekit.sources.load import load
from tracekit.store import Incoming, Store
from tracekit.trace.canonical import TRACE_FILE


@cache
def slow_job() -> PipelineJob:
    """The slow job, analysed once for all tests."""
    return PipelineJob(slow_trace())


@dataclass(frozen=True)
class Writing:
    """A command that writes. `name`: of the file. `arguments`: with the path of the file."""

    name: str
    arguments: Callable[[Path], list[Any]]


#: Of these the command names the folder.
FOLDERS = frozenset({"by_kind.csv", "report.txt", "tracekit.rules.yml"})
WRITING = {
    "synth --out": Writing("out.parquet", lambda path: ["synth", "--out", path]),
    "export --out": Writing("out.json.gz", lambda path: ["store", "export", "slow.parquet", "--out", path]),
    "whatif --parquet": Writing("out.parquet", lambda path: ["whatif", "slow.parquet", "--parquet", path]),
    "whatif --csv": Writing("by_kind.csv", lambda path: ["whatif", "slow.parquet", "--csv", path.parent]),
    "whatif --markdown": Writing("out.md", lambda path: ["whatif", "slow.parquet", "--markdown", path]),
    "whatif --html": Writing("out.html", lambda path: ["whatif", "slow.parquet", "--html", path]),
    "gate --junit": Writing(
        "out.xml", lambda path: ["gate", "slow.parquet", "--baseline", "slow.parquet", "--junit", path]
    ),
    "gate --markdown": Writing(
        "verdict.md", lambda path: ["gate", "slow.parquet", "--baseline", "slow.parquet", "--markdown", path]
    ),
    "fleet run --timings": Writing(
        "out.csv",
        lambda path: ["fleet", "run", "slow.parquet", "--out", "study", "--processes", "1", "--timings", path],
    ),
    "fleet report --html": Writing("out.html", lambda path: ["fleet", "report", "study", "--html", path]),
    "fleet culprits --csv": Writing("out.csv", lambda path: ["fleet", "culprits", "study", "--csv", path]),
    "hang --out": Writing("report.txt", lambda path: ["hang", "dumps", "--out", path.parent]),
    "alerts": Writing("tracekit.rules.yml", lambda path: ["metrics", "alerts", path.parent]),
    "import --store": Writing("jobs.store", lambda path: ["import", "slow.parquet", "--store", path]),
    "collect --out": Writing("out.parquet", lambda path: ["collect", "--no-store", "--out", path, "touch", "started"]),
}


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(path))  # a socket's path is short


def folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("kept")


def text(path: Path) -> None:
    path.write_text("step,rank\n0,0\n")


def link(path: Path) -> None:
    """To a file that would be replaced, were it named."""
    (path.parent.parent / "elsewhere").mkdir()
    target = path.parent.parent / "elsewhere" / path.name
    OWN[path.name](target)
    path.symlink_to(target)


def link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent.parent / "nothing")


THINGS = {
    "pipe": (pipe, "is a pipe"),
    "socket": (unix_socket, "is a socket"),
    "folder": (folder, "is a folder"),
    "text": (text, "move it away"),
    "link": (link, "is a link to"),
    "dangling link": (link_to_nothing, "is a link to"),
}

OWN: dict[str, Callable[[Path], object]] = {
    "out.parquet": lambda path: slow_trace().write_parquet(path),
    "out.json.gz": lambda path: slow_job().export(path),
    "out.md": lambda path: run("whatif", "slow.parquet", "--markdown", path),
    "out.xml": lambda path: run("gate", "slow.parquet", "--baseline", "slow.parquet", "--junit", path),
    "verdict.md": lambda path: run("gate", "slow.parquet", "--baseline", "slow.parquet", "--markdown", path),
    "out.html": lambda path: run("whatif", "slow.parquet", "--html", path),
    "report.txt": lambda path: run("hang", "dumps", "--out", path.parent),
    "tracekit.rules.yml": lambda path: run("metrics", "alerts", path.parent),
    "out.csv": lambda path: path.write_text("kind,machine,jobs\n"),
    "by_kind.csv": lambda path: slow_job().report.write_csv(path.parent),
    "jobs.store": lambda path: Store(path).add([Incoming(slow_trace(name="old"), "old", "by hand")]),
}


def everything(folder: Path) -> dict[str, tuple[Any, ...]]:
    """What lies below `folder`, with its type, identity, time and content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        at = path.lstat()
        content: Any = None
        if stat.S_ISREG(at.st_mode):
            content = path.read_bytes()
        elif stat.S_ISLNK(at.st_mode):
            content = path.readlink()
        time = None if stat.S_ISDIR(at.st_mode) else at.st_mtime_ns  # of a folder: probing whether it can be written
        found[str(path.relative_to(folder))] = (at.st_mode, at.st_ino, time, content)
    return found


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a trace in it and an empty one for what is written; the working directory."""
    (tmp_path / "work" / "out").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    slow_trace().write_parquet("slow.parquet")
    job = Job3D(2, 2, 2)
    write(Path("dumps"), dumps(job, [], run_job(job, [])))
    return tmp_path / "work"


@pytest.mark.parametrize("writing", WRITING)
def test_what_is_in_the_way_is_refused_and_not_touched(writing: str, work: Path) -> None:
    written = WRITING[writing]
    for thing, (make, reason) in THINGS.items():
        path = work / "out" / thing / "to" / written.name
        path.parent.mkdir(parents=True)
        make(path)
        before = everything(work)
        with case(thing):
            ran = run(*written.arguments(path))
            assert ran.code == 2, ran.err
            assert ran.message.startswith(f"tracekit: {path}: ")
            assert reason in ran.message
            assert ran.out == ""
            assert everything(work) == before


@pytest.fixture
def terminal() -> Iterator[str]:
    """A device of this user's: even the tracekit that replaced devices could not have replaced this one."""
    main, other = os.openpty()
    yield os.ttyname(other)
    os.close(other)
    os.set_blocking(main, False)
    with pytest.raises(OSError):  # nothing was written to it
        os.read(main, 1)
    os.close(main)


def test_a_device_is_refused_and_nothing_is_written_to_it(terminal: str, work: Path) -> None:
    """Formerly `--out` wrote into devices and pipes, such as /dev/stdout; only files are written now."""
    before = everything(work)
    for name, writing in WRITING.items():
        if writing.name not in FOLDERS:
            with case(name):
                ran = run(*writing.arguments(Path(terminal)))
                assert ran.code == 2, ran.err
                assert f"{terminal}: is a device" in ran.message
                assert everything(work) == before


def test_standard_output_is_refused(work: Path) -> None:
    """A link of the kernel's to a pipe that has no path."""
    ran = run_process("synth", "--out", "/dev/stdout")
    assert (ran.code, ran.out) == (2, "")
    assert ran.message == (
        "tracekit: /dev/stdout: is a pipe; tracekit writes only to regular files, choose another place"
    )


def test_a_trace_is_not_exported_over_itself(work: Path) -> None:
    before = everything(work)
    ran = run("store", "export", "slow.parquet", "--out", "./slow.parquet")
    assert ran.code == 2
    assert "is the trace to export" in ran.message
    assert everything(work) == before


@pytest.mark.parametrize("name", ["out/recorded.parquet", "out/000001.parquet"])
def test_a_simulation_replaces_simulations_and_nothing_that_was_recorded(name: str, work: Path) -> None:
    """Both are traces that tracekit wrote, but a recording cannot be made again."""
    command = ("synth", "--dp", "2", "--pp", "1", "--steps", "2")
    options = (*command, "--jobs", "2", "--out", "out") if "0001" in name else (*command, "--out", name)
    assert run(*options).code == 0
    simulated = Path(name).read_bytes()
    assert run(*options, "--seed", "7").code == 0
    assert Path(name).read_bytes() != simulated
    slow_trace().write_parquet(name)
    recorded = Path(name).read_bytes()
    ran = run(*options)
    assert (ran.code, Path(name).read_bytes()) == (2, recorded)
    assert f"{name}: not a trace that `tracekit synth` wrote, so it is not replaced" in ran.message


def test_a_recording_replaces_no_file_of_another_run(work: Path) -> None:
    """`--segments` names a folder that holds other things."""
    (work / "out" / "run.json").write_text('{"command": "mine"}')
    before = everything(work)
    ran = run("collect", "--no-store", "--segments", "out", "touch", "started")
    assert ran.code == 2
    assert "run.json: not the record of a run of `tracekit collect`, so it is not replaced" in ran.message
    assert everything(work) == before


def foreign_parquet(path: Path) -> None:
    slow_frame().write_parquet(path)


def foreign_duckdb(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE job (name VARCHAR)")


def cut(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """The first half of a file of ours."""

    def half(path: Path) -> None:
        make(path)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])

    return half


FILES: dict[str, Callable[[Path], object]] = {
    "empty": Path.touch,
    "text": text,
    "JPEG": lambda path: path.write_bytes(b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(range(256)) * 20),
    "Parquet of others": foreign_parquet,
    "half a trace": cut(lambda path: slow_trace().write_parquet(path)),
    "damaged Parquet": lambda path: path.write_bytes(b"PAR1" + b"\xff" * 100 + b"\x10\0\0\0PAR1"),
    "DuckDB of others": foreign_duckdb,
    "gzip of others": lambda path: path.write_bytes(gzip.compress(b'{"displayTimeUnit": "ms", "traceEvents": []}')),
    "CSV of others": lambda path: path.write_text("kind,slowdown\ngc,1.0\n"),
    "trace": lambda path: slow_trace().write_parquet(path),
    "table": lambda path: write_table(path),  # noqa: PLW0108 - defined below
    "timeline": lambda path: slow_job().export(path),
    "CSV table": lambda path: slow_job().report.table("by_kind").write_csv(path),
    "store": lambda path: Store(path).add([Incoming(slow_trace(name="old"), "old", "by hand")]),
}
#: What each way of writing may replace, and how the library writes it.
KINDS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "trace": ("out", lambda path: slow_trace().write_parquet(path)),
    "table": ("out", lambda path: write_table(path)),  # noqa: PLW0108 - defined below
    "timeline": ("out", lambda path: slow_job().export(path)),
    "CSV table": ("by_kind.csv", lambda path: slow_job().report.write_csv(path.parent)),
    "store": ("out", lambda path: Store(path).add([Incoming(slow_trace(), "new", "by hand")])),
}


def write_table(path: Path) -> None:
    lanes = slow_job().analysis.lanes
    assert lanes is not None
    lanes.write_parquet(path)


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_file_of_the_same_kind_is_replaced(kind: str, tmp_path: Path) -> None:
    name, write = KINDS[kind]
    for number, (file, make) in enumerate(FILES.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / name)
        before = everything(folder)
        if file == kind:
            write(folder / name)
            assert everything(folder) != before
            continue
        with pytest.raises((OutputError, StoreError)) as caught:
            write(folder / name)
        assert str(caught.value).startswith(f"{folder / name}: "), file
        after = everything(folder)
        assert after == before, file


def test_a_parquet_file_damaged_anywhere_in_its_metadata_is_replaced_or_refused(tmp_path: Path) -> None:
    """Whatever the damage, it is ours or foreign, and no error of the reader escapes."""
    slow_trace().write_parquet(tmp_path / "out")
    content = (tmp_path / "out").read_bytes()
    seen = set()
    for at in range(1, 800):
        damaged = bytearray(content)
        damaged[-at] ^= 0xFF
        seen.add(TRACE_FILE.recognises(io.BytesIO(damaged)))
    assert seen == {False, True}


def test_an_unpacked_timeline_is_still_one(tmp_path: Path) -> None:
    slow_job().export(tmp_path / "out.json")
    (tmp_path / "out.json").write_bytes(gzip.decompress((tmp_path / "out.json").read_bytes()))
    slow_job().export(tmp_path / "out.json")
    assert gzip.decompress((tmp_path / "out.json").read_bytes()).endswith(b"]}\n")


def test_a_table_of_exact_slowdowns_is_no_trace(tmp_path: Path) -> None:
    """It says what it is, so that it is not taken for a trace, and can be read as any Parquet file."""
    write_table(tmp_path / "out.parquet")
    lanes = slow_job().analysis.lanes
    assert lanes is not None
    assert pl.read_parquet(tmp_path / "out.parquet").equals(lanes.frames()["by_worker_per_step"])
    with pytest.raises(FormatError, match="a table that tracekit wrote with --parquet, not a trace"):
        load(tmp_path / "out.parquet")


#: Options and arguments that name what a command writes.
TO_A_DASH = (
    ("store", "export", "slow.parquet", "--out", "-"),
    ("store", "export", "slow.parquet", "-o-"),
    ("synth", "--out", "-"),
    ("synth", "--jobs", "2", "--out", "-"),
    ("whatif", "slow.parquet", "--html", "-"),
    ("whatif", "slow.parquet", "--csv", "-"),
    ("whatif", "slow.parquet", "--parquet", "-"),
    ("import", "slow.parquet", "--store", "-"),
    ("fleet", "run", "slow.parquet", "--out", "-"),
    ("fleet", "report", "study", "--html", "-"),
    ("fleet", "culprits", "study", "--csv", "-"),
    ("hang", "dumps", "--out", "-"),
    ("collect", "--out", "-", "--", "true"),
    ("metrics", "alerts", "-"),
)


def test_a_dash_is_no_file_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere it means stdout; a file or folder of that name would be a surprise that is hard to remove."""
    monkeypatch.chdir(tmp_path)
    slow_trace().write_parquet("slow.parquet")
    for command in TO_A_DASH:
        with case(command):
            ran = run(*command)
            assert ran.code == 2
            assert "does not mean stdout here; name a file or folder" in ran.message
            assert [path.name for path in tmp_path.iterdir()] == ["slow.parquet"]
