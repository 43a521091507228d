"""Files are written whole or not at all, and what is no file is never replaced by one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tracekit.errors import OutputError
from tracekit.writing import replacing


def test_a_file_is_replaced_only_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")

    def stop_halfway() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        stop_halfway()
    assert path.read_text() == "old"
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "out"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o640


def test_a_link_stays_a_link_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    with replacing(tmp_path / "link") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_a_pipe_behind_a_link_of_the_kernel_is_written() -> None:
    """/dev/stdout is one: it points at a pipe that has no path."""
    reading, writing = os.pipe()
    with replacing(f"/proc/self/fd/{writing}") as temporary:
        temporary.write_text("through")
    os.close(writing)
    with open(reading, "rb") as file:
        assert file.read() == b"through"


def test_a_device_or_pipe_is_written_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path(os.devnull), tmp_path / "pipe"):
        mode = path.stat().st_mode
        with replacing(path) as temporary:
            assert temporary == path
        assert path.stat().st_mode == mode


@pytest.mark.parametrize("path", ["/proc/nothing/out", "/nowhere/out", "/proc/version/out", "/" + "x" * 300])
def test_a_place_that_cannot_be_written_is_said(path: str) -> None:
    with pytest.raises(OutputError, match=f"{path}: cannot be written: .*; choose another place"), replacing(path):
        pass
