"""What tests of a running job share."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.writtenrun import WrittenRun


@pytest.fixture
def written(tmp_path: Path) -> WrittenRun:
    return WrittenRun(tmp_path / "run", 4, per_host=2)
