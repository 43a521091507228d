"""The packages that work in folders of others reach files through `Contained`; what it promises about writing."""

from __future__ import annotations

import ast
import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tracekit
from tests.cases import case
from tests.handmade import findings_of, slow_trace
from tests.reports import hang_with
from tracekit.base.contained import Contained, sync_names
from tracekit.base.errors import StoreError, UnreadableFileError, UnsafeFileError
from tracekit.live.receivers import DeliveryLog
from tracekit.store import Incoming, Store
from tracekit.store.care import damages, repair
from tracekit.store.incidents import IncidentChange, read_changes, write_change

SOURCE = Path(tracekit.__file__).parent
FILES = [
    *sorted((SOURCE / "store").glob("*.py")),
    SOURCE / "fleet" / "study.py",
    *(SOURCE / "live" / name for name in ("receivers.py", "run.py")),
]
#: Methods of paths and functions of `os` that reach files by a path.
BY_PATH = {
    *("chmod", "chown", "copyfile", "copytree", "exists", "glob", "hardlink_to", "is_dir", "is_file", "iterdir"),
    *("link", "listdir", "lstat", "makedirs", "mkdir", "move", "open", "read_bytes", "read_text", "readlink", "remove"),
    *("removedirs", "rename", "rglob", "rmdir", "rmtree", "scandir", "stat", "symlink_to", "touch", "truncate"),
    *("unlink", "utime", "walk", "write_bytes", "write_text"),
}
#: Names of what has the methods of `Contained`.
CONTAINED = ("contained", "folder", "beside", "study")
#: Calls that reach no file of a store, or the store's folder itself, which the user has named.
ALLOWED = {
    "catalogue.py": {"files.joinpath.read_text"},  # of the package
    "catalogue_file.py": {"shutil.copyfile"},  # between descriptors
    "folder.py": {
        "self.path.exists",
        "self.path.lstat",
        "self.path.readlink",
        "self.path.iterdir",
        *("Path.mkdir", "path.parent.mkdir"),  # folders of its own, for copies from object storage
    },
    "store.py": {
        "self.path.exists",
        "self.path.is_dir",
        "path.is_dir",
        "self.path.stat",
        "remote.exists",
        "writer.remove",
    },
    "receivers.py": {"OPENER.open"},  # of an address
    "study.py": {
        *("self.path.mkdir", "self.path.iterdir", "open"),  # of a descriptor
        *("os.walk", "path.read_bytes"),  # the code of the package
    },
}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression; calls without their arguments."""
    if isinstance(node, ast.Call):
        return dotted(node.func)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def by_path(source: str) -> Iterator[str]:
    """The calls in a source that reach files by a path."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            owner, _, last = name.rpartition(".")
            if last in BY_PATH and not (owner.endswith(CONTAINED) or owner.startswith("Contained")):
                yield name


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_of_stores_and_studies_are_reached_through_the_one_module(path: Path) -> None:
    assert set(by_path(path.read_text())) <= ALLOWED.get(path.name, set())


def test_a_name_leads_nowhere_but_into_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "outside").write_text("secret")
    for name in ("", ".", "..", "../outside", "a/..", "./a", "/etc/passwd"):
        for reach in (Contained(folder).read, Contained(folder).status, Contained(folder).remove):
            with case((name, reach.__name__)), pytest.raises(UnsafeFileError, match="not a name in"):
                reach(name)
    assert (tmp_path / "outside").read_text() == "secret"


def test_what_is_no_file_is_named_as_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contained = Contained(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "file").write_text("12345678")
    os.mkfifo(tmp_path / "pipe")
    for name, said in (
        ("folder", "folder: is a folder where a file of tracekit belongs; move it away"),
        ("pipe", "pipe: is a pipe where a file of tracekit belongs; move it away"),
        ("link", "link: is a link to folder, which is not followed"),
        ("link/file", "link: is a link to folder, which is not followed"),
    ):
        with case(name), pytest.raises(UnsafeFileError, match=said):
            contained.read(name)
    assert list(contained.unsafe("link")) == list(contained.unsafe(""))[:1]
    monkeypatch.setattr("tracekit.base.contained.MOST_READ_BYTES", 7)
    with pytest.raises(UnreadableFileError, match="file: has 8 bytes, more than 7; move it away"):
        contained.read("file")


