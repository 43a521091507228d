"""Files that are small and claim to be huge cost little memory and time, and end in one sentence that names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import case
from tests.faults.bombs import BOMBS, MOST_BYTES
from tests.faults.test_store import ran

#: Of these, nothing is read but their size, or their existence.
CHECKED = {"hang, checked", "report, checked", "stray file, checked"}
HARMLESS = {"mark"}
#: Seconds of a processor each.
LONG = [name for name in BOMBS if name.startswith("gzip")]


def outcomes_are_short(library: Path, folder: Path, names: list[str]) -> None:
    for outcome in ran(library, "bombs", folder, *names):
        with case(outcome["bomb"]):
            expected = 2
            if outcome["bomb"] in CHECKED | HARMLESS:
                expected = 3 if outcome["bomb"] in CHECKED else 0
            assert outcome["code"] == expected, outcome
            assert outcome["MB"] < MOST_BYTES >> 20
            if expected == 2:
                (line,) = outcome["said"].splitlines()
                assert outcome["file"] in line
                assert len(line) < 2000
            assert "out of memory" not in outcome["said"]


def test_files_without_end_are_refused(library: Path, tmp_path: Path) -> None:
    """Files of 100 GB that take no space, in traces, dumps and every place of a store."""
    outcomes_are_short(library, tmp_path, [name for name in BOMBS if name not in LONG])


@pytest.mark.nightly
def test_small_files_that_unpack_to_8_gb_are_refused(library: Path, tmp_path: Path) -> None:
    outcomes_are_short(library, tmp_path, LONG)
