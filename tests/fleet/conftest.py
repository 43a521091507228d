"""What the tests of fleets share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fleet.buckets import serving_s3


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """S3 is a server of this test."""
    yield from _s3(monkeypatch, throttling=False)


@pytest.fixture
def throttled_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same, but every third request is refused as one too many."""
    yield from _s3(monkeypatch, throttling=True)


def _s3(monkeypatch: pytest.MonkeyPatch, *, throttling: bool) -> Iterator[None]:
    with serving_s3(throttling=throttling) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield
