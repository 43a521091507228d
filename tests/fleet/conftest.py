"""What the tests of fleets share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.fleet.buckets import CLOUDS, serving
from tracekit.base import paths


@pytest.fixture(params=CLOUDS)
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A cloud that is a server of this test, by the scheme of its addresses."""
    yield from _cloud(request.param, monkeypatch)


@pytest.fixture
def throttled_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """S3 is a server of this test, which refuses every third request as one too many."""
    yield from _cloud("s3", monkeypatch, lambda number: number % 3 == 2)


@pytest.fixture
def busy_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """S3 is a server of this test, which refuses its first requests as too many, longer than a first try takes."""
    yield from _cloud("s3", monkeypatch, lambda number: number < paths._FIRST_ATTEMPTS)


def _cloud(scheme: str, monkeypatch: pytest.MonkeyPatch, refused: Callable[[int], bool] | None = None) -> Iterator[str]:
    paths._filesystem.cache_clear()  # of another environment
    with serving(scheme, refused) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield scheme
