"""Many cases of one behaviour in one test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def case(name: object) -> Iterator[None]:
    """Whatever fails within names the case."""
    try:
        yield
    except BaseException as failure:
        failure.add_note(f"in the case {name!r}")
        raise
