"""What the tests of fleets share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fleet.buckets import serving_s3


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """S3 is a server of this test."""
    with serving_s3() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield
