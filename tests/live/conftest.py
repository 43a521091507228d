"""What tests of a running job share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.writtenrun import WrittenRun


@pytest.fixture
def clock() -> Iterator[list[float]]:
    now = [1000.0]
    with mock.patch("tracekit.live.run.time.monotonic", side_effect=lambda: now[0]):
        yield now


@pytest.fixture
def written(tmp_path: Path) -> WrittenRun:
    return WrittenRun(tmp_path / "run", 4, per_host=2)