def test_a_file_that_cannot_take_its_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("b")
    (tmp_path / "c").write_text("c")
    with pytest.raises(UnsafeFileError):
        Contained(tmp_path).put("a", b"new")
    with pytest.raises(FileExistsError):
        Contained(tmp_path).rename("b", "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
    assert (tmp_path / "c").read_text() == "c"


def test_the_calls_that_would_bypass_it_are_seen() -> None:
    source = "(store / 'jobs').glob('*/*'); path.rename(x); os.unlink(p); shutil.rmtree(p); open(p); folder.open('a')"
    assert list(by_path(source)) == ["?.glob", "path.rename", "os.unlink", "shutil.rmtree", "open"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "jobs.store")
    made.add([Incoming(slow_trace((0,), name="a"), "a", "by hand")])
    return made


def failing(monkeypatch: pytest.MonkeyPatch, *, number: int, error: int) -> list[bool]:
    """Let the `number`-th fsync fail; returns whether each was of a folder."""
    synced, fsync = list[bool](), os.fsync

    def fails(handle: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(handle).st_mode))
        if len(synced) == number + 1:
            raise OSError(error, os.strerror(error))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fails)
    return synced


#: Until the catalogue is replaced; the last one syncs that.
SYNCS = 5


@pytest.mark.parametrize("number", range(SYNCS - 1))
def test_a_disk_that_fails_to_sync_leaves_the_store_as_it_was(
    number: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = (store.path / "catalog.duckdb").read_bytes()
    with monkeypatch.context() as patch:
        synced = failing(patch, number=number, error=errno.EIO)
        with pytest.raises(StoreError, match=r"cannot be written: Input/output error"):
            store.append(Incoming(slow_trace((0,), name="b"), "b", "by hand"))
    assert len(synced) == number + 1
    assert (store.path / "catalog.duckdb").read_bytes() == catalogue
    assert list(damages(store)) == []
    synced = failing(monkeypatch, number=SYNCS, error=errno.EIO)
    assert store.append(Incoming(slow_trace((0,), name="b"), "b", "by hand")) == 0
    assert len(synced) == SYNCS


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOTSUP])
def test_a_system_of_files_that_cannot_sync_names_is_no_error_and_one_that_cannot_sync_content_is(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    failing(monkeypatch, number=0, error=error)
    Contained(tmp_path).sync_folder()
    failing(monkeypatch, number=0, error=error)
    with pytest.raises(OSError, match=os.strerror(error)):
        Contained(tmp_path).sync("file")


def test_a_folder_whose_names_cannot_be_synced_for_an_error_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, number=0, error=errno.EIO)
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match="Input/output error"):
        sync_names(folder)
    os.close(folder)


