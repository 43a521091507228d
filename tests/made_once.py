"""What is dear to make is made once, by the first process of pytest-xdist that needs it, and read by the others."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

Made = TypeVar("Made")


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Made]) -> Made:
    """What `make` returns for a new folder of that name; it is pickled, for the other processes of this run."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"once-{name}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = folder / "result.pickle"
        if not result.exists():
            (folder / "made").mkdir()
            result.write_bytes(pickle.dumps(make(folder / "made")))
    made: Made = _read(result)
    return made


@cache
def _read(result: Path) -> Any:
    return pickle.loads(result.read_bytes())  # noqa: S301 - this run wrote it
