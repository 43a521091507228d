"""What all tests share: the hand-made slow job as a file, which tests run where, and which only on request."""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.handmade import slow_trace

ROOT = Path(__file__).parent
#: Folders whose set-up is to be made in one process only, for those of their subfolders, too.
DEAR = {ROOT / "collectors"}
#: The units that take longest.
LONGEST = (
    "tests/dashboards/pages",
    "tests/collectors",
    "tests/dashboards/web",
    "tests/dashboards",
    "tests/live/test_alerts.py",
    "tests/test_site.py",
    "tests/test_packaging.py",
    *(f"tests/collectors/launch/test_{name}.py" for name in ("hang", "doctor", "nodes", "terminal", "profiler")),
    "tests/collectors/nccl/test_launching.py",
    "tests/collectors/nccl",
    *(f"tests/test_{name}.py" for name in ("bad_input", "cli", "first_minutes", "absurd_sizes", "docs")),
    "tests/live/test_run.py",
)


@pytest.fixture
def slow_file(tmp_path: Path) -> Path:
    """The slow job of two steps as slow.parquet in an otherwise empty folder."""
    path = tmp_path / "slow.parquet"
    slow_trace().write_parquet(path)
    return path


@cache
def asked(file: Path, fixtures: frozenset[str]) -> bool:
    """Whether functions in a file have parameters of these names: pytest finds fixtures by them."""
    text = file.read_text()
    if fixtures.isdisjoint(re.findall(r"\w+", text)):
        return False
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return any(one.arg in fixtures for function in functions for one in function.args.args + function.args.kwonlyargs)


@cache
def provided(conftest: Path) -> frozenset[str]:
    """The fixtures of a conftest.py."""
    functions = [node for node in ast.walk(ast.parse(conftest.read_text())) if isinstance(node, ast.FunctionDef)]
    return frozenset(one.name for one in functions if any("fixture" in ast.unparse(how) for how in one.decorator_list))


@cache
def unit(file: str) -> str:
    """What one process of pytest-xdist runs: a file, or the files of a folder that share what a conftest.py sets up.

    `file`: relative to the repository.
    """
    path = ROOT.parent / file
    for folder in path.parents:
        if folder == ROOT:
            break
        conftest = folder / "conftest.py"
        if conftest.exists() and asked(path, provided(conftest)):
            return str((folder if folder in DEAR else path.parent).relative_to(ROOT.parent))
    return file


def turn(item: pytest.Item) -> int:
    """When a test begins: what takes longest first, so that all processes end together."""
    its_unit = unit(item.nodeid.split("::")[0])
    return LONGEST.index(its_unit) if its_unit in LONGEST else len(LONGEST)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs the published traces, unless TRACEKIT_PUBLISHED says where they are; put them in order."""
    if "TRACEKIT_PUBLISHED" not in os.environ:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("published")])
        items[:] = [item for item in items if not item.get_closest_marker("published")]
    items.sort(key=turn)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`pytest -n 3` hands out units in order; pytest-xdist 3.8 loses its own groups under pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid.split("::", maxsplit=1)[0])

    config.option.loadscopereorder = False
    return Units(config, log) if config.getoption("dist") == "load" else None
