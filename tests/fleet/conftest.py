"""What the tests of fleets share."""

from __future__ import annotations

from collections.abc import Iterator

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
    yield from _cloud("s3", monkeypatch, throttling=True)


def _cloud(scheme: str, monkeypatch: pytest.MonkeyPatch, *, throttling: bool = False) -> Iterator[str]:
    paths._filesystem.cache_clear()  # of another environment
    with serving(scheme, throttling=throttling) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield scheme
