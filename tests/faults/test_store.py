"""A store outlives every file operation that fails, is cut short, or is the last one of its process.

Whatever was confirmed before is there, byte by byte; what is confirmed now is there and synced to the disk; anything
else is as before or done; the next writers succeed; nothing outside the store changes; an error is one sentence.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cases import case
from tests.faults.power import POWER, unsynced
from tests.faults.shim import FAULTS, preloaded
from tests.faults.sweep import OPERATIONS


def ran(library: Path, module: str, *arguments: str | Path) -> list[dict[str, Any]]:
    """The lines that a module of this folder prints, in a process that has the library preloaded."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.faults.{module}", *arguments],
        env=preloaded(library),
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(outcome: dict[str, Any]) -> None:
    with case((outcome["operation"], outcome["fault"])):
        assert not outcome["wrong"], "\n".join(outcome["wrong"])
        assert outcome["tries"]


@pytest.mark.slow
def test_some_file_operations_fail(library: Path, tmp_path: Path) -> None:
    """A sample of what follows: the first, and each thirteenth one after it."""
    faults = {"append": (POWER, "killed", "failing write"), "handle": ("short write", "full disk")}
    chosen = [f"{operation}/{fault}" for operation, several in faults.items() for fault in several]
    outcomes = ran(library, "sweep", tmp_path, "13", *chosen)
    for outcome in outcomes:
        check(outcome)
    endings = {(outcome["operation"], outcome["fault"]): outcome["endings"].keys() for outcome in outcomes}
    assert len(endings) == len(chosen)
    assert endings["append", "killed"] == {"killed"}
    assert "exit code 2" in endings["append", "failing write"]
    assert endings["handle", "full disk"] == {"exit code 2"}


@pytest.mark.nightly
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_file_operation_fails_once(operation: str, library: Path, tmp_path: Path) -> None:
    outcomes = ran(library, "sweep", tmp_path, "1", f"{operation}/")
    assert {outcome["fault"] for outcome in outcomes} == {POWER, *FAULTS}
    for outcome in outcomes:
        print(outcome["operation"], outcome["fault"], outcome["tries"], outcome["endings"])
        if outcome["tries"]:
            check(outcome)


@pytest.mark.nightly
def test_whoever_is_killed_leaves_what_others_confirmed(library: Path, tmp_path: Path) -> None:
    """Two writers and three readers, until 60 writers are dead."""
    (outcome,) = ran(library, "crowd", tmp_path, "60")
    assert outcome["died"]["writers"] == 60
    assert outcome["died"]["readers"]
    assert min(outcome["confirmed"].values()) > 10
    assert outcome["read"] > 10
    assert outcome["damages"] == []
    named, found = outcome["files"]
    assert named == found


def test_what_is_not_synced_is_named() -> None:
    """The log of the library, as of a catalogue that names a window of which only the bytes are synced."""
    store = Path("/store")
    lines = [
        "create\t/store/jobs/1/0.parquet\t",
        "write\t/store/jobs/1/0.parquet\t",
        "sync\t/store/jobs/1/0.parquet\t",
        "write\t/store/.tracekit.store-0\t",
        "rename\t/store/.tracekit.store-0\t/store/catalog.duckdb",
        "sync\t/store/jobs/1\t",
    ]
    assert list(unsynced(lines, store)) == [
        "/store/jobs/1: the name of /store/jobs/1/0.parquet, when the catalogue is replaced",
        "/store: the name of /store/catalog.duckdb, at the end",
    ]
