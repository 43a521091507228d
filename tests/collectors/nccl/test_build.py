"""The plugin is compiled once per machine, whole or not at all."""

import os
import subprocess
import sys

import pytest

from tests.collectors.nccl.harness import VERSIONS
from tracekit.base.errors import OutputError
from tracekit.collectors.nccl import build


def test_it_is_compiled_once(tmp_path, monkeypatch):
    """The second call finds the first one's library, even where no compiler is left."""
    library = build.build_plugin(tmp_path)
    made = library.stat().st_mtime_ns
    monkeypatch.setenv("PATH", "")
    assert build.build_plugin(tmp_path) == library
    assert library.stat().st_mtime_ns == made
    assert list(tmp_path.iterdir()) == [library]


@pytest.mark.parametrize("what", ["the library", "its folder"])
def test_a_library_that_others_can_write_is_not_loaded(what, tmp_path):
    """The training would run it."""
    library = build.build_plugin(tmp_path / "cache")
    writable = library if what == "the library" else library.parent
    writable.chmod(0o777)
    with pytest.raises(OutputError, match="other users can write it, so it is not loaded"):
        build.build_plugin(tmp_path / "cache")


def test_a_library_of_another_user_is_not_loaded(tmp_path, monkeypatch):
    """Root's is: an administrator can have built it for all."""
    library, owner = build.build_plugin(tmp_path / "cache"), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 2)
    if owner == 0:
        assert build.build_plugin(tmp_path / "cache") == library
        os.chown(library, 1, -1)
    with pytest.raises(OutputError, match="other users can write it, so it is not loaded"):
        build.build_plugin(tmp_path / "cache")


def test_other_sources_make_another_library(tmp_path, monkeypatch):
    """The name carries the content."""
    before = build.build_plugin(tmp_path)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DANOTHER"))
    assert build.build_plugin(tmp_path) != before


def test_it_lives_in_the_users_cache(tmp_path, monkeypatch):
    """`$XDG_CACHE_HOME`, else `~/.cache`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.default_cache() == tmp_path / "tracekit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.default_cache() == tmp_path / ".cache" / "tracekit"


def test_without_a_compiler_it_says_so(tmp_path, monkeypatch):
    """One line, and nothing is left behind."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OutputError, match=r"no C compiler \(cc, gcc, clang\) on the PATH"):
        build.build_plugin(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    """The first line of its complaint."""
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'stdio.h: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(OutputError, match=r"cc cannot build the NCCL plugin: stdio\.h: No such file"):
        build.build_plugin(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_path_nccl_would_cut_off_is_refused(tmp_path):
    """It takes 255 bytes."""
    with pytest.raises(OutputError, match="too long, NCCL cuts paths at 255 bytes; set XDG_CACHE_HOME"):
        build.build_plugin(tmp_path / ("x" * 200) / ("y" * 50))


def test_a_cache_that_cannot_be_written_is_one_error(tmp_path):
    """Names the place and what to set."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        build.build_plugin(tmp_path / "file" / "cache")


def test_processes_that_build_at_once_all_succeed(tmp_path):
    """As the launchers of a node that starts many jobs do."""
    code = f"from tracekit.collectors.nccl.build import *; print(build_plugin(Path({str(tmp_path)!r})))"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=60)[0].strip() for process in started}
    assert [process.returncode for process in started] == [0] * 2
    assert paths == {str(path) for path in tmp_path.iterdir()}


def test_the_library_needs_libc_alone_shows_five_names_and_stays_loaded(plugin):
    """NCCL closes it behind its last communicator; code that runs then must still be there."""
    dynamic = subprocess.run(["readelf", "-d", plugin], capture_output=True, text=True, check=True).stdout
    needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line]
    assert all(name.startswith(("libc.", "ld-")) for name in needed)  # the loader serves thread-local variables
    assert "NODELETE" in dynamic
    symbols = subprocess.run(["nm", "-D", "--defined-only", plugin], capture_output=True, text=True, check=True).stdout
    assert sorted(line.split()[-1] for line in symbols.splitlines()) == [
        *(f"ncclProfiler_v{version}" for version in VERSIONS),
        "tracekit_nccl_set_step",
    ]
