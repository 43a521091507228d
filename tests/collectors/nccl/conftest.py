"""The plugin as the tests load it: compiled here, every warning an error, each copy with a state of its own."""

import shutil
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from tests.collectors.nccl.harness import Nccl
from tracekit.collectors.nccl.rings import NcclRing, read_ring, ring_files

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "collectors" / "nccl"


@pytest.fixture(scope="session")
def plugin(tmp_path_factory) -> Path:
    """The shared library, compiled with the flags of an install and as strictly as the compiler can."""
    extensions = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    (ours,) = (one for one in extensions if one["name"] == "tracekit.collectors.nccl._plugin")
    library = tmp_path_factory.mktemp("plugin") / "plugin.so"
    flags, linked = ours["extra-compile-args"], ours["extra-link-args"]
    command = ["cc", *flags, "-Werror", "-fPIC", "-shared", "-o", library, SOURCES / "plugin.c", *linked]
    subprocess.run(command, check=True, capture_output=True)
    return library


@dataclass
class Loaded:
    """A loaded plugin and where its ring goes."""

    nccl: Nccl
    directory: Path

    @property
    def path(self) -> Path:
        (path,) = ring_files(self.directory / "attempt-000")
        return path

    @property
    def ring(self) -> NcclRing:
        return read_ring(self.path)


@pytest.fixture
def load(plugin, tmp_path, monkeypatch) -> Callable[..., Loaded]:
    """Loads a copy of the plugin into this process: another file is another library to the loader."""
    numbers = count()

    def loaded(version: int = 6, **variables: object) -> Loaded:
        directory = tmp_path / f"run-{next(numbers)}"
        directory.mkdir()
        for name, value in {"TRACEKIT_COLLECT_DIR": directory, "TRACEKIT_NCCL_SLOTS": 1024, **variables}.items():
            monkeypatch.setenv(name, str(value))
        library = shutil.copy(plugin, directory / "plugin.so")
        return Loaded(Nccl(library, version), directory)

    return loaded
