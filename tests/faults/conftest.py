"""The library that makes file operations fail, compiled once."""

from pathlib import Path

import pytest

from tests.faults.shim import build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of `shim.c`."""
    return build(tmp_path_factory.mktemp("faults"))
