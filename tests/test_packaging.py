"""What a user installs: a wheel and an sdist hold all of tracekit, and nothing else goes into site-packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import tracekit

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
FOLDERS = ("collectors", "analysis", "dashboards")
INFO = f"tracekit_analysis-{tracekit.__version__}.dist-info"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a package is made of: building writes into the tree it builds."""
    copy = tmp_path_factory.mktemp("source") / "tracekit"
    copy.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in ("tracekit", *FOLDERS):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=unwanted)
    for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.md"), ROOT / "LICENSE", ROOT / "NOTICE"):
        shutil.copy(path, copy)
    return copy


@pytest.fixture(scope="module")
def sdist(source: Path) -> tarfile.TarFile:
    build = "import setuptools.build_meta as backend; print(backend.build_sdist('dist'))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (path,) = (source / "dist").glob("*.tar.gz")
    return tarfile.open(path)


@pytest.fixture(scope="module")
def wheel(sdist: tarfile.TarFile, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Made as pip does on a machine that has only the sdist: no links, no repository. Optimising would take longest."""
    folder = tmp_path_factory.mktemp("unpacked")
    compiler = tmp_path_factory.mktemp("compiler") / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    compiler.chmod(0o755)
    sdist.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    build = "import setuptools.build_meta as backend; backend.build_wheel('dist')"
    environment = {**os.environ, "CC": str(compiler)}
    subprocess.run([sys.executable, "-c", build], cwd=unpacked, env=environment, check=True, capture_output=True)
    (path,) = (unpacked / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def modules() -> set[str]:
    """Every module of the project by the path it has once installed."""
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tracekit").rglob("*.py")}
    for folder in FOLDERS:
        found |= {f"tracekit/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    return found


def test_a_wheel_adds_tracekit_and_its_metadata_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert top == {"tracekit", INFO}


def test_a_wheel_holds_every_module_and_data_file(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {name for name in names if name.endswith(".py")} == modules()
    assert {
        "tracekit/SKILL.md",
        "tracekit/py.typed",
        "tracekit/dashboards/documents/card.css",
        "tracekit/store/schema.sql",
        "tracekit/analysis/native/_native.abi3.so",
        "tracekit/collectors/importers/kineto/_events.abi3.so",
        "tracekit/collectors/nccl/_plugin.abi3.so",
        "tracekit/trace/_rows.abi3.so",
    } <= names


def test_the_licence_comes_with_every_distribution(sdist: tarfile.TarFile, wheel: zipfile.ZipFile) -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in licence
    assert wheel.read(f"{INFO}/licenses/LICENSE") == licence
    assert wheel.read(f"{INFO}/licenses/NOTICE") == (ROOT / "NOTICE").read_bytes()
    assert {"LICENSE", "NOTICE"} <= {name.partition("/")[2] for name in sdist.getnames()}


def test_one_wheel_serves_every_version_of_python(wheel: zipfile.ZipFile) -> None:
    (tags,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("/WHEEL"))
    assert "Tag: cp311-abi3-" in tags


def test_an_sdist_holds_every_module_and_data_file(sdist: tarfile.TarFile) -> None:
    names = {name.partition("/")[2] for name in sdist.getnames()}
    expected = {name for name in modules() if name.split("/")[1] not in FOLDERS}
    expected |= {name.removeprefix("tracekit/") for name in modules() if name.split("/")[1] in FOLDERS}
    assert expected <= names
    assert {"pyproject.toml", "tracekit/py.typed", "tracekit/store/schema.sql"} <= names
    assert "analysis/native/kernels.h" in names


def test_an_unpacked_wheel_runs(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Found first on the path, its own copies answer: the command, the three sub-packages and the SQL."""
    wheel.extractall(tmp_path)  # noqa: S202 - our own
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import tracekit.analysis.replay.kernel, tracekit.collectors.importers.published\n"
        "import tracekit.dashboards, tracekit.store\n"
        "from importlib.resources import files\n"
        "print(*{module.__file__ for name, module in sys.modules.items() if name.startswith('tracekit')}, sep='\\n')\n"
        "print(files('tracekit.store').joinpath('schema.sql').read_text()[:2])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    *paths, comment = ran.stdout.splitlines()
    assert comment == "--"
    assert len(paths) > 10
    assert all(path.startswith(str(tmp_path)) for path in paths)


def test_the_command_and_the_version_are_declared(wheel: zipfile.ZipFile) -> None:
    assert "tracekit = tracekit.__main__:main" in wheel.read(f"{INFO}/entry_points.txt").decode()
    metadata = wheel.read(f"{INFO}/METADATA").decode()
    assert "\nName: tracekit-analysis\n" in metadata
    assert f"Version: {tracekit.__version__}\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata
    for extra in ("dashboard", "dev"):
        assert f"Provides-Extra: {extra}\n" in metadata


def test_every_package_of_the_three_folders_is_listed() -> None:
    """setuptools is told the packages by name; one that is forgotten would be missing once installed."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = [".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "tracekit").rglob("__init__.py")]
    for folder in FOLDERS:
        inits = (ROOT / folder).rglob("__init__.py")
        found += ["tracekit." + ".".join(path.parent.relative_to(ROOT).parts) for path in inits]
    assert sorted(listed) == sorted(found)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_links_for_type_checkers_are_relative(folder: str) -> None:
    link = ROOT / "tracekit" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder


def test_a_strangers_package_written_over_ours_is_named(tmp_path: Path) -> None:
    """On the package index, `tracekit` is another project's, with the same import: pip replaces `__init__.py`."""
    package = tmp_path / "tracekit"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "0.3.1"\n')
    for name in ("__main__.py", "base"):
        (package / name).symlink_to(ROOT / "tracekit" / name)
    ran = subprocess.run([sys.executable, "-m", "tracekit", "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert f"{package / '__init__.py'} is another project's package of that name" in line
    assert line.endswith("pip uninstall tracekit, then pip install --force-reinstall tracekit-analysis")
