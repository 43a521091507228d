"""What all tests share: the hand-made slow job as a file, which tests run where, and which only on request."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.handmade import slow_trace

ROOT = Path(__file__).parent


@pytest.fixture
def slow_file(tmp_path: Path) -> Path:
    """The slow job of two steps as slow.parquet in an otherwise empty folder."""
    path = tmp_path / "slow.parquet"
    slow_trace().write_parquet(path)
    return path


@cache
def unit(file: str) -> str:
    """What runs in one process, of pytest-xdist's: a folder whose conftest.py sets up what serves all of it, or a file.

    `file`: relative to the repository.
    """
    folders = [folder for folder in Path(file).parents if ROOT.name in folder.parts[:1] and folder != Path(ROOT.name)]
    return str(next((folder for folder in folders if (ROOT.parent / folder / "conftest.py").exists()), file))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs the published traces, unless TRACEKIT_PUBLISHED says where they are; folders come first."""
    if "TRACEKIT_PUBLISHED" not in os.environ:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("published")])
        items[:] = [item for item in items if not item.get_closest_marker("published")]
    items.sort(key=lambda item: unit(file := item.nodeid.split("::")[0]) == file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`pytest -n 2` hands out units in order; pytest-xdist 3.8 loses its own groups under pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid.split("::", maxsplit=1)[0])

    config.option.loadscopereorder = False
    return Units(config, log) if config.getoption("dist") == "load" else None
