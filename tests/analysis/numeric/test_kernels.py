"""Kernels run from an installation that cannot be written to, wherever their machine code can or cannot be kept."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
KERNEL = """
from tracekit.analysis.numeric.kernels import kernel

@kernel
def twice(values):
    return values * 2
"""
RUN = """
import json, os, sys, tempfile
if len(sys.argv) > 1:
    tempfile.tempdir = sys.argv[1]
import numpy as np
import tracekit.analysis.replay.engine
from tracekit.analysis import small
assert not os.access(os.path.dirname(small.__file__), os.W_OK), "the installation can be written to"
assert small.twice(np.arange(3)).tolist() == [0, 2, 4]
print(json.dumps(sum(small.twice.stats.cache_hits.values())))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An installed tracekit, with one more kernel, that cannot be written to."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "tracekit", site / "tracekit", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "tracekit" / "analysis" / "small.py").write_text(KERNEL)
    folders = [site, *(path for path in site.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    yield site
    for folder in folders:
        folder.chmod(0o755)


def obey_permissions() -> None:
    """Take from root the right to write anywhere: CAP_DAC_OVERRIDE, from the bounding set."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(24, 1)


def no_space() -> None:
    obey_permissions()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))


def run(site: Path, work: Path, *arguments: Path, preexec_fn: Callable[[], None] = obey_permissions, **env: Any) -> int:
    """Run the kernel in `work` without a home that can be made; says how often the cache had its machine code."""
    unwanted = {"NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "PYTHONPYCACHEPREFIX"}
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment |= {"HOME": "/proc/nobody", "PYTHONPATH": str(site), **{name: str(env[name]) for name in env}}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=preexec_fn,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    hits: int = json.loads(done.stdout)
    return hits


def test_without_any_place_to_keep_them_kernels_are_compiled_in_memory(site: Path, tmp_path: Path) -> None:
    """A home that is no absolute path, as where the user has none, does not end up in the working directory."""
    assert run(site, tmp_path, Path("/proc/nothing"), HOME="home") == 0
    assert list(tmp_path.iterdir()) == []


def test_without_a_home_they_are_kept_in_a_private_temporary_folder(site: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    assert run(site, tmp_path / "work", TMPDIR=tmp_path) == 0
    kept = tmp_path / f"tracekit-{os.geteuid()}"
    assert kept.stat().st_mode & 0o777 == 0o700
    assert run(site, tmp_path / "work", TMPDIR=tmp_path) == 1
    for path in kept.rglob("*.nb*"):
        path.write_bytes(path.read_bytes()[:20])
    assert run(site, tmp_path / "work", TMPDIR=tmp_path) == 0  # damaged, so compiled again, and repaired
    assert run(site, tmp_path / "work", TMPDIR=tmp_path) == 1
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize("unsafe", ["open to others", "a link", "in a folder open to others"])
def test_machine_code_is_not_kept_where_others_could_change_it(unsafe: str, site: Path, tmp_path: Path) -> None:
    temporary, elsewhere = tmp_path / "tmp", tmp_path / "elsewhere"
    temporary.mkdir()
    elsewhere.mkdir(mode=0o700)
    ours = temporary / f"tracekit-{os.geteuid()}"
    if unsafe == "open to others":
        ours.mkdir()
        ours.chmod(0o777)
    elif unsafe == "a link":
        ours.symlink_to(elsewhere)
    else:
        temporary.chmod(0o777)
    assert run(site, tmp_path, TMPDIR=temporary) == 0
    assert list(elsewhere.iterdir()) == []
    assert not ours.exists() or list(ours.iterdir()) == []


def test_a_full_disk_under_the_cache_costs_no_run(site: Path, tmp_path: Path) -> None:
    assert run(site, tmp_path, TMPDIR=tmp_path, preexec_fn=no_space) == 0
