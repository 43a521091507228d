"""What all tests share: the hand-made slow job as a file, which tests run where, and which only on request."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.handmade import slow_trace

ROOT = Path(__file__).parent
#: What costs much to set up and serves many files; all that use it go to one worker of pytest-xdist, these first.
SHARED = {"browser": {"visit", "serve", "serving", "browser", "sample_store"}, "runs": {"runs", "alone"}}


@pytest.fixture
def slow_file(tmp_path: Path) -> Path:
    """The slow job of two steps as slow.parquet in an otherwise empty folder."""
    path = tmp_path / "slow.parquet"
    slow_trace().write_parquet(path)
    return path


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs the published traces, unless TRACEKIT_PUBLISHED says where they are; group the others."""
    if "TRACEKIT_PUBLISHED" not in os.environ:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("published")])
        items[:] = [item for item in items if not item.get_closest_marker("published")]
    files = {item.path: str(item.path.relative_to(ROOT)) for item in items}
    for item in items:  # a file stays together: its fixtures serve all of its tests
        for group, fixtures in SHARED.items():
            if fixtures & set(getattr(item, "fixturenames", ())):
                files[item.path] = group
    items.sort(key=lambda item: [*SHARED, files[item.path]].index(files[item.path]))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(files[item.path]))