def test_a_line_of_which_a_part_was_written_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time, the disk takes ten bytes."""
    write, limits = os.write, iter([10])
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[: next(limits, None)]))
    write_change(tmp_path, 3, IncidentChange(1.0, "ann", note="n"))
    assert read_changes(tmp_path, 3) == (IncidentChange(1.0, "ann", note="n"),)


def test_a_line_that_can_only_be_written_in_part_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:10]))
    with pytest.raises(OSError, match="only a part of a line was written"):
        write_change(tmp_path, 3, IncidentChange(1.0, "ann", note="n"))


def test_a_torn_line_does_not_take_the_next_one_with_it(store: Store) -> None:
    write_change(store.path, 3, IncidentChange(1.0, "ann"))
    path = store.path / "handled" / "3"
    path.write_bytes(path.read_bytes() + b'{"at":2.0,"by":"b')
    write_change(store.path, 3, IncidentChange(3.0, "cy"))
    assert [change.by for change in read_changes(store.path, 3)] == ["ann", "cy"]
    log = DeliveryLog(store, "http://h/")
    log.note([(1, "opened")])
    (delivered,) = (store.path / "told").iterdir()
    delivered.write_bytes(delivered.read_bytes() + b"after 1")
    log.note([(2, "closed")])
    assert log._read_log() == ({1: "opened", 2: "closed"}, 1)


@pytest.mark.parametrize(
    "line",
    ["x y", "1", "1 2 3", "-1 0", "1 ../../../outside", f"{10**30} 0", "\0", "1 0\r", "\N{ARABIC-INDIC DIGIT ONE} 0"],
)
def test_a_damaged_line_in_the_note_of_unfinished_windows_is_named_and_stops_nobody(line: str, store: Store) -> None:
    note = store.path / "unfinished"
    note.write_bytes(f"{line}\n7 0\n".encode())
    (store.path / "jobs" / "7").mkdir()
    (store.path / "jobs" / "7" / "0.parquet").touch()
    (problem,) = (found for found in damages(store) if "notes no window" in found)
    assert problem.startswith(f"{note}: ")
    assert store.append(Incoming(slow_trace((0,), name="b"), "b", "by hand")) == 0
    assert (list(damages(store)), note.exists(), (store.path / "jobs" / "7").exists()) == ([], False, False)
    note.write_bytes(f"{line}\n".encode())
    assert repair(store, findings_of) == [f"dropped; {problem}"]
    assert list(damages(store)) == []


@pytest.mark.parametrize(
    "line",
    [b"3", b"[]", b'{"at":"x","by":"a"}', b'{"at":1e300,"by":"a"}', b'{"at":1,"by":5}', b'{"at":1,"by":"\xff"}',
     b'{"at":1,"by":"a","x":' + b"[" * 9999, b'{"at":1,"by":"a","note":"' + b"n" * 1001 + b'"}',
     b'{"at":1,"by":"a","muted_until":-1}'],
)  # fmt: skip
def test_a_change_with_a_field_that_cannot_be_is_left_out(line: bytes, tmp_path: Path) -> None:
    write_change(tmp_path, 3, IncidentChange(1.0, "ann"))
    with (tmp_path / "handled" / "3").open("ab") as file:
        file.write(line + b"\n")
    write_change(tmp_path, 3, IncidentChange(2.0, "bob"))
    assert [change.by for change in read_changes(tmp_path, 3)] == ["ann", "bob"]


#: A report on a hang, as JSON has it.
REPORT = hang_with().to_dict()


@pytest.mark.parametrize(
    "wrong",
    [{"found_at": "x"}, {"found_at": 1e300}, {"found_at": float("nan")}, {"job": None}, {"lines": [1]}, {"report": []},
     {"report": {}}, {"report": REPORT | {"culprits": [{"rank": 1}]}}, {"report": REPORT | {"headline": 3}},
     {"report": REPORT | {"world_size": -8}}, {"report": REPORT | {"stacks": [{"ranks": [1], "frames": "abc"}]}},
     {"format": "other"}],
)  # fmt: skip
def test_a_report_on_a_hang_with_a_field_that_cannot_be_is_left_out_by_name(
    wrong: dict[str, object], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.add_hang("live", ["HANG"], hang_with())
    right = {"format": "tracekit-hang", "job": "live", "found_at": 1.0, "lines": [], "report": REPORT}
    damaged = store.path / "hangs" / "1.json"
    damaged.write_text(json.dumps(right))
    assert len(store.hangs()) == 2
    damaged.write_text(json.dumps(right | wrong))
    assert len(store.hangs()) == 1
    assert f"left out: {damaged}: not a report on a hang" in capsys.readouterr().err
    (problem,) = damages(store)
    assert repair(store, findings_of) == [f"removed; {problem}"]


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def read_only(*_: object, **__: object) -> int:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def of_another_user(*_: object, **__: object) -> int:
    raise OSError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize(
    ("module", "name", "fails", "words"),
    [
        (
            fcntl,
            "flock",
            no_locks,
            "its file system has no locks (No locks available), so writers could not take turns",
        ),
        (Contained, "open", read_only, "cannot be written: Read-only file system; choose another place"),
        (Contained, "open", of_another_user, "cannot be written: Permission denied; choose another place"),
    ],
)
def test_a_store_that_cannot_be_written_says_why(
    module: object, name: str, fails: Callable[..., object], words: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, name, fails)
        with pytest.raises(StoreError) as refused:
            store.append(Incoming(slow_trace((0,), name="b"), "b", "by hand"))
    assert words in str(refused.value)
    assert [job.name for job in store.jobs()] == ["a"]
