"""Files are written whole or not at all, and only in the place of a file of the same kind that tracekit wrote."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tracekit.base.atomic_write import TEMPORARY_PREFIX, Kind, replacing, starting_with
from tracekit.base.errors import OutputError

NOTE = Kind("a note of ours", starting_with(b"note"))


def test_a_file_is_replaced_only_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("note: old")

    def stop_halfway() -> None:
        with replacing(path, NOTE) as temporary:
            temporary.write_text("note: half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        stop_halfway()
    assert path.read_text() == "note: old"
    with replacing(path, NOTE) as temporary:
        temporary.write_text("note: new")
        assert path.read_text() == "note: old"
    assert path.read_text() == "note: new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "out", NOTE):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o640


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    """A result that was made private stays private."""
    (tmp_path / "out").write_text("note")
    (tmp_path / "out").chmod(0o600)
    with replacing(tmp_path / "out", NOTE) as temporary:
        temporary.write_text("note: new")
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o600


def test_what_comes_into_the_way_while_writing_is_left_alone(tmp_path: Path) -> None:
    """The place is looked at again when all is written."""

    def write() -> None:
        with replacing(tmp_path / "out", NOTE) as temporary:
            temporary.write_text("note: new")
            (tmp_path / "out").write_text("somebody else's")

    with pytest.raises(OutputError, match="out: not a note of ours, so it is not replaced; choose another place"):
        write()
    assert (tmp_path / "out").read_text() == "somebody else's"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_comes_into_the_way_at_the_very_end_is_left_alone(tmp_path: Path) -> None:
    """A new file takes its place only if that is still free: another program's appears once we have looked."""

    def appear(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.link" and watching:
            (tmp_path / "out").write_text("somebody else's")

    def write() -> None:
        with replacing(tmp_path / "out", NOTE) as temporary:
            temporary.write_text("note: new")

    watching = [True]
    sys.addaudithook(appear)  # stays for good; does nothing once `watching` is empty
    try:
        with pytest.raises(OutputError, match="out: not a note of ours"):
            write()
    finally:
        watching.clear()
    assert (tmp_path / "out").read_text() == "somebody else's"


def test_a_place_that_cannot_be_written_is_said() -> None:
    for path in ("/proc/nothing/out", "/nowhere/out", "/proc/version/out", "/" + "x" * 300):
        message = f"{path[:40]}.*: cannot be written: .*; choose another place"
        with pytest.raises(OutputError, match=message), replacing(path, NOTE):
            pass


KILLED = """
import os, signal, sys
from tests.test_atomic_write import NOTE
from tracekit.base.atomic_write import replacing
with replacing(sys.argv[1], NOTE) as temporary:
    temporary.write_text("note: half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_writer_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    """Neither the file of a writer that lives, or may live on another host, nor what only has such a name."""
    subprocess.run([sys.executable, "-c", KILLED, tmp_path / "out"], check=False)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(TEMPORARY_PREFIX)
    os.mkfifo(tmp_path / f"{TEMPORARY_PREFIX}pipe")
    (tmp_path / f"{TEMPORARY_PREFIX}folder").mkdir()
    kept = {f"{TEMPORARY_PREFIX}{name}" for name in ("pipe", "folder", "host2")}
    (tmp_path / f"{TEMPORARY_PREFIX}host2").touch()
    abandoned = tmp_path / f"{TEMPORARY_PREFIX}host3"
    abandoned.touch()
    os.utime(abandoned, (0, 0))
    if os.geteuid() == 0:  # who is not root cannot give a file away
        others = left.with_name(f"{left.name}x")
        others.touch()
        os.chown(others, 12345, 12345)
        kept.add(others.name)
    with replacing(tmp_path / "one", NOTE) as living:
        with replacing(tmp_path / "two", NOTE) as temporary:
            temporary.write_text("note: two")
            assert living.exists()
            assert not left.exists()
        living.write_text("note: one")
    assert {path.name for path in tmp_path.iterdir()} == kept | {"one", "two"}
    assert (tmp_path / "one").read_text() == "note: one"
