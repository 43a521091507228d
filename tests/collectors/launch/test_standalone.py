"""`tracekit-collect`: an install that touches nothing, and records what the whole of tracekit reads elsewhere."""

import ast
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

from tests.collectors.conftest import SCRIPTS, TIMEOUT_S, environment
from tests.handmade import read_any

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
#: Source folder -> the package that it is.
FOLDERS = {"tracekit": "tracekit", "collectors": "tracekit/collectors"}
ENTRY_POINT = {
    f"tracekit/collectors/record/inject/_tracekit_recorder-0.dist-info/{name}"
    for name in ("METADATA", "entry_points.txt")
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The distribution, built from a copy of the sources, so that nothing is left between them."""
    directory = tmp_path_factory.mktemp("standalone")
    for folder in FOLDERS:
        unwanted = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / folder, directory / folder, symlinks=True, ignore=unwanted)
    shutil.copy(ROOT / "LICENSE", directory)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(directory)!r})"
    command = [sys.executable, "-c", build]
    project = directory / "collectors" / "record" / "standalone"
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (built,) = directory.glob("*.whl")
    return built


def test_the_wheel_is_small_needs_nothing_and_is_a_part_of_tracekit(wheel):
    """Both distributions can be in one environment: what they share is the same, byte for byte."""
    assert wheel.stat().st_size < 5_000_000
    with zipfile.ZipFile(wheel) as files:
        (described,) = (name for name in files.namelist() if name.endswith("/METADATA") and name.count("/") == 1)
        about = Parser().parsestr(files.read(described).decode())
        modules = {name: files.read(name) for name in files.namelist() if name.endswith(".py")}
        assert files.read(described.replace("METADATA", "licenses/LICENSE")) == (ROOT / "LICENSE").read_bytes()
        others = {name for name in files.namelist() if name.startswith("tracekit/")} - set(modules)
    assert about.get_all("Requires-Dist") is None
    assert about["Requires-Python"] == ">=3.9"
    assert wheel.name.endswith("-py3-none-any.whl")  # one for every Python and platform
    assert others == ENTRY_POINT
    for name, content in modules.items():
        folder = next(folder for folder in reversed(FOLDERS) if name.startswith(f"{FOLDERS[folder]}/"))
        assert (ROOT / folder / name[len(FOLDERS[folder]) + 1 :]).read_bytes() == content
        ast.parse(content, feature_version=(3, 9))
    assert {Path(name).parent.name for name in modules} == {
        *("tracekit", "base", "callbacks", "trace", "collectors", "record", "inject", "launch", "run_directory")
    }


def requirements(name: str, found: set[str]) -> set[str]:
    """The distributions that `name` needs here, itself included; those of extras and other systems are not there."""
    if name not in found:
        found.add(name)
        for requirement in metadata.requires(name) or ():
            other = requirement.split(";")[0].split("[")[0].strip("() ")
            other = other[: next((at for at, char in enumerate(other) if char in " <>=!~("), len(other))]
            if "extra ==" not in requirement and any(True for _ in metadata.distributions(name=other)):
                requirements(other, found)
    return found


@pytest.fixture(scope="module")
def training(wheel, tmp_path_factory) -> Path:
    """The Python of an environment with torch, what torch needs, and the wheel."""
    directory = tmp_path_factory.mktemp("training")
    venv.create(directory / "venv", symlinks=True)
    python = directory / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    (packages,) = (directory / "venv" / "lib").glob("python*/site-packages")
    for name in requirements("torch", set()):
        found = metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or () if not file.parts[0].startswith((".", "__pycache__"))}:
            link = packages / top
            if not link.exists():
                link.symlink_to(found.locate_file(top))
    return python


def test_a_job_is_recorded_without_the_analysis_and_read_with_it(training, tmp_path):
    """Two ranks; nothing is written into the environment, and nothing heavy is in it."""
    packages = training.parents[1] / "lib"
    variables = environment(
        STEPS=12, PYTHONDONTWRITEBYTECODE=1, PATH=f"{training.parent}{os.pathsep}{os.environ['PATH']}"
    )
    heavy = "import importlib.util as u; print(*filter(u.find_spec, ('polars', 'duckdb', 'click', 'pyarrow')))"
    before = sorted(packages.rglob("*"))
    looked = subprocess.run([training, "-c", heavy], capture_output=True, text=True, check=True, env=variables)
    assert looked.stdout == "\n"
    ran = subprocess.run(
        [
            *(training.parent / "tracekit", "collect", "--segments", "run", "--steps", "2:9", "--every", "3", "--"),
            *(training, SCRIPTS / "ranks.py", "2", SCRIPTS / "quick.py"),
        ],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.splitlines()[-2:] == [
        "tracekit: recorded 2 ranks",
        f"tracekit: next, where tracekit is installed: tracekit import {tmp_path / 'run'}",
    ]
    assert sorted(packages.rglob("*")) == before
    trace = read_any(tmp_path / "run")
    assert (trace.layout.dp, trace.steps.tolist()) == (2, [2, 5, 8])
    assert trace.coverage().complete


def test_the_analysis_is_asked_for_by_name(training, tmp_path):
    """What only records says where the rest is, instead of a missing module."""
    ran = subprocess.run(
        [training, "-c", "import tracekit; tracekit.load"], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.stderr.splitlines()[-1] == (
        "ImportError: tracekit.load: tracekit-collect only records; install tracekit-analysis to analyse"
    )
    ran = subprocess.run(
        [training.parent / "tracekit", "collect", "--segments", "/dev/null/run", "--", "true"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1), ran.stderr
