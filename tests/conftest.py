"""Shared fixtures: the hand-made slow job as a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.handmade import slow_trace


@pytest.fixture
def slow_file(tmp_path: Path) -> Path:
    """The slow job of two steps as slow.parquet in an otherwise empty folder."""
    path = tmp_path / "slow.parquet"
    slow_trace().write_parquet(path)
    return path
